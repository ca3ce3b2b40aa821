"""Adapters compute and learn what a twin does that has W + s B A for a weight, and peft where it is installed."""

import json
from pathlib import Path

import pytest
import torch
from helpers import make_group, plain_log_probs, train
from safetensors.torch import load_file
from tiny_vlm import save_vlm
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from rl.errors import UserError
from rl.generation.embedded import TransformersEngine
from rl.learning.adapters import AdaptedLinear, check_model
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner
from rl.model.pretrained import empty_model, load_config
from rl.ranks.shards import local
from rl.setup import LocalWeights

TEMPERATURE = 0.7
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
CASES = [  # model, rank, target
    ("qwen2-tied", 1, ("all-linear",)),
    ("qwen2-untied", 8, ("q_proj", "v_proj")),
    ("qwen3", 8, ("all-linear",)),
    ("moe", 4, ATTENTION),
    ("qwen3_5", 4, ("all-linear",)),  # with a gated delta net, whose convolution is no expert
]


def sequences(count: int = 4) -> Batch:
    return Batch.of([make_group(t, [5 + 3 * t], prompt=3 + t) for t in range(count)])


def learner_of(model: str, ranks, draw_b: bool = True, **flags) -> Learner:
    """A learner whose adapters do something: B is drawn, too."""
    args = LearnerArgs(**{"lora_rank": 4, "lora_alpha": 16.0, "lr": 1e-2, "lr_warmup_steps": 0} | flags)
    learner = Learner(model, args, ranks, 10, TEMPERATURE, with_reference=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in learner.adapters.tensors if draw_b else ():
            if name.endswith("lora_B"):
                parameter = local(learner.policy.model.get_parameter(name))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return learner


def own_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: local(learner.policy.model.get_parameter(name).data).clone() for name in learner.adapters.tensors}


def loss_of(log_probs: list[torch.Tensor]) -> torch.Tensor:
    """An uneven sum of all tokens' log-probs."""
    return sum((log_prob * torch.linspace(-1, 1, len(log_prob))).sum() for log_prob in log_probs)


def gradients(learner: Learner, batch: Batch, ranks) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The learner's log-probs, response by response, and its adapters' gradients."""
    by_response = [None] * len(batch.lengths)
    for micro in micro_batches(batch, torch.arange(len(batch.lengths)), 40, ranks):
        log_prob = learner.forward(micro).log_prob
        responses = batch.seq[micro.index]
        own = {int(number): log_prob[responses == number] for number in responses.unique()}
        loss_of(list(own.values())).backward()
        for number, values in own.items():
            by_response[number] = values.detach()
    grads = {name: learner.policy.model.get_parameter(name).grad.clone() for name in learner.adapters.tensors}
    learner.optimizer.zero_grad()
    return by_response, grads


@pytest.mark.parametrize(("kind", "rank", "target"), CASES)
def test_values_and_gradients_are_those_of_merged_weights(models, ranks, kind, rank, target):
    """The twin is transformers' model with W + s B A for each weight, differentiated by autograd through that sum. What the
    learner publishes are these weights, and the embedded engine has them."""
    learner, batch = learner_of(models[kind], ranks, lora_rank=rank, lora_target=target), sequences()
    own = {name: tensor.requires_grad_() for name, tensor in own_tensors(learner).items()}
    twin = AutoModelForCausalLM.from_pretrained(models[kind], attn_implementation="eager")
    merged = {name: tensor.detach() for name, tensor in twin.named_parameters()}
    for name in {name.rpartition(".")[0] for name in own}:
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + 16.0 / rank * own[f"{name}.lora_B"] @ own[f"{name}.lora_A"]
    expected = plain_log_probs(lambda ids: functional_call(twin, merged, (ids,)).logits, batch, TEMPERATURE)
    loss_of(expected).backward()

    got, grads = gradients(learner, batch, ranks)
    torch.testing.assert_close(torch.cat(got), torch.cat(expected).detach(), atol=1e-5, rtol=1e-5)
    assert len(grads) == len(own) == 2 * len(learner.adapters.names) > 0
    for name, tensor in own.items():
        torch.testing.assert_close(grads[name], tensor.grad, atol=1e-5 * float(tensor.grad.abs().max()), rtol=1e-4)

    engine = TransformersEngine(models[kind], max_length=64)
    LocalWeights(learner, engine, torch.float32).publish(0)
    for name, weight in merged.items():
        torch.testing.assert_close(engine.read_back(name), weight.detach(), atol=1e-6, rtol=1e-5)
    untouched = {name for name in merged if not merged[name].requires_grad}
    assert {*learner.frozen} == untouched and {*learner.parameters} == {*merged}


def test_merging_rounds_once_and_leaves_the_model_as_it_is(models, ranks):
    """In bf16 the sum of the model's weights and the adapters' fp32 product is rounded, at each publish for itself."""
    learner = learner_of(models["qwen3"], ranks, dtype="bfloat16", lora_rank=4)
    held = {name: local(parameter).clone() for name, parameter in learner.parameters.items()}
    for publish in range(3):
        for name in learner.adapters.tensors:
            if name.endswith("lora_B"):
                local(learner.policy.model.get_parameter(name).data).normal_(std=0.1)
        own = {name: tensor.double() for name, tensor in own_tensors(learner).items()}
        for name, weight in learner.weights(torch.bfloat16):
            layer, expected = name.removesuffix(".weight"), held[name].double()
            if f"{layer}.lora_A" in own:
                expected = expected + 4.0 * own[f"{layer}.lora_B"] @ own[f"{layer}.lora_A"]
                assert not torch.equal(expected.bfloat16(), held[name])
            assert (weight.bfloat16() == expected.bfloat16()).float().mean() > 0.999, f"{name}, publish {publish}"
            assert torch.equal(local(learner.parameters[name]), held[name])


def test_gradients_are_pefts(models, ranks):
    """To the bit, in fp32, for the same values."""
    peft = pytest.importorskip("peft")
    for kind, rank, target in CASES[:3]:
        learner, batch = learner_of(models[kind], ranks, lora_rank=rank, lora_target=target), sequences(1)
        names = "all-linear" if target == ("all-linear",) else list(target)
        theirs = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(models[kind], attn_implementation="sdpa"),
            peft.LoraConfig(r=rank, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM"),
        )
        named = dict(theirs.named_parameters())
        of_peft = {name: named[f"base_model.model.{name}.default.weight"] for name in learner.adapters.tensors}
        assert {id(p) for p in named.values() if p.requires_grad} == {id(p) for p in of_peft.values()}
        for name, value in own_tensors(learner).items():
            of_peft[name].data.copy_(value)
        expected = plain_log_probs(lambda ids, model=theirs: model(ids).logits, batch, TEMPERATURE)
        loss_of(expected).backward()
        _, grads = gradients(learner, batch, ranks)
        for name, parameter in of_peft.items():
            torch.testing.assert_close(grads[name], parameter.grad, atol=2e-6 * float(parameter.grad.abs().max()), rtol=1e-5)
        merged = theirs.merge_and_unload().state_dict()
        for name, weight in learner.weights():
            torch.testing.assert_close(weight, merged[name], atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_peft_reads_what_is_written(models, ranks, tmp_path):
    """The logits of its model with the exported adapter are those of the merged weights."""
    peft = pytest.importorskip("peft")
    for kind, rank, target in [*CASES[:3], CASES[4]]:
        learner, directory = learner_of(models[kind], ranks, lora_rank=rank, lora_target=target), tmp_path / kind
        learner.adapters.save(directory, own_tensors(learner), learner.policy.model, models[kind])
        merged = AutoModelForCausalLM.from_pretrained(models[kind])
        theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models[kind]), directory)
        for name, weight in learner.weights():
            merged.get_parameter(name).data.copy_(weight)
        ids = torch.arange(5, 17)[None]
        assert not [name for name, parameter in theirs.named_parameters() if parameter.requires_grad], "for inference"
        torch.testing.assert_close(theirs(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)


def test_the_reference_is_the_policy_without_adapters(models, ranks):
    """Before the first update both are the same to the bit, so that the KL is 0. Later the reference is still the model that
    training began with, and no second one is held."""
    learner, batch = learner_of(models["qwen3"], ranks, draw_b=False), sequences()
    before = Learner(models["qwen3"], LearnerArgs(), ranks, 10, TEMPERATURE)
    micros = micro_batches(batch, torch.arange(4), 100, ranks)
    for _ in range(2):
        reference, policy = (learner.log_probs_of(which, batch, [micros]) for which in ("reference", "policy"))
        assert torch.equal(reference, before.log_probs_of("policy", batch, [micros]))
        assert torch.equal(reference, policy) == (not learner.optimizer.state)  # before the update
        for micro in micros:
            learner.forward(micro).log_prob.sum().backward()
        learner.step()
    assert not isinstance(learner.reference, torch.nn.Module)


def test_first_values_depend_on_the_seed_alone(models, ranks):
    args = LearnerArgs(lora_rank=4)
    first, again, other = (own_tensors(Learner(models["qwen3"], args, ranks, 10, seed=seed)) for seed in (1, 1, 2))
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if name.endswith("lora_B"):
            assert not value.any()
            continue
        bound = value.shape[1] ** -0.5  # as peft's: kaiming_uniform_(a=sqrt(5))
        assert not torch.equal(value, other[name]) and value.abs().max() <= bound and value.std() > bound / 2


# ---------------------------------------------------------------------------------------- refusals and warnings


def test_what_cannot_have_adapters_is_refused(models, ranks, tmp_path):
    def refuse(model: str, *words: str, **flags) -> None:
        args = LearnerArgs(**{"lora_rank": 4} | flags)
        with pytest.raises(UserError) as error:
            check_model(empty_model(load_config(model)), args, "--model X")
        assert all(word in str(error.value) for word in words)

    refuse(models["qwen3"], "--lora-target query", "q_proj", lora_target=("q_proj", "query"))
    refuse(models["qwen3"], "--lora-target lm_head", "output layer", lora_target=("lm_head",))
    refuse(models["moe"], "experts", "--lora-target k_proj o_proj q_proj v_proj")
    refuse(models["moe"], "experts", lora_target=("gate_up_proj",))
    vlm = save_vlm("qwen2.5-vl", tmp_path / "vlm")
    refuse(vlm, "vision tower", "--freeze-vision-tower")
    refuse(vlm, "--lora-target qkv", lora_target=("qkv",), freeze_vision_tower=True)  # of the tower alone
    learner = Learner(vlm, LearnerArgs(lora_rank=4, freeze_vision_tower=True), ranks, 10)
    adapted = {name for name, module in learner.policy.model.named_modules() if isinstance(module, AdaptedLinear)}
    assert len(adapted) == 14 and all(".language_model.layers." in name for name in adapted)
    assert not any(parameter.requires_grad for parameter in learner.policy.model.model.visual.parameters())


# ------------------------------------------------------------------------------------------------- real runs


FLAGS = ["--lora-rank", 8, "--lr", 1e-3, "--kl-loss-coef", 0.001]
FLAGS += ["--total-training-steps", 4, "--save-freq", 2, "--test-freq", 0]


def read_adapter(directory: Path, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The base with the adapter added, by the description of peft's format."""
    config, out = json.loads((directory / "adapter_config.json").read_text()), dict(base)
    tensors = load_file(directory / "adapter_model.safetensors")
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert name.rpartition(".")[2] in config["target_modules"] and len(a) == config["r"]
        out[f"{name}.weight"] = out[f"{name}.weight"] + config["lora_alpha"] / config["r"] * (b @ a)
    assert len(tensors) == 2 * sum(not torch.equal(out[name], base[name]) for name in base) > 0
    return out


@pytest.mark.runs
def test_a_checkpoint_has_the_adapter_and_no_other_weights_of_the_model(demo_model, tmp_path):
    """Besides its export; that and the adapter are the same model. The KL with the reference is 0 at the first step.
    test_round_trips.py resumes it."""
    metrics, run, _ = train("train_sync.py", *FLAGS, "--experiment-name", "run", out=tmp_path)
    kl = [metrics[step]["actor/kl_loss"] for step in (1, 2, 3, 4)]
    assert kl[0] == 0 and all(value > 0 for value in kl[1:])
    (shard,) = (run / "step_000004" / "training").glob("*.safetensors")
    keys = load_file(shard)
    assert {key.partition(".")[0] for key in keys} == {"adapter", "exp_avg", "exp_avg_sq"}
    assert all(key.endswith((".lora_A", ".lora_B")) for key in keys)
    export = load_file(run / "step_000004" / "model.safetensors")
    base = dict(AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).named_parameters())
    for name, weight in read_adapter(run / "step_000004" / "adapter", {n: p.detach() for n, p in base.items()}).items():
        torch.testing.assert_close(export[name].float(), weight, atol=1e-6, rtol=1e-5)
