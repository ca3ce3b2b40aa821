"""However learners divide a batch, the model and its experts, they learn what one learner does: gradients, metrics, weights,
checkpoints. Also kernels, routing replay, images, adapters, a critic, tokens without a backward pass, and bf16."""

import json
import re
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MOE, SMALL, relative, run_script
from safetensors.torch import load_file
from test_vision import rows  # noqa: F401  (a fixture)
from tiny_vlm import save_vlm
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2Config, Qwen2MoeConfig, Qwen3MoeConfig

from rl.errors import UserError
from rl.model.expert_parallel import share_experts
from rl.model.sequence_parallel import check_heads
from rl.ranks.dist import Ranks

RNG = np.random.default_rng(1)
GROUPS = [[int(n) for n in RNG.integers(1, 21, 3)] for _ in range(4)]
CASES = {  # flags, and the sizes of the responses of each group
    "grpo, four updates": ({"ppo_mini_batch_size": 2, "ppo_epochs": 2}, GROUPS),
    "gspo, two updates": (
        {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "ppo_mini_batch_size": 2},
        GROUPS,
    ),
    "turns, kl loss, entropy": ({"kl_loss_coef": 0.1, "entropy_coeff": 0.1}, GROUPS),
    "one response: some ranks have no work": ({"entropy_coeff": 0.1}, [[20]]),
}
ALONE = {"max_tokens_per_micro_batch": 4096}  # a batch is one micro-batch
R3 = {"router_replay": "R3", "entropy_coeff": 0.1}
REPLAYS = {
    "R2, four updates": ({"router_replay": "R2", "ppo_mini_batch_size": 2, "ppo_epochs": 2}, GROUPS),
    "R3": (R3, GROUPS),
    "turns, R3": (R3, GROUPS),
}
FEW = {name: CASES[name] for name in ("grpo, four updates", "one response: some ranks have no work")}
OTHERS = {name: (CASES | REPLAYS)[name] for name in ("gspo, two updates", "turns, kl loss, entropy", "R3")}
ENTROPY = {"grpo": ({"entropy_coeff": 0.1}, GROUPS)}
UPDATES = {"grpo": ({"ppo_mini_batch_size": 2, "ppo_epochs": 2}, GROUPS)}
OF_MIXTURE = UPDATES | {kind: (UPDATES["grpo"][0] | {"router_replay": kind}, GROUPS) for kind in ("R2", "R3")}
GAE = {"adv_estimator": "gae", "lam": 0.9, "gamma": 0.95, "critic_ppo_epochs": 2, "ppo_mini_batch_size": 2, "critic_lr": 1e-3}
CRITIC = {"gae, two updates": (GAE, [[3, 20, 7], [1, 12, 5], [18, 2, 9], [4, 4, 16]])}
SIZES = [[5, 3], [8, 2, 4], [6, 6], [3, 9], [1, 7]]  # of the responses to rows with 1, 2, 0, 1 and 1 images
IMAGES = {
    # A larger rate makes as much difference between two cuts on one rank: AdamW steps as far where a gradient is rounding.
    "two updates": ({"ppo_mini_batch_size": 3, "lr": 5e-6}, SIZES),
    "turns, kl loss, entropy": (CASES["turns, kl loss, entropy"][0], SIZES),
    "one image": ({"entropy_coeff": 0.1}, SIZES[:1]),
    "frozen": ({"freeze_vision_tower": True, "entropy_coeff": 0.1}, SIZES),
}
OF_TOWER = {name: IMAGES[name] for name in ("two updates", "one image")}
OF_TEXT = {name: IMAGES[name] for name in ("turns, kl loss, entropy", "frozen")}
LONG = {"long": ({"entropy_coeff": 0.1}, [[16_378]])}


def learn_on(ranks: int, layouts: dict, cases: dict = CASES, **how) -> dict:
    """What programs/layouts.py saves: gradients, metrics, weights and the part of the tokens that passed forward alone, by
    "layout/case". layouts: name -> [model, flags]; how: attention, the kind of device whose kernels the CPU gets; rows, a file
    of prompts; equal, the groups whose scores are equal; every_other: a layout takes every other case, the next layout the
    others."""
    what = {"attention": "cpu", "rows": None, "equal": [], "every_other": False, "layouts": layouts, "cases": cases} | how
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "found.pt"
        run_script("tests/programs/layouts.py", out, json.dumps(what), ranks=ranks)
        return torch.load(out)


def assert_taught_the_same(found: dict, alone: dict) -> None:
    """found: by "layout/case", alone: by "model/case" of one rank. A gradient differs by the rounding of fp32, of which a
    processor with wide vectors makes most in a hybrid model (3e-6 seen); one token too many or too few makes more than 1e-3.
    Later updates are of weights that AdamW has moved: by rounding where a gradient is 0."""
    for name, of_case in found.items():
        (expected,) = [of for case, of in alone.items() if case.partition("/")[2] == name.partition("/")[2]]
        first, *later = map(relative, of_case["gradients"], expected["gradients"])
        assert first < 1e-5 and max(later, default=0) < 2e-5, (name, first, later)
        assert relative(of_case["weights"], expected["weights"]) < 1e-5, name
        assert without_routers(of_case) == pytest.approx(without_routers(expected), rel=2e-5, abs=2e-6, nan_ok=True), name
        norm = expected["metrics"]["actor/grad_norm"]
        assert norm > 1e-3 and of_case["metrics"]["actor/grad_norm"] == pytest.approx(norm, rel=4e-6), name


def without_routers(of_case: dict) -> dict:
    """Return the metrics except moe/*, which count a prompt in every micro-batch with it and so depend on how the batch is
    divided."""
    return {name: value for name, value in of_case["metrics"].items() if not name.startswith("moe/")}


def of(tokens: int | None = None, **flags) -> dict:
    """Flags of a layout whose micro-batches have this many tokens a rank; without a number, all of the batch."""
    return flags | ({"max_tokens_per_micro_batch": tokens} if tokens else ALONE)


def tight(tokens: int = 40, **flags) -> dict:
    return of(tokens, gradient_checkpointing=True, **flags)


@dataclass
class Row:
    """Layouts of ranks that are compared with one rank."""

    model: str
    ranks: int
    layouts: dict[str, dict]
    cases: dict = field(default_factory=lambda: CASES)
    alone: dict = field(default_factory=lambda: ALONE)
    more: dict = field(default_factory=dict)  # arguments of learn_on


LORA = {"lora_rank": 4, "lora_alpha": 16.0, "lr": 1e-3}
SHARED, IN_TWO = {"sequence_parallel": 2}, {"expert_parallel": 2}
APART = {"alone": ALONE | {"both_ways": True}}  # of tokens without an advantage ranks may leave out the backward pass
ROWS = {
    # no whole sequence fits a rank
    "rows over two ranks": Row("qwen2-tied", 2, {"tight": of(16, **SHARED), "roomy": of(**SHARED)}),
    # each of the two heads of keys and values is on two ranks, and a row of one token is mostly padding
    "rows over four ranks": Row("qwen2-tied", 4, {"tight": of(8, sequence_parallel=4), "2 x 2": tight(16, **SHARED)}),
    "a row of 16k tokens": Row("narrow", 4, {"four": of(4_100, sequence_parallel=4)}, LONG, of(16_400)),
    "an NPU's kernel": Row("qwen2-tied", 4, {"sp 4": of(sequence_parallel=4), "sp 2": of(**SHARED)}, more={"attention": "npu"}),
    "experts on two ranks": Row(
        "moe", 2, {"ep 2": of(**IN_TWO), "sp 2, ep 2": tight(optimizer_offload=True, **SHARED, **IN_TWO)}
    ),
    "experts on four ranks": Row(
        "moe",
        4,
        {
            "ep 2, each on two ranks": of(**IN_TWO),
            "ep 4": tight(expert_parallel=4, param_offload=True),
            "sp 4, ep 2": of(sequence_parallel=4, **IN_TWO),
            "sp 2, ep 4": tight(expert_parallel=4, **SHARED),
        },
    ),
    "experts that nobody chooses": Row("lopsided", 4, {"x": of(**IN_TWO)}, ENTROPY),
    "a dense first layer, a shared expert": Row("qwen2_moe", 2, {"sp 2, ep 2": tight(**SHARED, **IN_TWO)}, OTHERS),
    "Mixtral": Row("mixtral", 2, {"sp 2, ep 2": tight(**SHARED, **IN_TWO)}, OTHERS),
    "delta nets, a row over two": Row("qwen3_5", 2, {"many": tight(16, **SHARED)}, FEW),
    "delta nets, three ranks": Row("qwen3_5", 3, {"many": tight()}, FEW),
    # on more ranks than some rows have images
    "images in windows, four ranks": Row("qwen2.5-vl", 4, {"data": tight(80), "tight": tight(sequence_parallel=4)}, OF_TOWER),
    "images, four ranks": Row("qwen3-vl", 4, {"roomy": of(sequence_parallel=4), "2 x 2": tight(**SHARED)}, OF_TEXT),
    "images and experts": Row(
        "qwen3-vl-moe",
        4,
        {
            "ep 2": tight(80, **IN_TWO),
            "sp 2, ep 4": tight(expert_parallel=4, **SHARED),
            "sp 4, ep 2": of(sequence_parallel=4, **IN_TWO),
        },
        OF_TOWER,
    ),
    "delta nets and experts": Row("qwen3_next", 2, {"ep 2": tight(**IN_TWO)}, {"R3": REPLAYS["R3"]}),
    "adapters": Row(
        "qwen3",
        2,
        {"small": tight(32, **LORA), "offloaded": of(32, param_offload=True, **LORA), "shared": of(16, **LORA, **SHARED)},
        {"grpo, four updates": CASES["grpo, four updates"]},
        ALONE | LORA,
    ),
    # two learners have half of the batch's values each
    "a critic": Row("qwen2-tied", 2, {"two": of(64), "shared": of(64, **SHARED)}, CRITIC),
    # some ranks have no response of one kind and still take part in its passes
    "no backward pass": Row("qwen3", 2, {"apart": of(), "small": tight(32)}, UPDATES, APART["alone"], {"equal": [0, 3]}),
    "no backward pass, shared": Row("qwen2-tied", 4, {"apart": of(16, **SHARED)}, UPDATES, APART["alone"], {"equal": [0, 3]}),
    "no backward pass, experts": Row("moe", 2, {"apart": of(**IN_TWO)}, OF_MIXTURE, APART["alone"], {"equal": [1]}),
}


@pytest.fixture(scope="module")
def paths(models, tmp_path_factory) -> dict[str, str]:
    """Models by name. No token of `lopsided` chooses experts 0 to 3, because two others always have positive logits."""
    root = tmp_path_factory.mktemp("layouts")
    odd = {"mlp_only_layers": [0], "num_hidden_layers": 3, "shared_expert_intermediate_size": 48, "num_experts_per_tok": 3}
    odd |= {"decoder_sparse_step": 1, "norm_topk_prob": False, "tie_word_embeddings": True}
    configs = {
        "narrow": Qwen2Config(**SMALL | {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}),
        "qwen2_moe": Qwen2MoeConfig(**SMALL | MOE | odd),
        "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    }
    for name, config in configs.items():
        torch.manual_seed(0)  # of each: with other weights gspo clips all of the second update, whose gradient is 0
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    lopsided = AutoModelForCausalLM.from_pretrained(models["moe"])
    with torch.no_grad():
        for layer in lopsided.model.layers:
            weight = layer.mlp.gate.weight  # [E, hidden]
            weight[:4] = 0
            weight[5], weight[7] = -weight[4], -weight[6]
    lopsided.save_pretrained(root / "lopsided")
    heads = {"num_attention_heads": 4}  # for four ranks
    smaller = heads | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    text = {"qwen2.5-vl": smaller, "qwen3-vl": heads, "qwen3-vl-moe": heads}
    vlms = {kind: save_vlm(kind, root / kind, max_pixels=2**14, **more) for kind, more in text.items()}
    return models | vlms | {name: str(root / name) for name in (*configs, "lopsided")}


@cache
def of_one_rank(what: str) -> dict:
    """What learn_on returns for one rank: several rows are compared with it."""
    layouts, cases, more = json.loads(what)
    return learn_on(1, layouts, cases, **more)


@pytest.mark.runs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ROWS)
def test_ranks_are_taught_what_one_rank_is(paths, rows, name):  # noqa: F811
    row = ROWS[name]
    model, more = paths[row.model], {"rows": rows} if "vl" in row.model else row.more
    of_one = {name: value for name, value in more.items() if name != "attention"}
    alone = of_one_rank(json.dumps([{"alone": [model, row.alone]}, row.cases, of_one]))
    layouts = {layout: [model, flags] for layout, flags in row.layouts.items()}
    divided = len(layouts) > 1 and len(row.cases) * len(layouts) > 4
    found = learn_on(row.ranks, layouts, row.cases, every_other=divided, **more)
    assert len(found) == (len(row.cases) * len(layouts) // 2 if divided else len(row.cases) * len(layouts))
    assert_taught_the_same(found, alone)
    if row.alone is APART["alone"]:
        assert all(of_case["forward_only"] > 0 for of_case in found.values())
        assert all(of_case["forward_only"] == 0 for of_case in alone.values())
    one_row = [*CASES][::2] if name == "experts on four ranks" else []  # in both the batch is one: padding is not counted
    for case in one_row:
        metrics, expected = found[f"sp 4, ep 2/{case}"]["metrics"], alone[f"alone/{case}"]["metrics"]
        counted = {name: value for name, value in expected.items() if name.startswith("moe/")}
        assert len(counted) == 5 and {name: metrics[name] for name in counted} == pytest.approx(counted, rel=1e-4)
    if row.model == "lopsided":
        assert alone["alone/grpo"]["metrics"]["moe/never_used"] == 2 * 4
    if row.cases is CRITIC:
        assert alone["alone/gae, two updates"]["metrics"]["critic/vf_loss"] > 0.01


REPLAYING = {
    "sp 2, ep 2": tight(**SHARED, **IN_TWO),
    "sp 4": of(sequence_parallel=4),
    "sp 2, ep 4": tight(expert_parallel=4, **SHARED),
    "ep 2": of(**IN_TWO),
}


@pytest.mark.runs
def test_ranks_that_replay_routes_are_taught_what_one_rank_is(models):
    """R3 with routes that no router would choose: if a rank ignored them, the gradient would differ."""
    alone = learn_on(1, {"alone": [models["moe"], ALONE]}, REPLAYS | {"free": (R3 | {"router_replay": "off"}, GROUPS)})
    assert relative(alone["alone/free"]["gradients"][0], alone["alone/R3"]["gradients"][0]) > 0.1
    layouts = {name: [models["moe"], flags] for name, flags in REPLAYING.items()}
    found = learn_on(4, layouts, REPLAYS, every_other=True)
    assert len(found) == len(REPLAYS) * len(REPLAYING) // 2
    assert_taught_the_same(found, alone)
    for name, of_case in found.items():
        assert (of_case["metrics"]["moe/replay/tokens_differ"] > 0.9) == name.endswith("R3")


@pytest.mark.runs
@pytest.mark.parametrize(("kind", "case"), [("qwen2-tied", {"entropy_coeff": 0.1}), ("moe", R3)])
def test_ranks_in_bf16_are_as_near_to_fp32_as_one_rank_is(models, kind, case):
    """Several ranks round different sums than one rank, but no more of them. Routes are replayed, because a flipped route is
    not rounding."""
    cases, bf16 = {"x": (case, GROUPS)}, {"dtype": "bfloat16"}
    alone = learn_on(1, {"fp32": [models[kind], ALONE], "bf16": [models[kind], ALONE | bf16]}, cases)
    exact, one = (alone[f"{name}/x"]["gradients"][0] for name in ("fp32", "bf16"))
    layouts = {"sp 2": of(**SHARED)} | ({"sp 2, ep 2": tight(**SHARED, **IN_TWO)} if kind == "moe" else {})
    found = learn_on(2, {name: [models[kind], bf16 | flags] for name, flags in layouts.items()}, cases)
    rounding = relative(one, exact)
    errors = [relative(of_case["gradients"][0], exact) for of_case in found.values()]
    assert 1e-4 < rounding < 0.1
    assert len(errors) == len(layouts) and all(1e-4 < error < 1.5 * rounding for error in errors), (rounding, errors)
    for of_case in found.values():
        assert of_case["metrics"]["actor/grad_norm"] == pytest.approx(alone["fp32/x"]["metrics"]["actor/grad_norm"], rel=0.05)


IN_8_BITS = {"optim": "adamw_8bit"}
RESHARDED = {  # model, flags, and (ranks, flags) one after the other
    "dense": ("qwen2-tied", {}, [(2, {}), (3, {}), (1, {})]),
    "experts": ("moe", {}, [(2, IN_TWO), (4, {"expert_parallel": 4} | SHARED), (1, {})]),
    # its shared expert has a gate of one row, [1, 64], of which one of two learners has nothing
    "8 bits": ("gate", IN_8_BITS, [(1, {}), (2, {}), (1, {})]),
    "8 bits, unevenly": ("moe", IN_8_BITS, [(3, {}), (2, IN_TWO | {"optimizer_offload": True})]),
}


@pytest.mark.runs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RESHARDED)
def test_a_checkpoint_of_one_layout_is_read_in_another_bit_for_bit(models, tmp_path, name):
    """Weights, moments and the export."""
    kind, flags, layouts = RESHARDED[name]
    torch.manual_seed(0)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    AutoModelForCausalLM.from_config(Qwen2MoeConfig(**SMALL, **experts)).save_pretrained(tmp_path / "gate")
    model, came_from, kept = (models | {"gate": tmp_path / "gate"})[kind], "-", []
    for number, (ranks, layout) in enumerate(layouts):
        (out := tmp_path / str(number)).mkdir()
        words = json.dumps(flags | layout), came_from, out
        run_script("tests/programs/reshard.py", model, *words, ranks=ranks, timeout=120)
        came_from = out / "step_000001"
        kept.append([load_file(file) for file in (out / "tensors.safetensors", came_from / "model.safetensors")])
        for found, first in zip(kept[-1], kept[0], strict=True):
            assert found.keys() == first.keys() and all(torch.equal(found[key], first[key]) for key in first), layout
    tensors = kept[0][0]
    moments = [tensor for key, tensor in tensors.items() if key.startswith("exp_avg_sq.") and bool(tensor.any())]
    assert len(moments) > 10
    if flags:
        codes = [tensor for tensor in tensors.values() if tensor.dtype == torch.uint8]
        assert len(codes) > 20 and all(len(tensor.unique()) > 8 for tensor in codes)
        with pytest.raises(AssertionError, match=r"exp_avg\S* is"):  # another optimizer's moments
            run_script("tests/programs/reshard.py", model, "{}", came_from, tmp_path, timeout=120)


# ------------------------------------------------------------------------------------------------------------ refused

HEADS = Qwen2Config(num_attention_heads=12, num_key_value_heads=4)
REFUSED = {
    "--sequence-parallel 5: between its ranks attention is split by heads, and the model has 12.": lambda: check_heads(
        HEADS, 5
    ),
    "4 heads of keys and values, which its ranks can neither divide nor share evenly. Take one of 1, 2, 4, 12.": (
        lambda: check_heads(HEADS, 3)
    ),
    "the model has 4 heads of keys and values": lambda: check_heads(HEADS, 6),
    "--expert-parallel 2: the model has no experts that could be divided.": lambda: experts_on(4, Qwen2Config(), 2),
    "--expert-parallel 3 does not divide the 4 learners.": lambda: experts_on(4, Qwen3MoeConfig(num_experts=8), 3),
    "6 learners cannot hold equally many of the model's 8 experts a layer.": (
        lambda: experts_on(6, Qwen3MoeConfig(num_experts=8), 2)
    ),
}


def experts_on(learners: int, config, size: int) -> None:
    share_experts(Ranks(0, learners, 0, torch.device("cpu")), config, size)


@pytest.mark.parametrize("said", REFUSED)
def test_what_ranks_cannot_divide_is_refused(said):
    with pytest.raises(UserError, match=re.escape(said)):
        REFUSED[said]()
    for fitting in (1, 2, 4, 12):
        check_heads(HEADS, fitting)
