"""--publish adapter: engines compute with the adapters that they are sent, and one that does not ends the run by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import run_script, train
from safetensors.torch import load_file
from test_engine import HYBRIDS, drain, requests_for
from test_lora import CASES, learner_of
from tiny_vlm import save_vlm

from rl.generation.embedded.engine import TransformersEngine
from rl.model.shards import local
from rl.weights.adapter_probe import AdapterProbe
from rl.weights.adapter_proof import NOISE, fault
from rl.weights.buckets import Plan
from rl.weights.local import LocalWeights

SLOW_STEPS = ("--lora-rank", "8", "--lr", "1e-3", "--publish", "adapter", "--test-freq", "0", "--total-training-steps", "4")


def new_b(learner, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in learner.adapters.tensors:
            if name.endswith("lora_B"):
                parameter = local(learner.policy.model.get_parameter(name))
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))


def engine_of(learner, dtype: torch.dtype = torch.float32) -> TransformersEngine:
    return TransformersEngine(learner.path, max_length=64, dtype=dtype, adapters=learner.args)


@pytest.mark.parametrize(("kind", "rank", "target"), CASES)
@pytest.mark.parametrize("recompute", [False, True])
def test_adapters_by_themselves_do_what_merged_weights_do(models, ranks, kind, rank, target, recompute):
    """Sampled tokens and log-probs, also of responses that a swap finds halfway, with their KV cache kept or recomputed. The
    first update brings the model, later ones do not; the learner's own log-probs are the same."""
    learner = learner_of(models[kind], ranks, lora_rank=rank, lora_target=target, publish="adapter")
    apart, merged = engine_of(learner), TransformersEngine(models[kind], max_length=64)
    outputs = {}
    for engine, tensors in ((apart, learner.apart), (merged, learner.weights)):
        new_b(learner, 1, 0.1)
        engine.update(tensors(), 4)
        for request in requests_for(n=2, max_tokens=16, ignore_eos=True):
            engine.add(request)
        for _ in range(6):
            engine.step()
        new_b(learner, 2, 0.1)
        engine.update(tensors(frozen=engine is merged), 5, recompute_kv=recompute)
        outputs[engine] = drain(engine, [])
    assert len(outputs[apart]) == 8
    for key, output in outputs[apart].items():
        expected = outputs[merged][key]
        assert output.token_ids == expected.token_ids and output.versions == expected.versions and {4, 5} == {*output.versions}
        torch.testing.assert_close(torch.tensor(output.log_probs), torch.tensor(expected.log_probs), atol=1e-5, rtol=0)
    probe = AdapterProbe(learner)()
    for engine in (apart, merged):
        found = torch.tensor(engine.log_probs_of(probe["ids"]))
        torch.testing.assert_close(found, torch.tensor(probe["now"]), atol=1e-4 if kind in HYBRIDS else 1e-5, rtol=0)
    assert (found - torch.tensor(probe["base"])).abs().max() > 0.01


def test_the_model_travels_once(models, ranks):
    learner = learner_of(models["qwen3"], ranks, publish="adapter")
    out, engine = learner.outgoing(), engine_of(learner)
    plan = Plan(list(out.shapes), list(out.shapes.values()), torch.float32, len(out.frozen), adapters=True)
    later = Plan.from_json(plan.to_json()).later()
    assert later.names == learner.adapters.tensors and later.adapters and set(plan.names[len(later.names) :]) == out.frozen
    assert out.frozen == set(learner.parameters) == {*dict(TransformersEngine(learner.path, 64).model.named_parameters())}
    walked = []
    publishes = LocalWeights(learner, engine, torch.float32)
    publishes.outgoing = type(out)(
        out.shapes, out.frozen, lambda *how, **what: recorded(walked, out.tensors(*how, **what)), True
    )
    for version in range(3):
        walked.append([])
        publishes.publish(version)
    assert [len(names) for names in walked] == [len(plan.names), len(later.names), len(later.names)]
    with pytest.raises(ValueError, match=r"lacks 1 weights, model.layers.0.self_attn.q_proj.lora_A"):
        engine.update([(n, t) for n, t in learner.apart(frozen=False) if n != later.names[0]], 3)


def recorded(walked: list[list[str]], tensors):
    for name, tensor in tensors:
        walked[-1].append(name)
        yield name, tensor


def swallow(engine) -> None:
    """The adapter of each update is dropped on the way: the engine keeps the one before."""
    update = engine.update
    engine.update = lambda weights, version: update(((name, engine.read_back(name)) for name, _ in weights), version)


FAULTS = {
    "received and not applied": (
        lambda engine: setattr(engine.adapters, "on", False),
        "received the adapter and computes without",
    ),
    "twice the scale": (
        lambda engine: setattr(engine.adapters, "scale", 2 * engine.adapters.scale),
        r"applies (1\.[7-9]|2\.[0-3])\d times",
    ),
    "a tenth more": (
        lambda engine: setattr(engine.adapters, "scale", 1.1 * engine.adapters.scale),
        r"applies 1\.(09|10|11) times",
    ),
    "never arrives": (swallow, r"the engine's model.layers.0.self_attn.q_proj.lora_B is not what the learner sent"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_at_the_first_publish_that_shows_it(models, ranks, name):
    """At version 0 every B is 0, and an adapter does nothing. A faultless engine passes all of them."""
    plant, words = FAULTS[name]
    learner = learner_of(models["qwen3"], ranks, draw_b=False, publish="adapter")
    for faulty in (False, True):
        new_b(learner, 0, 0.0)
        publishes = LocalWeights(learner, engine_of(learner), torch.float32)
        publishes.publish(0)
        if faulty:
            plant(publishes.engine)
        new_b(learner, 1, 0.02)
        if not faulty:
            publishes.publish(1)
            continue
        with pytest.raises(RuntimeError, match=f"version 1: .*{words}"):
            publishes.publish(1)


def test_an_engine_that_is_one_publish_behind_is_named(models, ranks):
    """Also where it holds the right tensors: the log-probs alone say it. How far a run has come does not matter."""
    learner = learner_of(models["qwen3"], ranks, draw_b=False, publish="adapter")
    behind, engine = engine_of(learner), engine_of(learner)
    publishes = LocalWeights(learner, engine, torch.float32)
    for version in range(4):
        new_b(learner, 1, 0.02 + 0.002 * version)
        publishes.publish(version)
        behind.update(learner.apart(frozen=not version), version)
    engine.log_probs_of = behind.log_probs_of
    new_b(learner, 1, 0.028)
    with pytest.raises(RuntimeError, match="version 4: the engine computes with the adapter of the publish before"):
        publishes.publish(4)


def test_bf16_shows_what_stands_out_of_its_noise(models, ranks):
    """Right engines pass whatever their adapters do; one without is named as soon as they do more than rounding does."""
    learner = learner_of(models["qwen3"], ranks, draw_b=False, publish="adapter", dtype="bfloat16")
    engine, named = engine_of(learner, torch.bfloat16), []
    publishes, probe = LocalWeights(learner, engine, torch.bfloat16), AdapterProbe(learner)
    for version, size in enumerate((0.0, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3)):
        new_b(learner, 1, size)
        for name, master in learner.masters.items():
            master.copy_(learner.policy.model.get_parameter(name))
        publishes.publish(version)
        expected = probe()
        difference = (torch.tensor(expected["now"]) - torch.tensor(expected["base"])).square().mean().sqrt()
        named.append(fault(expected["base"], expected, NOISE[torch.bfloat16]) is not None)
        assert named[-1] == (difference > 4.2 * NOISE[torch.bfloat16])
    assert not named[0] and named[-1]


def test_a_model_for_images_is_proven_on_text(ranks, tmp_path):
    learner = learner_of(save_vlm("qwen2.5-vl", tmp_path / "vlm"), ranks, publish="adapter", freeze_vision_tower=True)
    publishes = LocalWeights(learner, engine_of(learner), torch.float32)
    publishes.publish(0)
    publishes.engine.adapters.on = False
    with pytest.raises(RuntimeError, match="received the adapter and computes without it"):
        publishes.publish(1)


def test_in_bf16_adapters_alone_keep_what_merging_rounds_away(models, ranks):
    """An update below half of a weight's last bit leaves a merged weight as it was."""
    learner = learner_of(models["qwen3"], ranks, draw_b=False, publish="adapter", dtype="bfloat16")
    new_b(learner, 1, 1e-6)
    alone = engine_of(learner, torch.bfloat16)
    LocalWeights(learner, alone, torch.bfloat16).publish(0)
    merged = {name: tensor.bfloat16() for name, tensor in learner.weights(torch.bfloat16)}
    moved = [float((merged[name] != local(learner.parameters[name])).float().mean()) for name in learner.adapters.weights]
    assert max(moved) < 0.1
    assert all(alone.read_back(name).abs().max() > 1e-7 for name in learner.adapters.tensors)


# ------------------------------------------------------------------------------------------------- real runs


@pytest.mark.slow
def test_async_is_sync_at_staleness_0_with_adapters_alone(demo_model, tmp_path):
    """And later publishes carry the adapters alone."""
    weights = []
    for script, more, ranks in (("train_sync.py", (), None), ("train_async.py", ("--staleness-threshold", "0"), 2)):
        steps, run, _ = train(script, *SLOW_STEPS, *more, out=tmp_path / script, ranks=ranks)
        weights.append((run / "step_000004" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert steps[3]["publish/gb"] == pytest.approx(4 * 90_112 / 1e9)  # of 1,077,632 parameters


@pytest.mark.slow
def test_one_step_off_learns_what_merged_weights_teach_and_resumes_to_the_bit(demo_model, tmp_path):
    """The resumed run sends the model once more."""

    def run(publish: str, *flags: str) -> tuple[dict, Path]:
        words = (*SLOW_STEPS, "--publish", publish, "--save-freq", "2", *flags)
        return train("train_one_step_off.py", *words, out=tmp_path / publish, ranks=2)[:2]

    def weights(run: Path) -> dict[str, torch.Tensor]:
        return load_file(run / "step_000004" / "model.safetensors")

    (_, merged), (first, apart) = run("merged"), run("adapter")
    whole = weights(apart)
    start = load_file(Path(demo_model) / "model.safetensors")
    for name, weight in weights(merged).items():
        torch.testing.assert_close(whole[name], weight, atol=0.01 * float((weight - start[name]).abs().max()), rtol=0)
    shutil.rmtree(apart / "step_000004")
    again, apart = run("adapter", "--experiment-name", apart.name)
    assert all(torch.equal(weight, whole[name]) for name, weight in weights(apart).items())
    sizes = {4 * 1_077_632 / 1e9, 4 * 90_112 / 1e9}  # of the model with its adapters, and of these alone
    # A publish's report arrives with its batch or a step later, and then perhaps together with the next one.
    for metrics in (first, again):
        seen = [row["publish/gb"] for row in metrics.values() if "publish/gb" in row]
        assert seen and {*seen} <= sizes
    assert min(row.get("publish/gb", 1) for row in first.values()) == min(sizes)


@pytest.mark.slow
def test_a_run_whose_generators_do_not_apply_adapters_ends_at_its_first_update(demo_model, tmp_path):
    done = run_script("tests/programs/deaf_adapters.py", *SLOW_STEPS, "--output-dir", tmp_path, ranks=2, check=False)
    assert done.returncode and "version 1: the engine has received the adapter and computes without it" in done.stderr
    (metrics,) = Path(tmp_path).glob("*/metrics.jsonl")
    assert max(json.loads(line)["step"] for line in metrics.read_text().splitlines()) <= 3
