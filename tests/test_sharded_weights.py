"""The first learner reads the weights in the files' precision, and each learner is given its part of them in fp32."""

import json

import pytest
import torch
from helpers import SMALL, run_script
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rl.attention import Packed
from rl.forward_check import in_fp32
from rl.learner import Learner, LearnerArgs, Policy
from rl.pretrained import layers, load_weights


def saved_in(kind: str, source: str, path) -> str:
    """A copy of the model whose files hold half precisions, of one kind or, "mixed", of none alone."""
    model = AutoModelForCausalLM.from_pretrained(source)
    model.to(torch.float16 if kind == "float16" else torch.bfloat16).save_pretrained(path)
    if kind == "mixed":
        weights = load_file(path / "model.safetensors")
        weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 1 / 3, dtype=torch.float32)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    return str(path)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "mixed"])
@pytest.mark.parametrize("family", ["qwen2-tied", "moe"])
def test_master_weights_and_buffers_are_those_of_the_files_exactly(ranks, models, tmp_path, family, kind):
    path = saved_in(kind, models[family], tmp_path)
    in_full = load_weights(path, torch.float32)
    assert load_weights(path, None).dtype == {"mixed": torch.float32}.get(kind, getattr(torch, kind, None))
    learner = Learner(path, LearnerArgs(), ranks, total_steps=1)
    for name, weight in learner.weights():
        assert weight.dtype == torch.float32 and torch.equal(weight, in_full.get_parameter(name)), name
    buffers = dict(learner.policy.model.named_buffers())
    assert buffers and buffers.keys() == dict(in_full.named_buffers()).keys()
    for name, buffer in in_full.named_buffers():
        assert buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("family", ["qwen2-tied", "moe"])
def test_the_check_at_the_start_computes_in_fp32_and_leaves_the_weights_as_they_were(models, tmp_path, family):
    path, tokens = saved_in("bfloat16", models[family], tmp_path), torch.arange(2, 14)
    layout, predict = Packed([len(tokens)]), torch.arange(len(tokens) - 1)

    def log_probs(model) -> torch.Tensor:
        return Policy(model)(layout.inputs(tokens), layout, predict, tokens[1:], 1.0, "none")[0]

    half, full = load_weights(path, None), load_weights(path, torch.float32)
    before = {name: parameter.clone() for name, parameter in half.named_parameters()}
    with torch.no_grad(), in_fp32(half, layers(half)):
        assert torch.equal(log_probs(half), log_probs(full))
    for name, parameter in half.named_parameters():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, before[name]), name
    assert half.lm_head.weight is half.get_input_embeddings().weight or family == "moe"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "flags"), [(2, {}), (4, {"expert_parallel": 2})])
def test_no_rank_holds_the_model_in_fp32(tmp_path, ranks, flags):
    """A mixture of 125M parameters in bf16. A rank needs its share in fp32, and a whole tensor while it loads; the first one at
    its peak all of them in the files' precision, beside what is resident of the files themselves."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "moe_intermediate_size": 256, "num_experts": 32, "head_dim": 32}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL | sizes | {"num_experts_per_tok": 2}))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(tmp_path)
    # glibc keeps freed tensors below 32 MB for itself: those of a model worth sharding are larger
    env, flags = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}, json.dumps(flags)
    done = run_script("tests/programs/load_memory.py", tmp_path, flags, ranks=ranks, fresh=True, timeout=300, env=env)
    out = done.stdout
    everyone = json.loads(out.splitlines()[-1])
    for rank, (peak, kept, largest) in enumerate(everyone):  # bytes a parameter
        share, other = 4 / ranks, 8 * largest + 0.3
        assert kept < 1.2 * share + 0.3, (rank, everyone)
        assert peak < (2 + 2 if rank == 0 else 1.2 * share) + other, (rank, everyone)
