"""The learner's memory flags change only where moments, gradients and activations are stored, and in which precision."""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import SMALL, make_group, run_script
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

import train_sync
from rl import training_run
from rl.errors import UserError
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.compact_adamw import CompactAdamW
from rl.learning.learner import Learner
from rl.learning.token_budget import choose_micro_batch_tokens, settled
from rl.model.log_probs import ChunkedLogProbs
from rl.model.policy import LOGITS_KEPT
from rl.model.shards import local
from rl.ranges import check
from rl.record.precision import in_words, precisions
from rl.training_run import TrainingRun
from tools.plan.memory_count import MemoryCount

CASES = {
    "moments on the host": {"optimizer_offload": True},
    "8 bits": {"optim": "adamw_8bit"},
    "8 bits on the host": {"optim": "adamw_8bit", "optimizer_offload": True},
    "gradients in bf16": {"grad_dtype": "bfloat16"},
}
QUICK = "8 bits on the host"
COMPACT = [pytest.param(flags, id=name, marks=[pytest.mark.slow] * (name != QUICK)) for name, flags in CASES.items()]


def make_learner(model: str, ranks, **flags) -> Learner:
    args = LearnerArgs(lr=1e-2, lr_warmup_steps=0, lr_scheduler_type="constant", **flags)
    check(args)
    return Learner(model, args, ranks, 100)


def gradients(learner: Learner, seed: int) -> list[torch.Tensor]:
    """Gather the gradients of two or more micro-batches, the same for all learners."""
    rng = np.random.default_rng(seed)
    batch = Batch.of([make_group(t, [3, 9, 5, 7], rng=rng) for t in range(2)])
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), 40, learner.ranks)
    assert len(micros) > 1
    for micro in micros:
        log_prob, _ = learner.log_probs(micro)
        (-log_prob.sum() / len(batch.token)).backward()
    return [local(p.grad) for p in learner.parameters.values()]


def update(learner: Learner, seed: int) -> dict[str, float]:
    gradients(learner, seed)
    return learner.step()


def copy_state(half: Learner, rest: Learner) -> None:
    """Copy one learner's state to another through the tensors of a checkpoint."""
    saved = {name: local(tensor).clone() for name, tensor in half.state_tensors().items()}
    for name, tensor in rest.state_tensors().items():
        local(tensor).copy_(saved[name])
    rest.restore(half.state(), half.rank_state())


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in learner.weights()])


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


# ------------------------------------------------------------------------------------------------------ the learner


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_moments_on_the_host_and_inputs_of_layers_on_the_host_change_no_bit(models, ranks, dtype):
    flags = {"dtype": dtype, "gradient_checkpointing": True}
    plain = make_learner(models["qwen3"], ranks, **flags)
    other = make_learner(models["qwen3"], ranks, optimizer_offload=True, activation_offload=True, **flags)
    assert other.optimizer.on_host and not getattr(plain.optimizer, "on_host", False)
    first = weights(plain)
    for seed in range(3):
        assert update(plain, seed) == update(other, seed)
    assert torch.equal(weights(plain), weights(other)) and not torch.equal(weights(plain), first)
    states = plain.state_tensors(), other.state_tensors()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(local(states[0][name]), local(states[1][name])) for name in states[0])
    assert plain.state() == other.state()


@pytest.mark.parametrize("flags", COMPACT)
def test_training_goes_as_with_plain_adamw(models, ranks, flags):
    """Over 10 updates at a high rate the weights move nearly as far in nearly the same direction."""
    plain, other = make_learner(models["qwen2-tied"], ranks), make_learner(models["qwen2-tied"], ranks, **flags)
    first = weights(plain)
    for seed in range(10):
        update(plain, seed), update(other, seed)
    assert relative(weights(other) - first, weights(plain) - first) < 0.05


@pytest.mark.parametrize("flags", COMPACT)
def test_a_run_resumes_from_its_state_bit_for_bit(models, ranks, flags):
    whole, half, rest = (make_learner(models["moe"], ranks, **flags) for _ in range(3))
    for seed in range(4):
        update(whole, seed)
        if seed < 2:
            update(half, seed)
    copy_state(half, rest)
    for seed in (2, 3):
        update(rest, seed)
    assert torch.equal(weights(rest), weights(whole))


@pytest.mark.slow
def test_a_checkpoint_in_8_bits_is_read_in_another_layout_bit_for_bit(models, tmp_path):
    """Three learners split rows and experts unevenly, two share the experts, then one has all."""
    came_from, first = "-", None
    for ranks, layout in [(3, {}), (2, {"expert_parallel": 2, "optimizer_offload": True}), (1, {})]:
        out, flags = tmp_path / str(ranks), json.dumps({"optim": "adamw_8bit"} | layout)
        out.mkdir()
        run_script("tests/programs/reshard.py", models["moe"], flags, came_from, out, ranks=ranks, timeout=120)
        found, came_from = load_file(out / "tensors.safetensors"), out / "step_000001"
        first = first or found
        assert found.keys() == first.keys() and all(torch.equal(found[key], first[key]) for key in first), ranks
    codes = [tensor for tensor in first.values() if tensor.dtype == torch.uint8]
    assert len(codes) > 20 and all(len(tensor.unique()) > 8 for tensor in codes)
    with pytest.raises(AssertionError, match=r"exp_avg\S* is"):  # another optimizer's moments
        run_script("tests/programs/reshard.py", models["moe"], "{}", came_from, tmp_path, ranks=None, timeout=120)


def test_gradients_in_bf16_are_kept_so_and_their_norm_is_not(models, ranks):
    plain, other = make_learner(models["qwen3"], ranks), make_learner(models["qwen3"], ranks, grad_dtype="bfloat16")
    right, found = gradients(plain, 0), gradients(other, 0)
    assert {grad.dtype for grad in found} == {torch.bfloat16} != {grad.dtype for grad in right}
    assert all(relative(a, b) < 0.01 for a, b in zip(found, right, strict=True))
    exact = math.sqrt(sum(float(grad.double().square().sum()) for grad in found))
    assert other.step()["actor/grad_norm"] == pytest.approx(exact, rel=1e-6)


def test_gradients_are_counted_as_such(models, ranks):
    """Including those that FSDP has reduced."""
    learner = make_learner(models["qwen3"], ranks, dtype="bfloat16")
    with MemoryCount() as count:
        own = sum(grad.numel() for grad in gradients(learner, 0))
    assert count.host.live["gradients"] == pytest.approx(4 * own, rel=0.01) and count.host.live["gathered layers"] < own


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"optimizer_offload": True, "param_offload": True}, "--optimizer-offload: --param-offload keeps the moments"),
        ({"activation_offload": True}, "--activation-offload moves the inputs that --gradient-checkpointing keeps"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(flags, said):
    with pytest.raises(UserError, match=re.escape(said)):
        check(LearnerArgs(**flags))


# ------------------------------------------------------------------------------------------------------ 8 bits


def nearest(x: np.ndarray, signed: bool) -> np.ndarray:
    """x [C] as 8 bits hold it, from the paper's words: each block of 256 over its largest magnitude, and of 7 decades below 1,
    each cut into twice as many parts as the one below, the middle that is nearest; 0 and 1 besides."""
    known = [0.0, 1.0]
    for exponent in range(-6, 1):
        edges = np.linspace(0.1, 1, 2 ** (exponent + 6 + (not signed)) + 1) * 10.0**exponent
        for middle in (edges[1:] + edges[:-1]) / 2:
            known += [middle, -middle] if signed else [middle]
    assert len(known) == 256
    known, out = np.array(known), np.zeros_like(x)
    for start in range(0, len(x), 256):
        block = x[start : start + 256]
        if largest := abs(block).max():
            distance = abs(block[:, None] / largest - known)
            out[start : start + 256] = known[distance.argmin(1)] * largest
    return out


def adamw_in_8_bits(value, grads, lr, betas, weight_decay) -> np.ndarray:
    """value [R, C] after a step with each gradient, in double precision, row by row."""
    first, root = np.zeros_like(value), np.zeros_like(value)  # as they are kept
    for t, grad in enumerate(grads, start=1):
        m = betas[0] * first + (1 - betas[0]) * grad
        v = betas[1] * root**2 + (1 - betas[1]) * grad**2
        step = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + 1e-8)
        value = value * (1 - lr * weight_decay) - lr * step
        first = np.stack([nearest(row, True) for row in m])
        root = np.stack([nearest(row, False) for row in np.sqrt(v)])
    return value


@pytest.mark.parametrize("shape", [(3, 256), (5, 600), (7, 65)])
def test_8_bits_are_those_of_the_paper(shape, monkeypatch):
    """Gradients over seven decades; pieces of 16 rows, of which the second is not full."""
    monkeypatch.setattr("rl.learning.compact_adamw.PIECE", 1)
    rng = np.random.default_rng(0)
    shape = (shape[0] + 16, shape[1])
    start = rng.standard_normal(shape)
    grads = [rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 1, shape) for _ in range(4)]
    parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer = CompactAdamW([parameter], 0.1, (0.9, 0.95), 0.01, on_host=True, in_8_bits=True)
    for grad in grads:
        parameter.grad = torch.tensor(grad, dtype=torch.float32)
        optimizer.step()
    right = adamw_in_8_bits(start, grads, 0.1, (0.9, 0.95), 0.01)
    off = abs(parameter.detach().numpy() - right) > 1e-4
    assert off.mean() < 1e-3  # where a rounding to fp32 has chosen the neighbour of the nearest
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.uint8


def test_moments_in_8_bits_take_a_quarter_of_the_bytes(models, ranks):
    plain, other = (make_learner(models["qwen3"], ranks, optim=optim) for optim in ("adamw", "adamw_8bit"))
    sizes = [sum(t.nbytes for n, t in of.state_tensors().items() if n.startswith("exp")) for of in (plain, other)]
    assert 0.25 < sizes[1] / sizes[0] < 0.29  # rows of 64 elements have a scale each, norms and heads' stay in fp32


# -------------------------------------------------------------------------------------------------- what is reported and kept


def test_the_precision_of_everything_is_said_unless_all_is_fp32():
    plain, compact = train_sync.Args(), train_sync.Args(dtype="bfloat16", optim="adamw_8bit", optimizer_offload=True)
    assert in_words(precisions(plain)) == ""
    words = "master weights float32 on the host, computation bfloat16, gradients and their reduction float32, "
    assert in_words(precisions(compact)) == f"precision: {words}moments 8 bits on the host, generators bfloat16"
    offloaded = precisions(train_sync.Args(param_offload=True, grad_dtype="bfloat16", rollout_dtype="bfloat16"))
    assert [how for how in offloaded.values() if how.endswith(" on the host")] == [
        "float32 on the host",
        "bfloat16 on the host",
        "float32 on the host",
    ]
    assert offloaded["computation"] == "float32" and offloaded["generators"] == "bfloat16"


@pytest.mark.parametrize(
    ("longest", "n", "chosen"),
    [pytest.param(100, 8, 4096, marks=pytest.mark.slow), (600, 8, 4800), (5000, 8, 8192), (9000, 1, 9000)],
)
def test_the_micro_batch_that_auto_chooses_goes_with_the_checkpoint(models, ranks, longest, n, chosen):
    """On a CPU it holds 4,096 tokens, up to 8,192 to fit a whole group, and at least one sequence of full length."""
    lengths = {"max_prompt_length": 50, "max_response_length": longest - 50, "rollout_n": n}
    auto, number = (train_sync.Args(max_tokens_per_micro_batch=tokens, **lengths) for tokens in ("auto", 4096))
    learner, later, other = (Learner(models["qwen3"], args, ranks, 10) for args in (auto, auto, number))
    learner.chosen_tokens = choose_micro_batch_tokens(auto, learner)
    assert learner.micro_batch_tokens == chosen
    update(learner, 0)
    for of in (later, other):
        of.state_tensors()
        of.restore(learner.state(), None)
    assert later.micro_batch_tokens == learner.micro_batch_tokens and other.micro_batch_tokens == 4096
    later.restore(other.state(), None)
    assert later.micro_batch_tokens == 4096, "a number that was given, too"
    later.chosen_tokens = 512
    assert choose_micro_batch_tokens(auto, later) == max(longest, 512), "a number is kept as long as it holds a sequence"


@pytest.mark.parametrize(("unfinished", "calls"), [(0, ["sleep", "measure"]), (3, ["measure"])])
def test_micro_batches_are_measured_while_an_engine_on_the_device_sleeps(monkeypatch, unfinished, calls):
    """One with unfinished responses, of a checkpoint, cannot."""
    seen = []
    monkeypatch.setattr(training_run, "choose_micro_batch_tokens", lambda *_: seen.append("measure") or 512)
    engine = SimpleNamespace(num_unfinished=unfinished, sleep=lambda: seen.append("sleep"))
    run = SimpleNamespace(args=train_sync.Args(), learner=SimpleNamespace(), generator=SimpleNamespace(engine=engine))
    TrainingRun._choose_micro_batch(run)
    assert seen == calls and run.learner.chosen_tokens == 512


@pytest.mark.parametrize(("sharing", "longest"), [(1, 100), (1, 9000), (4, 40_000)])
def test_a_number_for_auto_where_pixels_are_not_counted(sharing, longest):
    args = train_sync.Args(max_prompt_length=10, max_response_length=longest - 10, sequence_parallel=sharing)
    learner = SimpleNamespace(
        ranks=SimpleNamespace(device=torch.device("cuda")), policy=SimpleNamespace(takes_images=True), chosen_tokens=None
    )
    assert choose_micro_batch_tokens(args, learner) == settled(args).max_tokens_per_micro_batch == max(8192, longest // sharing)
    number = dataclasses.replace(args, max_tokens_per_micro_batch=123)
    assert settled(number) == number


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["qwen2-tied", "moe"])
def test_a_rank_alone_learns_without_fsdp_what_it_learns_with_it(models, ranks, model, dtype):
    """Bit for bit, with gradients of several micro-batches. FSDP is used only where tensors are offloaded, one layer at a
    time."""
    flags = {"gradient_checkpointing": True, "dtype": dtype}
    alone, moving = (make_learner(models[model], ranks, param_offload=offload, **flags) for offload in (False, True))
    pieces = [sum(isinstance(module, FSDPModule) for module in it.policy.modules()) for it in (alone, moving)]
    assert pieces == [0, 1 + len(alone.policy.model.model.layers)]
    assert {p.dtype for p in alone.policy.parameters()} == {getattr(torch, dtype)}
    for seed in range(3):
        assert update(alone, seed) == update(moving, seed)
    assert torch.equal(weights(alone), weights(moving))


def test_gradients_are_counted_as_such_where_the_head_goes_in_chunks(models, ranks, monkeypatch):
    monkeypatch.setattr("rl.model.policy.LOGITS_AT_ONCE", 64)
    learner = make_learner(models["qwen2-untied"], ranks)
    matrices = [p for p in learner.policy.parameters() if p.dim() > 1]
    count = MemoryCount(SMALL["vocab_size"], {p.shape for p in matrices})
    for parameter in learner.policy.parameters():
        count.note(parameter.data, "weights")
    with count:
        gradients(learner, 0)
    assert count.host.live["gradients"] == sum(4 * p.numel() for p in matrices)
    assert count.host.live["logits"] < 4 * learner.policy.model.lm_head.weight.numel()


def test_logits_are_kept_but_where_memory_is_to_be_saved_or_nothing_learns(models, ranks, monkeypatch):
    monkeypatch.setattr("rl.model.policy.LOGITS_AT_ONCE", 64)
    kept, apply = [], ChunkedLogProbs.apply
    monkeypatch.setattr("rl.model.policy.ChunkedLogProbs.apply", lambda *args: kept.append(args[-1]) or apply(*args))
    batch = Batch.of([make_group(0, [9, 9])])
    (micro,) = micro_batches(batch, torch.arange(2), 100, ranks)
    for flag, expected in ((False, LOGITS_KEPT), (True, 0)):
        learner = make_learner(models["qwen2-tied"], ranks, gradient_checkpointing=flag)
        kept.clear()  # what the check at the start did
        learner.log_probs(micro)
        learner.log_probs_of("policy", batch, [[micro]])
        assert kept == [expected, 0]


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_micro_batch_holds_what_arithmetic_says(models, ranks, checkpointing):
    """Elements a token, after the forward pass and at most in the backward pass; nothing is left behind it."""
    learner = make_learner(models["qwen2-untied"], ranks, gradient_checkpointing=checkpointing)
    batch = Batch.of([make_group(t, [99], prompt=1) for t in range(8)])
    (micro,) = micro_batches(batch, torch.arange(8), 800, ranks)
    learner.log_probs(micro)[0].sum().backward()  # the gradients and the layout's indices are there
    count = MemoryCount()
    for parameter in learner.policy.parameters():
        count.note(parameter.data, "weights"), count.note(parameter.grad, "gradients")
    with count:
        log_prob, entropy = learner.log_probs(micro)
        held = count.host.live["activations"] + count.host.live["logits"]
        count.host.peak = 0
        (-log_prob.sum()).backward()
        peak = count.host.at_peak["activations"] + count.host.at_peak["logits"]
        del log_prob, entropy
    layers, h, i = (SMALL[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    heads, kv_heads = SMALL["num_attention_heads"], SMALL["num_key_value_heads"]
    # Two sums, the scales of their norms; queries, keys and values, attention's output in both orders and its normaliser; the
    # MLP's two products, its activation and what it weighs.
    layer = 2 * (h + 1) + h + 2 * h * kv_heads // heads + 2 * h + heads + 4 * i
    kept = layers * h if checkpointing else layers * layer
    # The embedding, the last norm, rotations; hidden states, log-probs of all words and of the token, the entropy.
    outside = h + h + 1 + 2 * h // heads + h + SMALL["vocab_size"] + 2
    assert held == pytest.approx(4 * 800 * (kept + outside), rel=0.02)
    recomputed = layer if checkpointing else 0
    assert peak < 4 * 800 * (kept + outside + recomputed + 4 * i)
    assert count.host.live["activations"] + count.host.live["logits"] <= 8 * 800  # an index of the layout
