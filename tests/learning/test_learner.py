"""The learner: the gradient does not depend on how the work is divided, log-probs equal transformers', and the optimizer is
safe."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import SMALL, log_distributions, make_group, plain_log_probs, relative, run_script, whole
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner, lr_factor
from rl.model import log_probs as log_probs_module

BUDGETS = [32, 100, 4096]
GRADIENTS = "tests/programs/gradients.py"


@pytest.fixture(scope="module")
def compute(tmp_path_factory):
    """Return the results that gradients.py saves for these arguments."""
    directory = tmp_path_factory.mktemp("gradients")

    def run(model, ranks, budgets=BUDGETS, groups=5, responses=3, logits_at_once=None, **flags) -> dict:
        out = directory / f"{len(list(directory.iterdir()))}.pt"
        what = {"budgets": budgets, "groups": groups, "responses": responses, "logits_at_once": logits_at_once, "flags": flags}
        run_script(GRADIENTS, model, out, json.dumps(what), ranks=ranks, timeout=120)
        return torch.load(out)

    return run


@pytest.fixture(scope="module")
def reference(compute, models):
    """Return the log-probs and the gradient from transformers alone: one forward pass per response, without padding, in double
    precision."""
    data = compute(models["qwen2-tied"], 1)
    model = AutoModelForCausalLM.from_pretrained(models["qwen2-tied"], attn_implementation="eager").double()
    prompts = [torch.tensor(prompt) for prompt in data["prompts"]]
    batch = SimpleNamespace(prompts=prompts, token=data["token"], lengths=data["lengths"])
    rows = torch.cat([*log_distributions(lambda ids: model(ids).logits, batch, temperature=0.7)])  # [N, V]
    chosen, entropy = rows[torch.arange(len(rows)), data["token"].long()], -(rows.exp() * rows).sum(-1)
    ((chosen + 0.1 * entropy) * data["weight"]).mean().backward()
    parameters = dict(model.named_parameters())
    gradient = torch.cat([parameters[name].grad.flatten() for name in data["names"]])
    return data, chosen.detach(), gradient


@pytest.mark.runs
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probs_and_gradient_are_those_of_transformers_however_the_work_is_cut(
    compute, models, reference, ranks, checkpointing
):
    data = compute(models["qwen2-tied"], ranks, gradient_checkpointing=checkpointing)
    assert data["32/micros"] > data["100/micros"] > data["4096/micros"] == 1
    whole, log_probs, gradient = reference
    for budget in BUDGETS:
        torch.testing.assert_close(data[f"{budget}/log_prob"].double(), log_probs, atol=1e-5, rtol=1e-5)
        assert torch.equal(data[f"{budget}/log_prob"], data[f"{budget}/ref"])
        assert relative(data[f"{budget}/grad"], gradient) < 5e-6
        assert relative(data[f"{budget}/grad"], whole["4096/grad"]) < 1e-6


@pytest.mark.parametrize(("kind", "tied"), [(Qwen2Config, True), (Qwen3Config, False)])
def test_a_dense_model_on_one_rank_learns_as_plain_torch_does_bit_for_bit(ranks, tmp_path, kind, tied):
    """Three updates of three micro-batches of a sequence equal transformers' forward pass and torch's AdamW. What large models
    need rounds nothing unless it is asked for. Each query has a head of keys and values, so that sums have one order."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SMALL | {"num_key_value_heads": 4}, head_dim=16, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    flags = {"lr": 1e-2, "lr_warmup_steps": 0, "lr_scheduler_type": "constant", "max_tokens_per_micro_batch": 40}
    learner = Learner(str(tmp_path), LearnerArgs(**flags), ranks, 10, temperature=0.7)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    for update in range(3):
        rng = np.random.default_rng(update)
        batch = Batch.of([make_group(t, [n], prompt=5 + t, rng=rng) for t, n in enumerate([20, 17, 28])])
        micros = micro_batches(batch, torch.arange(3), 40, ranks)
        assert len(micros) == 3
        for micro in micros:
            out = learner.forward(micro, "loss")
            log_prob, entropy = out.log_prob, out.entropy
            weight = torch.linspace(-1, 1, len(log_prob))
            ((log_prob + 0.1 * entropy) * weight).sum().backward()
            response = int(batch.seq[micro.index[0]])
            prompt, tokens = batch.prompts[response], batch.token[batch.seq == response].long()
            ids = torch.cat([torch.from_numpy(prompt).long(), tokens])[None]
            hidden = plain.model(ids, use_cache=False)[0][0, len(prompt) - 1 : -1]
            expected = (F.linear(hidden, plain.lm_head.weight) / 0.7).log_softmax(-1)  # [n, V]
            chosen = -F.nll_loss(expected, tokens, reduction="none")
            assert torch.equal(log_prob.detach(), chosen.detach())
            ((chosen - 0.1 * (expected.exp() * expected).sum(-1)) * weight).sum().backward()
        for name, parameter in learner.parameters.items():
            assert torch.equal(whole(parameter.grad), plain.get_parameter(name).grad), name
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert learner.step()["actor/grad_norm"] == float(norm) > 1
        optimizer.step()
        optimizer.zero_grad()
    assert learner.updated == 1, "one training step, for the schedule of the rate"
    for name, weight in learner.weights():
        assert torch.equal(weight, plain.get_parameter(name)), name


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3_5"])
def test_two_backward_passes_in_several_threads_have_the_same_bits(models, ranks, kind):
    """A prompt's last hidden state predicts the first token of all of its responses: threads that add to it at the same time
    would do so in any order. The second part does not depend on luck: torch's `x[index]` adds with atomic operations."""
    learner = Learner(models[kind], LearnerArgs(), ranks, total_steps=1)
    batch = Batch.of([make_group(0, [1] * 1024, prompt=5)])
    (micro,) = micro_batches(batch, torch.arange(1024), 8192, ranks)
    weight = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        log_prob = learner.forward(micro).log_prob
        of = (log_prob * weight).sum(), learner.parameters.values()
        passes = [torch.autograd.grad(*of, retain_graph=True) for _ in range(12)]
    finally:
        torch.set_num_threads(threads)
    for other in passes[1:]:
        assert all(map(torch.equal, passes[0], other))
    assert "IndexBackward0" not in operations(log_prob)


def operations(*outputs: torch.Tensor) -> set[str]:
    """Return the names of the operations that a backward pass consists of."""
    found, left = set(), [output.grad_fn for output in outputs]
    while left:
        if (node := left.pop()) and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return {node.name() for node in found}


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0 + i / 4 for i in range(8)], "long_factor": [9.0] * 8}
LONGROPE |= {"original_max_position_embeddings": 128, "rope_theta": 1e4}
MIXTURE = dict(num_local_experts=4, num_experts_per_tok=2)
OF_OTHERS = {  # what a config may ask for, besides the families that most people train
    "LlamaConfig": dict(rope_parameters=LONGROPE),
    "Phi3Config": dict(rope_parameters=LONGROPE, pad_token_id=0, resid_pdrop=0.5, embd_pdrop=0.5),
    "PhimoeConfig": dict(router_jitter_noise=0.5, input_jitter_noise=0.5, **MIXTURE),
    "MixtralConfig": dict(router_jitter_noise=0.5, **MIXTURE),
    "Starcoder2Config": dict(residual_dropout=0.5, embedding_dropout=0.5, attention_dropout=0.5),
    "SeedOssConfig": dict(residual_dropout=0.5, attention_dropout=0.5, head_dim=16),
    "OlmoConfig": dict(attention_dropout=0.5),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", OF_OTHERS)
def test_neither_noise_nor_memory_without_values_is_trained(ranks, tmp_path, kind, checkpointing):
    """Log-probs and gradient are those of transformers' model in evaluation, which is what samples."""
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SMALL | OF_OTHERS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    learner = Learner(str(tmp_path), LearnerArgs(gradient_checkpointing=checkpointing), ranks, total_steps=1)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    batch = Batch.of([make_group(t, [20, 9], prompt=5 + t, rng=np.random.default_rng(t)) for t in range(2)])
    (micro,) = micro_batches(batch, torch.arange(4), 1000, ranks)
    weight = torch.linspace(-1, 1, len(batch.token))
    times = []
    learner.policy.model.model.layers[0].register_forward_pre_hook(lambda *_: times.append(1))
    log_prob = learner.forward(micro).log_prob
    (log_prob * weight[micro.index]).sum().backward()
    assert len(times) == 1 + checkpointing
    expected = torch.cat(plain_log_probs(lambda ids: plain(ids, use_cache=False).logits, batch))
    torch.testing.assert_close(log_prob, expected[micro.index], atol=1e-4, rtol=1e-4)
    (expected * weight).sum().backward()
    for name, parameter in learner.parameters.items():
        assert relative(whole(parameter.grad), plain.get_parameter(name).grad) < 1e-4, name


@pytest.mark.parametrize(("allowed", "kept"), [(0, 0), (5, 0), (16, 12), (24, 23), (100, 23)])  # of 23 tokens, 6 in a chunk
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("use_entropy", [False, True])
def test_chunks_give_the_gradient_of_autograd(use_entropy, with_bias, dtype, allowed, kept, monkeypatch):
    """Also in a second backward pass of the same graph."""
    torch.manual_seed(0)
    n, d, vocabulary = 23, 8, 50
    leaves = [torch.randn(n, d), torch.randn(vocabulary, d), torch.randn(vocabulary) if with_bias else None]
    leaves = [leaf if leaf is None else leaf.to(dtype).requires_grad_() for leaf in leaves]
    labels, weight = torch.randint(vocabulary, (n,)), torch.randn(n)

    made, make = [], log_probs_module._product
    monkeypatch.setattr(log_probs_module, "IN_CACHE", 4 * vocabulary)
    monkeypatch.setattr(log_probs_module, "_product", lambda *args: made.append(len(args[1])) or make(*args))

    def gradients(log_prob, entropy):
        loss = ((log_prob + (0.3 * entropy if use_entropy else 0)) * weight).sum()
        return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], retain_graph=True)

    log_probs = (torch.nn.functional.linear(*leaves).float() / 0.7).log_softmax(-1)
    whole = log_probs.gather(1, labels[:, None]).squeeze(1), -(log_probs.exp() * log_probs).sum(-1)
    none_kept, chunked = (
        log_probs_module.ChunkedLogProbs.apply(*leaves, labels, 0.7, True, 6 * vocabulary, most * vocabulary)
        for most in (0, allowed)
    )
    assert all(map(torch.equal, none_kept, chunked))  # the old log-probs are made without, the update's with
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)
    expected = gradients(*whole)
    made.clear()
    for tokens in (n - kept, n - kept + n):  # a second backward pass makes all of them
        torch.testing.assert_close(gradients(*chunked), expected, atol=1e-5, rtol=1e-5)
        assert sum(made) == tokens


WITHOUT = [  # flags; the factor of the loss, and whether there is something to learn
    ({}, 0.0, True),
    ({}, 1.0, False),
    ({"optim": "adamw_8bit"}, 0.0, True),
    ({"dtype": "bfloat16"}, 1.0, False),
    ({"lora_rank": 4}, 0.0, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "factor", "has_signal"), WITHOUT)
def test_a_step_without_a_signal_changes_nothing(models, ranks, flags, factor, has_signal):
    """Neither weights nor moments, to the bit, though AdamW's moments and weight decay would move the weights. The schedule
    waits, also across a checkpoint."""
    args = LearnerArgs(lr=1e-2, lr_warmup_steps=2, weight_decay=0.1, **flags)

    def take(learner: Learner, step: int, factor: float = 1.0, has_signal: bool = True) -> dict[str, float]:
        learner.begin_step(has_signal)
        batch = Batch.of([make_group(step, [9, 5])])
        for _ in range(2):  # two optimizer steps
            for micro in micro_batches(batch, torch.arange(2), 100, learner.ranks):
                (-factor * learner.forward(micro).log_prob.sum()).backward()
            metrics = learner.step()
        return metrics

    with_gap, without = (Learner(models["qwen3"], args, ranks, total_steps=12) for _ in range(2))
    for step in (1, 2, 3):
        assert take(with_gap, step) == take(without, step)
    before = {name: tensor.clone() for name, tensor in with_gap.state_tensors().items()}
    for step in (4, 5):
        metrics = take(with_gap, step, factor, has_signal)
        assert (metrics["actor/grad_norm"] > 0) == bool(factor) and metrics["actor/updated_steps"] == 3
        assert metrics["actor/skipped_steps"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in with_gap.state_tensors().items())
    assert with_gap.state() | {"steps": 3} == without.state()
    resumed = Learner(models["qwen3"], args, ranks, total_steps=12)
    for name, tensor in resumed.state_tensors().items():
        tensor.copy_(with_gap.state_tensors()[name])
    resumed.restore(with_gap.state(), None)
    expected = take(without, 6)
    assert take(with_gap, 6) == take(resumed, 6) == expected
    assert expected["actor/lr"] == args.lr * lr_factor(3, 12, args) and expected["actor/updated_steps"] == 4
    for name, tensor in without.state_tensors().items():
        assert torch.equal(tensor, with_gap.state_tensors()[name]) and torch.equal(tensor, resumed.state_tensors()[name]), name


@pytest.mark.runs
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_non_finite_gradient_is_skipped_by_all_ranks_and_counted(models, ranks):
    run_script("tests/programs/non_finite.py", models["qwen2-untied"], ranks=ranks, timeout=120)
