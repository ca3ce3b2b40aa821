"""The plan's memory: the count on fake tensors equals that on real ones, shards match the arithmetic, and each suggested
change helps."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from helpers import CONFIGS, SMALL, run_script
from transformers import Qwen3Config, Qwen3MoeConfig

import plan
import train_async
from rl import parts
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.learning.division import Division
from rl.ranks.dist import Ranks
from rl.samples.group import Group, Response
from tools.plan import devices, known_values, memory_plan
from tools.plan.dry_run import dry_run
from tools.plan.machine import Machine
from tools.plan.memory_plan import MemoryPlan, samples_held
from tools.plan.workload import lengths_like

PROGRAM = "tests/programs/plan_memory.py"
FLAGS = {"lengths": [40, 60, 33], "prompt": 12, "max_tokens_per_micro_batch": 100, "use_kl_loss": True}
OTHERS = [
    {"max_tokens_per_micro_batch": 300, "gradient_checkpointing": True, "dtype": "bfloat16", "lora_rank": 4},
    {"param_offload": True, "use_kl_loss": False, "entropy_coeff": 0.1},
    {"adv_estimator": "gae", "use_kl_loss": False, "critic_ppo_epochs": 2},
]


def counted(model: str, how: str, flags: dict, ranks: int = 1) -> dict:
    if how == "real":
        done = run_script(PROGRAM, model, how, json.dumps(flags), timeout=250, ranks=ranks)
    else:
        done = run_script(PROGRAM, model, how, json.dumps(flags), ranks, timeout=250)
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def check_equal(model: str, flags: dict) -> dict:
    real, fake = (counted(model, how, flags) for how in ("real", "fake"))
    assert real["causes"] == fake["causes"] and real["kept"] == fake["kept"]
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
@pytest.mark.parametrize("flags", OTHERS)
def test_the_count_is_that_of_real_tensors_with_other_flags(models, flags):
    check_equal(models["qwen2-tied"], FLAGS | flags)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"sequence_parallel": 2, "dtype": "bfloat16"}])
def test_the_count_is_that_of_two_learners(models, flags):
    """Including the tensors that they exchange around attention."""
    real, fake = (counted(models["qwen3"], how, FLAGS | flags, 2) for how in ("real", "fake"))
    assert real["causes"] == fake["causes"] and real["kept"] == fake["kept"]


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
    args = flags(model, dtype="bfloat16", max_tokens_per_micro_batch=240, save_freq=5, use_kl_loss=True, teacher=model)
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
def test_a_policy_that_teaches_itself_holds_no_second_model(model):
    own = {"teacher": "self", "teacher_prompt": "{prompt} {answer}", "max_tokens_per_micro_batch": 240}
    memory = dry_run("train_async", flags(model, **own), 4, "cuda", lengths_like("budget", 4, 100, 20))
    assert "optimizer" in memory.kept and "teacher" not in memory.host_kept | memory.device


@pytest.mark.slow
def test_a_learner_holds_its_own_tokens_of_a_large_batch(model):
    """8 million tokens, 32 learners, two updates: by arithmetic, over the tensors of a batch that was really divided."""
    prompts, n, prompt, response = 2048, 20, 20, 200
    sizes = {"ppo_mini_batch_size": prompts // 2, "rollout_n": n, "max_prompt_length": prompt, "max_response_length": response}
    args = parts.make(train_async.Args, model=model, train_batch_size=prompts, **sizes)
    memory = dry_run("train_async", args, 32, "cuda", lengths_like("budget", n, response, prompt))
    numbers = np.zeros(response, np.int32)
    answer = Response(numbers, np.zeros(response, np.float32), numbers, "stop")
    groups = [Group(ticket, np.zeros(prompt, np.int32), "plan", [answer] * n) for ticket in range(prompts)]
    ranks = Ranks(0, 32, 0, torch.device("cpu"))
    batch = Batch.of(groups, Division(prompts // 2, args.learner.max_tokens_per_micro_batch, ranks))
    own = len(batch.token)
    assert own == pytest.approx(prompts * n * response / 32, rel=0.01)
    tensors = [x for x in vars(batch).values() if isinstance(x, torch.Tensor)]
    assert sum(x.nbytes for x in tensors if len(x) == own) == (4 + 8 + 1 + 4 + 4) * own
    given = sum(x.nbytes for x in tensors)
    assert memory.host_kept["batch"] == pytest.approx(given + 3 * 4 * own, rel=0.05)  # and log-probs, reward, advantage
    assert memory.host_kept["batch"] < memory.host["batch"] < 4 * memory.host_kept["batch"]
    assert memory.samples == pytest.approx(n * (response * 12 + 280), rel=0.02)  # 280 bytes of a response's head
    assert samples_held(args, 1) == 2 * prompts


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> str:
    """The config.json of a model whose matrices have more elements than integers are followed."""
    directory = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1, "vocab_size": 40000, "head_dim": 64}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "decoder_sparse_step": 1}
    Qwen3MoeConfig(**sizes, **experts).save_pretrained(directory / "moe")
    Qwen3Config(**sizes).save_pretrained(directory / "dense")
    assert sizes["vocab_size"] * sizes["hidden_size"] > known_values.MOST
    return str(directory)


LARGE = [  # every kind once, with both optimizers and every offload
    ("dense", {"optim": "adamw_8bit", "optimizer_offload": True}),
    ("dense", {"lora_rank": 4, "param_offload": True}),
    ("moe", {}),
    ("moe", {"expert_parallel": 2, "optim": "adamw_8bit", "param_offload": True}),
    ("moe", {"lora_rank": 4, "lora_target": ("q_proj", "v_proj"), "optimizer_offload": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), LARGE)
def test_a_large_model_is_counted(wide, kind, more):
    """Matrices and blocks of pinned memory larger than the integers whose values are followed."""
    args = flags(f"{wide}/{kind}", dtype="bfloat16", max_tokens_per_micro_batch=480, **more)
    memory = dry_run("train_async", args, 2, "cuda", lengths_like("budget", 4, 100, 20))
    moments = 0 if "lora_rank" in more else {"adamw": 8, "adamw_8bit": 2}[args.learner.optim] * memory.parameters / 2
    on_host = bool(more.get("param_offload") or more.get("optimizer_offload"))
    held, elsewhere = memory.kept["optimizer"], memory.host_kept["optimizer"]
    if on_host:
        held, elsewhere = elsewhere, held
    assert memory.parameters > 40e6 and memory.peak >= memory.kept.total()
    assert held >= 0.98 * moments and elsewhere < 1e6, "blocks of pinned memory may be larger than what is in them"
    assert more.get("optimizer_offload") or held <= 1.1 * moments + 1e6


@pytest.mark.slow
def test_a_plan_with_flags_that_change_neither_memory_nor_time(model, capsys):
    sizes = ["--max-prompt-length", "20", "--max-response-length", "100", "--rollout-n", "4", "--train-batch-size", "16"]
    others = ["--compile", "--nproc-per-node", "2", "--device", "H100-80GB"]
    plan.main(["train_async.py", "--model", model, *sizes, *others])
    said = capsys.readouterr().out
    assert "a learner of 1 on H100-80GB" in said and "It fits on H100-80GB" in said
    assert re.search(r"samples that they share: 0\.0 GB, 32 groups of 0\.00\d+ MB", said), said
    assert "tokens/s" in said


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
    with pytest.raises(UserError, match=r"name one of train_sync\.py"):
        plan.main(["train.py"])
    with pytest.raises(UserError, match="--sequence-parallel 2 does not divide the 3 learners"):
        plan.main(["train_sync.py", "--sequence-parallel", "2", "--nproc-per-node", "3", "--device", "H100"])
    with pytest.raises(UserError, match="a sequence must fit in one micro-batch"):
        plan.main(["train_sync.py", "--max-tokens-per-micro-batch", "20", "--device", "H100"])
    with pytest.raises(UserError, match="--device"):
        plan.main(["train_async.py", "--device", "abacus"])
