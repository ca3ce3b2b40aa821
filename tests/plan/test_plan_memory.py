"""The plan's memory: the count on fake tensors equals that on real ones, shards match the arithmetic, and each suggested
change helps."""

import dataclasses
import json

import pytest
from helpers import CONFIGS, SMALL, run_script

import plan
import train_async
from rl import parts
from rl.errors import UserError
from tools.plan import devices, memory_plan
from tools.plan.devices import Machine
from tools.plan.dry_run import dry_run
from tools.plan.memory_plan import MemoryPlan
from tools.plan.workload import lengths_like

PROGRAM = "tests/programs/plan_memory.py"
FLAGS = {"lengths": [40, 60, 33], "prompt": 12, "max_tokens_per_micro_batch": 100, "kl_loss_coef": 1e-3}
ADAPTERS = {"max_tokens_per_micro_batch": 300, "gradient_checkpointing": True, "dtype": "bfloat16", "lora_rank": 4}
OTHERS = [  # model, learners, flags
    ("qwen2-tied", 1, ADAPTERS),
    ("qwen2-tied", 1, {"param_offload": True, "kl_loss_coef": 0.0, "entropy_coeff": 0.1}),
    ("qwen2-tied", 1, {"adv_estimator": "gae", "kl_loss_coef": 0.0, "critic_ppo_epochs": 2}),
    ("qwen3", 2, {}),
    ("qwen3", 2, {"sequence_parallel": 2, "dtype": "bfloat16"}),  # with what they exchange around attention
]


def counted(model: str, how: str, flags: dict, ranks: int = 1) -> dict:
    if how == "real":
        done = run_script(PROGRAM, model, how, json.dumps(flags), timeout=250, ranks=ranks)
    else:
        done = run_script(PROGRAM, model, how, json.dumps(flags), ranks, timeout=250)
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def check_equal(model: str, flags: dict, ranks: int = 1) -> dict:
    real, fake = (counted(model, how, flags, ranks) for how in ("real", "fake"))
    assert real["causes"] == fake["causes"] and real["kept"] == fake["kept"]
    if ranks > 1:
        return real
    assert {"weights", "optimizer", "activations"} <= set(real["causes"])
    sharded = "param_offload" in flags or flags.get("dtype") == "bfloat16"  # one learner alone in fp32, in place, is not
    assert ("gathered layers" in real["causes"]) == sharded
    return real


@pytest.mark.runs
def test_the_count_is_that_of_real_tensors(models):
    real = check_equal(models["qwen2-untied"], FLAGS)
    assert real["causes"]["optimizer"] == pytest.approx(2 * real["causes"]["weights"], rel=1e-3)
    assert real["causes"]["reference"] == pytest.approx(real["causes"]["weights"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "ranks", "flags"), OTHERS)
def test_the_count_is_that_of_real_tensors_with_other_flags(models, model, ranks, flags):
    check_equal(models[model], FLAGS | flags, ranks)


@pytest.fixture
def model(tmp_path) -> str:
    """A directory with only a config.json."""
    CONFIGS["qwen2-untied"]().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    return str(tmp_path)


def parameters() -> int:
    """Count the parameters of the models of helpers.SMALL by hand: q, k and v have biases, and each layer has two norms."""
    hidden, heads = SMALL["hidden_size"], SMALL["num_attention_heads"]
    kv = hidden // heads * SMALL["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * kv + hidden + 2 * kv
    layer = attention + 3 * hidden * SMALL["intermediate_size"] + 2 * hidden
    return SMALL["num_hidden_layers"] * layer + 2 * SMALL["vocab_size"] * hidden + hidden


def flags(model: str, **more) -> train_async.Args:
    sizes = {"max_prompt_length": 20, "max_response_length": 100, "rollout_n": 4}
    return parts.make(train_async.Args, model=model, **sizes | more)


@pytest.mark.slow
def test_shards_by_arithmetic(model):
    args = flags(model, dtype="bfloat16", max_tokens_per_micro_batch=240, save_freq=5, kl_loss_coef=1e-3, teacher=model)
    memory = dry_run("train_async", args, 4, "cuda", lengths_like("budget", 4, 100, 20))
    own = parameters() / 4
    assert memory.parameters == parameters()
    wanted = {
        "weights": 4,
        "optimizer": 8,
        "reference": 2,
        "teacher": 2,
        "checkpoint": 12,
        "publish": 4 * 2,
    }  # bytes a parameter
    for cause, bytes in wanted.items():
        size = (memory.kept if cause in ("weights", "optimizer") else memory.host_kept)[cause]
        assert size == pytest.approx(bytes * own, rel=0.01), cause
    assert memory.peak > memory.kept.total() > 12 * own and memory.tokens <= 240
    assert memory.host.total() >= 4 * parameters()  # the first learner reads the whole model


@pytest.mark.slow
def test_a_remedy_is_tried_and_fits(model, monkeypatch, capsys):
    args = flags(model, max_tokens_per_micro_batch=4096, ppo_mini_batch_size=32)
    machine, kind = Machine(1, 2), devices.device("H100-80GB")
    roomy = MemoryPlan("train_async", args, machine, kind)
    needed = roomy.learner.peak
    short = dataclasses.replace(roomy, device=dataclasses.replace(kind, memory=0.7 * needed / (1 - memory_plan.SPARE)))
    memory_plan.plan_memory(short)
    said = capsys.readouterr().out
    assert "does not fit" in said and "It fits with --" in said
    words, changed = memory_plan.remedy(short)
    assert words in said and changed.learner.peak <= 0.7 * needed and not changed.lacking()


def test_a_node_holds_what_came_in_there_and_what_it_trains(model):
    """Made are up to two steps of 16 prompts: a quarter comes in here, and a quarter of the step's from the others."""
    held = [
        memory_plan.samples_held(flags(model, train_batch_size=16, record_samples=r), nodes)
        for r in ("off", "recent")
        for nodes in (1, 4)
    ]
    assert held == [32, 8 + 4, 32, 8 + 16]


def test_help_without_a_script_says_where_the_flags_are(capsys):
    plan.main(["--help"])
    assert "python plan.py train_sync.py --help" in capsys.readouterr().out


@pytest.mark.slow
def test_what_cannot_be_planned_is_one_message():
    with pytest.raises(UserError, match="--sequence-parallel 2 does not divide the 3 learners"):
        plan.main(["train_sync.py", "--sequence-parallel", "2", "--nproc-per-node", "3", "--device", "H100"])
    with pytest.raises(UserError, match="a sequence must fit in one micro-batch"):
        plan.main(["train_sync.py", "--max-tokens-per-micro-batch", "20", "--device", "H100"])
    with pytest.raises(UserError, match="--device"):
        plan.main(["train_async.py", "--device", "abacus"])
