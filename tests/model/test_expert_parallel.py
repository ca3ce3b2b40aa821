"""Experts sharded over several ranks: gradients, metrics, updates and checkpoints equal those of one rank with all experts."""

import json
import re

import pytest
import torch
from helpers import run_script
from layouts import ALONE, CASES, GROUPS, assert_taught_the_same, learn_on
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from rl.errors import UserError
from rl.model.expert_parallel import share_experts
from rl.ranks.dist import Ranks

TIGHT = {"max_tokens_per_micro_batch": 40, "gradient_checkpointing": True}
OFFLOAD = {"optimizer_offload": True}
LAYOUTS = {
    2: {
        "ep 2": {"expert_parallel": 2} | ALONE,
        "sp 2, ep 2": {"sequence_parallel": 2, "expert_parallel": 2} | TIGHT | OFFLOAD,
    },
    4: {
        "ep 2, each on two ranks": {"expert_parallel": 2} | ALONE,
        "ep 4": {"expert_parallel": 4, "param_offload": True} | TIGHT,
        "sp 2, ep 4": {"sequence_parallel": 2, "expert_parallel": 4} | TIGHT,
        "sp 4, ep 2": {"sequence_parallel": 4, "expert_parallel": 2} | ALONE,
    },
}


@pytest.fixture(scope="module")
def alone(models):
    """Return the results of training on one rank."""
    return learn_on(1, {"alone": [models["moe"], ALONE]})


@pytest.mark.runs
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_experts_are_taught_what_one_rank_is(models, alone, ranks):
    found = learn_on(ranks, {name: [models["moe"], flags] for name, flags in LAYOUTS[ranks].items()})
    assert len(found) == len(CASES) * len(LAYOUTS[ranks])
    assert_taught_the_same(found, alone)
    for case in CASES if ranks == 4 else ():  # the batch is one row in both: its routers are counted alike, padding left out
        metrics, expected = found[f"sp 4, ep 2/{case}"]["metrics"], alone[f"alone/{case}"]["metrics"]
        counted = {name: value for name, value in expected.items() if name.startswith("moe/")}
        assert len(counted) == 5 and {name: metrics[name] for name in counted} == pytest.approx(counted, rel=1e-4)


@pytest.fixture
def lopsided(models, tmp_path) -> str:
    """A model in which no token chooses experts 0 to 3: two of the others always have positive logits."""
    model = AutoModelForCausalLM.from_pretrained(models["moe"])
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight  # [E, hidden]
            weight[:4] = 0
            weight[5], weight[7] = -weight[4], -weight[6]
    model.save_pretrained(tmp_path / "lopsided")
    return str(tmp_path / "lopsided")


@pytest.mark.runs
@pytest.mark.slow
def test_a_rank_whose_experts_nobody_chooses_takes_part(lopsided):
    case = {"grpo": ({"entropy_coeff": 0.1}, GROUPS)}
    alone, found = (
        learn_on(ranks, {"x": [lopsided, {"expert_parallel": min(2, ranks)} | ALONE]}, case, timeout=120) for ranks in (1, 4)
    )
    assert alone["x/grpo"]["metrics"]["moe/never_used"] == 2 * 4
    assert_taught_the_same(found, alone)


@pytest.mark.runs
@pytest.mark.slow
def test_a_checkpoint_of_one_layout_is_read_in_another_bit_for_bit(models, tmp_path):
    def reshard(ranks: int, came_from, out: str, **flags) -> dict:
        (tmp_path / out).mkdir()
        run_script(
            "tests/programs/reshard.py", models["moe"], json.dumps(flags), came_from, tmp_path / out, ranks=ranks, timeout=120
        )
        return load_file(tmp_path / out / "tensors.safetensors")

    first = reshard(2, "-", "ep2", expert_parallel=2)
    assert sum(name.startswith("exp_avg_sq.") and bool(tensor.any()) for name, tensor in first.items()) > 10
    came_from, export = tmp_path / "ep2" / "step_000001", load_file(tmp_path / "ep2" / "step_000001" / "model.safetensors")
    layouts = {"4, ep 2": (4, {"expert_parallel": 2}), "4, ep 4, sp 2": (4, {"expert_parallel": 4, "sequence_parallel": 2})}
    for name, (ranks, flags) in (layouts | {"alone": (1, {})}).items():
        found = reshard(ranks, came_from, name, **flags)
        assert found.keys() == first.keys() and all(torch.equal(found[key], first[key]) for key in first), name
        came_from = tmp_path / name / "step_000001"
        again = load_file(came_from / "model.safetensors")
        assert again.keys() == export.keys() and all(torch.equal(again[key], export[key]) for key in export), name


@pytest.mark.parametrize(
    ("learners", "config", "size", "said"),
    [
        (4, Qwen2Config(), 2, "--expert-parallel 2: the model has no experts that could be divided."),
        (4, Qwen3MoeConfig(num_experts=8), 3, "--expert-parallel 3 does not divide the 4 learners."),
        (6, Qwen3MoeConfig(num_experts=8), 2, "6 learners cannot hold equally many of the model's 8 experts a layer."),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(learners, config, size, said):
    with pytest.raises(UserError, match=re.escape(said)):
        share_experts(Ranks(0, learners, 0, torch.device("cpu")), config, size)
