"""tools.from_verl translates verl's commands and reports on every key."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from test_examples import RECIPES, SCRIPTS, number, parse

from rl import flags, parts
from rl.errors import UserError
from tools.from_verl import table, translate
from tools.from_verl.__main__ import main, report
from tools.from_verl.command import parse_value, read_script, read_words
from tools.from_verl.table import OTHER_DEFAULTS, ROWS, ROWS_OF_SFT

RUNS = {  # verl's command -> the recipe of the same run
    "1_grpo_0.5b_fully_async": "grpo_qwen2.5_0.5b_gsm8k_async",
    "2_grpo_0.5b_sync": "grpo_qwen2.5_0.5b_gsm8k_sync",
    "3_grpo_3b_one_step_off": "grpo_qwen2.5_3b_gsm8k_one_step_off",
    "4_grpo_vl_8b_fully_async": "grpo_qwen3_vl_8b_geo3k_async",
    "4_grpo_vl_8b_fully_async_proposed": "grpo_qwen3_vl_8b_geo3k_async_proposed",
    "5_dapo_30b_a3b_fully_async": "dapo_qwen3_30b_a3b_async",
    "6_gspo_3b_sync": "gspo_qwen2.5_3b_gsm8k",
    "7_gspo_30b_a3b_sync": "gspo_qwen3_30b_a3b",
    "8_grpo_qwen3.5_2b_sync": "grpo_qwen3.5_2b_geo3k",
    "9_grpo_qwen3.5_27b_sync": "grpo_qwen3.5_27b_geo3k",
    "10_grpo_qwen3.5_35b_a3b_sync": "grpo_qwen3.5_35b_a3b_geo3k",
}
# Where files lie and what a run is called is the recipe's own affair.
OWN = {"train_files", "val_files", "output_dir", "project_name", "experiment_name", "logger", "seed"}


def verl(name: str) -> Path:
    return ROOT / "tests" / "fixtures" / "verl" / f"{name}.sh"


def ours(*words: str, script: str = "main_ppo"):
    """Return the translation of a command of these words."""
    return translate.translate(read_words(["python3", "-m", f"verl.{script}", *words]))


def effective(args) -> dict:
    """Return the flags as the script uses them, with presets and synonyms resolved."""
    values = {name: value for name, value in parts.flat(args).items() if name not in OWN}
    values |= {
        "rollout_is": args.correction.rollout_is,
        "rollout_is_threshold": args.correction.weight_bounds,
        "clips": args.loss.loss_knobs,
    }
    values |= {"rollout_rs": args.correction.rejection_criteria, "rollout_rs_threshold": None}
    values |= {"old_is_rollout": args.old_is_rollout}
    values["loss_mode"] = {"vanilla": "ppo_clip"}.get(args.loss.loss_mode, args.loss.loss_mode)
    return values | {"use_rollout_log_probs": None, "clip_ratio_c": None}


@pytest.mark.parametrize("name", RUNS)
def test_verls_command_and_the_recipe_of_the_same_run_are_one(name, tmp_path):
    found = translate.translate(read_script(verl(name).read_text()))
    launcher, module, recipe = parse(ROOT / "examples" / f"{RUNS[name]}.sh", "npu", tmp_path)
    assert SCRIPTS[found.script] is module and not found.refusal
    assert effective(translate.parse(found)) == effective(recipe)
    for flag in ("--nnodes", "--nproc-per-node"):
        assert number(found.launcher, flag) == number(launcher, flag)


@pytest.mark.parametrize("name", RUNS)
def test_no_key_of_verls_runs_is_unknown_or_without_a_word(name):
    command = read_script(verl(name).read_text())
    found = translate.translate(command)
    assert found.verdicts.keys() == command.values.keys() and len(command.values) > 30
    assert {kind for kind, _ in found.verdicts.values()} <= {table.TRANSLATED, table.NOT_NEEDED, table.NOT_HERE}
    assert all(why for kind, why in found.verdicts.values() if kind != table.TRANSLATED)
    printed = report(command)
    for key, (kind, _) in found.verdicts.items():
        assert kind == table.TRANSLATED or f"#   {key}=" in printed


def test_the_printed_command_is_one_for_a_shell(tmp_path):
    """bash passes the intended words to torchrun. All other lines are comments."""
    (tmp_path / "torchrun").write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    (tmp_path / "torchrun").chmod(0o755)
    command = read_words(["-m", "verl.trainer.main_ppo", "data.train_files=['a b.parquet','$c.parquet']", "foo=1"])
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", report(command)], env=env, capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")
    found = translate.translate(command)
    assert words[:-1] == found.launcher[1:] + found.words()
    assert words[words.index("--train-files") + 1 :][:2] == ["a b.parquet", "$c.parquet"]


WORDS = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=3", "+trainer.logger=['console','wandb']", "no.such=1"]
SCRIPT = "N=3\npython3 -m verl.trainer.main_ppo " + " ".join(WORDS).replace("n=3", "n=$N")


@pytest.mark.parametrize("given", ["one word", "many words", "file", "standard input"])
def test_the_command_line_takes_it_in_every_form(given, tmp_path, monkeypatch, capsys):
    (tmp_path / "run.sh").write_text(SCRIPT)
    forms = {
        "one word": ["\n ".join(WORDS)],
        "many words": ["python3", "-m", "verl.trainer.main_ppo", *WORDS],
        "file": [str(tmp_path / "run.sh")],
        "standard input": [],
    }
    monkeypatch.setattr(sys, "argv", ["from_verl", *forms[given]])
    monkeypatch.setattr(sys, "stdin", io.StringIO(SCRIPT))
    main()
    printed = capsys.readouterr().out
    assert "train_sync.py" in printed and "--rollout-n 3" in printed and "--logger console wandb" in printed
    assert "#   no.such=1" in printed


def test_the_module_starts_and_its_errors_are_one_line():
    start = [sys.executable, "-m", "tools.from_verl", "no_such_file.sh"]
    done = subprocess.run(start, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: no_such_file.sh: it cannot be read") and done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------ reading


def test_bash_decides_what_variables_conditions_and_arrays_mean(monkeypatch):
    monkeypatch.setenv("FROM_OUTSIDE", "7")
    script = """
        MODE=async; A=${A:-5}; ARGS=(data.a=${A} 'data.b="x y"'); Q="data.c=1 \\
            data.d=$((A + 1))"
        if [ "$MODE" = async ]; then E=True; else E=False; fi
        for role in actor ref; do ARGS+=(x.$role=1); done
        ray job submit -- python3 -m verl.experimental.fully_async_policy.fully_async_main --config-path=config \\
            --config-name 'fully_async_ppo_trainer.yaml' "${ARGS[@]}" $Q data.e=$E \\
            +data.f=$FROM_OUTSIDE ++data.g='["p","q"]' ~data.h name=$(basename a/b.txt .txt) # a remark
    """
    command = read_script(script)
    assert command.module.endswith("fully_async_main") and command.config_name == "fully_async_ppo_trainer.yaml"
    assert command.values == {
        "data.a": 5, "data.b": "x y", "x.actor": 1, "x.ref": 1, "data.c": 1, "data.d": 6, "data.e": True, "data.f": 7,
        "data.g": ["p", "q"], "name": "b",
    }  # fmt: skip
    assert command.deleted == ["data.h"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1e-6", 1e-6), ("0.", 0.0), ("-1", -1), ("true", True), ("False", False), ("null", None), ("None", None),
        ("'a,b'", "a,b"), ('"1"', "1"), ("[]", []), ("[1, 'x,y', [2]]", [1, "x,y", [2]]), ("0.6_1.6", "0.6_1.6"), ("", ""),
        ("~/data/x.parquet", "~/data/x.parquet"),
    ],
)  # fmt: skip
def test_values_are_hydras(text, value):
    got = parse_value(text)
    assert got == value and type(got) is type(value)


def test_what_cannot_be_read_is_said(monkeypatch):
    with pytest.raises(UserError, match="does not start verl"):
        read_script("echo hello; python3 train.py a.b=1")
    with pytest.raises(UserError, match="bash cannot read it"):
        read_script("python3 -m verl.trainer.main_ppo 'a=1")
    monkeypatch.setattr("tools.from_verl.command.SECONDS_TO_READ", 1)
    with pytest.raises(UserError, match="did not come to the end"):
        read_script("while true; do :; done")


def test_no_word_is_lost_whatever_it_is():
    found = ours("data.max_prompt_length=", "stray", "~data.shuffle", "trainer.project_name=${oc.env:X}", "a.b.c=1", "++a.d=2",
                 "data.train_batch_size=many")  # fmt: skip
    assert {key: kind for key, (kind, _) in found.verdicts.items()} == {
        "data.max_prompt_length": "not here", "stray": "unknown", "data.shuffle": "not here",
        "trainer.project_name": "not here", "a.b.c": "unknown", "a.d": "unknown",
        "data.train_batch_size": "not here",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ the table


def test_every_flag_of_the_table_exists_and_every_default_is_a_keys():
    existing = {flag for script in SCRIPTS for flag in translate.own_defaults(script)}
    existing |= translate.own_defaults("train_sft.py").keys()
    shown = {flag for row in (*ROWS, *table.OWN) for flag in row.flags.split(", ") if flag}
    assert all(table.find(name, ROWS_OF_SFT) for name in map(table.in_full, table.SFT_KEYS["names"].values()))
    of_forks = {"--gdpo-reward-keys", "--gdpo-reward-weights"}  # of examples/forks/gdpo.diff, as their rows say
    assert shown - existing == of_forks
    names = {names[0] for row in (*ROWS, *table.OWN) for names in row.names}
    assert {key for defaults in OTHER_DEFAULTS.values() for key in defaults} <= names
    every = [name for row in ROWS for names in row.names for name in names]
    assert len(every) == len(set(every)), "a key appears in one row only"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_key_is_not_here_only_if_its_value_needs_a_missing_feature(script):
    module = {"train_sync.py": "main_ppo", "train_async.py": "fully_async_main"}.get(script, "one_step_off_policy.main_ppo")
    of = "actor_rollout_ref."
    asking = [
        "actor.megatron.context_parallel_size=4", "actor.megatron.tensor_model_parallel_size=2", "model.lora.dropout=0.1",
        "rollout.multi_turn.enable=True", "rollout.expert_parallel_size=8", "ref.router_replay.mode=R2",
        "rollout.name=sglang", "rollout.val_kwargs.top_k=20", "rollout.dtype=float16", "actor.optim.lr_scheduler_type=wsd",
    ]  # fmt: skip
    harmless = [
        "actor.megatron.context_parallel_size=1", "ref.megatron.pipeline_model_parallel_size=1", "model.lora.dropout=0.0",
        "rollout.multi_turn.enable=False", "rollout.expert_parallel_size=1", "ref.router_replay.mode=disabled",
    ]  # fmt: skip
    assert {why[0] for why in ours(*(of + key for key in asking), script=module).verdicts.values()} == {"not here"}
    assert {why[0] for why in ours(*(of + key for key in harmless), script=module).verdicts.values()} == {"not needed"}


# ------------------------------------------------------------------------------------------------ meanings


def shown(found) -> dict[str, object]:
    return {flag.removeprefix("--"): value for flag, value in found.flags.items()}


def test_what_the_command_leaves_out_is_verls_default_not_ours():
    got = translate.parse(ours("algorithm.adv_estimator=reinforce_plus_plus", "actor_rollout_ref.model.path=x"))
    expected = {
        "train_batch_size": 1024, "ppo_mini_batch_size": 256, "rollout_n": 1, "max_prompt_length": 512, "lr": 1e-6,
        "max_response_length": 512, "lr_warmup_steps": 0, "lr_scheduler_type": "constant", "weight_decay": 0.01,
        "dtype": "bfloat16", "gradient_checkpointing": True, "rollout_tp": 2, "test_freq": 0, "total_epochs": 30,
        "loss_agg_mode": "token-mean",
        "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "val_before_train": True, "shuffle": True,
    }  # fmt: skip
    assert {name: parts.get(got, name) for name in expected} == expected


def test_verls_own_default_estimator_has_a_critic_with_verls_numbers():
    words = "critic.optim.lr=2e-5 critic.model.path=y trainer.critic_warmup=20 algorithm.lam=0.95"
    words = f"{words} actor_rollout_ref.model.path=x actor_rollout_ref.actor.ppo_epochs=2".split()
    found = ours(*words, "critic.ppo_micro_batch_size_per_gpu=4", "critic.model.fsdp_config.param_offload=True")
    expected = {"adv-estimator": "gae", "critic-lr": 2e-5, "critic-model": "y", "lam": 0.95, "critic-ppo-epochs": 2}
    expected |= {"critic-warmup": 19, "cliprange-value": 0.5}
    assert {name: found.flags.get(f"--{name}") for name in expected} == expected
    assert not found.refusal and not any(kind == "not here" for kind, _ in found.verdicts.values())
    plain = ours(*words, "algorithm.adv_estimator=grpo")
    assert not any("critic" in flag or flag == "--lam" for flag in plain.flags)


MEANINGS = [line.split("\t") for line in (ROOT / "tests/fixtures/verl/meanings.tsv").read_text().splitlines()[1:]]


SPLIT = ("algorithm.adv_estimator=grpo", "A.rollout.n=4", "A.rollout.tensor_model_parallel_size=1")
SPLIT = tuple(word.replace("A.", "actor_rollout_ref.") for word in SPLIT)
# The first word of a line -> verl's program, and the keys that it stands for. verl's own defaults of the first: 4 updates a
# step, one batch ahead, at most 8 versions in a response; of the second: a publish every 4 steps, one mini-batch a step, 100
# prompts.
ASYNCHRONOUS = {
    "V1": (
        "trainer.main_ppo",
        "trainer.v1.trainer_mode=separate_async A.rollout.nnodes=1 trainer.n_gpus_per_node=4 data.train_batch_size=64 "
        "A.actor.ppo_mini_batch_size=16 trainer.total_training_steps=100 trainer.test_freq=5 "
        "A.actor.optim.lr_warmup_steps_ratio=0.1 A.rollout.tensor_model_parallel_size=1",
    ),
    "FULLY": (
        "fully_async_main",
        "trainer.test_freq=5 trainer.save_freq=10 A.actor.ppo_mini_batch_size=10 rollout.nnodes=1 "
        "A.rollout.tensor_model_parallel_size=1",
    ),
}


@pytest.mark.parametrize(("words", "flags_"), MEANINGS)
def test_values_keep_their_meaning(words, flags_):
    first, _, rest = words.partition(" ")
    program, own = ASYNCHRONOUS.get(first, ("main_ppo", first))
    words = f"algorithm.adv_estimator=grpo A.rollout.n=4 {own} {rest}".replace("A.", "actor_rollout_ref.")
    found = ours(*words.split(), script=program)
    wanted = json.loads(flags_)
    missing = [key for key, (kind, _) in found.verdicts.items() if kind in ("not here", "unknown")]
    assert missing == wanted.pop("missing", missing) and [*found.forks] == wanted.pop("forks", [])
    assert all((ROOT / "examples" / "forks" / f"{name}.diff").exists() for name in found.forks)
    assert {name: shown(found).get(name) for name in wanted} == wanted and not found.refusal
    assert first not in ASYNCHRONOUS or found.script == "train_async.py"


def test_verls_newer_trainer_is_synchronous_by_default():
    keys_ = ("trainer.use_v1=True", "trainer.v1.trainer_mode=sync", "trainer.v1.sampler.max_off_policy_threshold=8")
    found = ours("algorithm.adv_estimator=grpo", *keys_, "trainer.v1.sampler.sync_refill_failed_groups=True")
    assert found.script == "train_sync.py" and {kind for kind, _ in found.verdicts.values()} <= {"translated", "not needed"}
    old = ours("trainer.use_v1=False", "trainer.v1.trainer_mode=separate_async", script="trainer.main_ppo")
    assert old.script == "train_sync.py"


@pytest.mark.parametrize("metric", ["reward", "acc", "score", "seq_reward"])
def test_groups_are_filtered_by_the_score_without_the_penalty_on_length(metric):
    of = "algorithm.filter_groups."
    words = ("algorithm.adv_estimator=grpo", of + "enable=True", f"{of}metric={metric}", of + "max_num_gen_batches=3")
    overlong = (
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=9",
    )
    assert ours(*words).verdicts[of + "metric"][0] == "translated", "no false alarm"
    differs = metric in ("reward", "seq_reward")
    assert ours(*words, *overlong).verdicts[of + "metric"][0] == ("not here" if differs else "translated")
    by_default = ours(words[0], words[1], *overlong)
    assert any("the penalty on length in it" in note for note in by_default.notes), "verl's default is the reward"


@pytest.mark.parametrize(
    ("learn", "generate", "nodes", "ranks", "generators"),
    [((1, 1), (1, 1), 1, 2, 1), ((1, 4), (1, 4), 1, 8, 4), ((1, 8), (1, 8), 2, 8, 4), ((1, 16), (1, 16), 2, 16, 8),
     ((2, 8), (2, 8), 4, 8, 4), ((1, 6), (1, 2), 1, 8, 2)],
)  # fmt: skip
def test_devices_become_ranks_and_generators(learn, generate, nodes, ranks, generators):
    words = [f"trainer.nnodes={learn[0]}", f"trainer.n_gpus_per_node={learn[1]}", f"rollout.nnodes={generate[0]}"]
    found = ours(*SPLIT, *words, f"rollout.n_gpus_per_node={generate[1]}", script="one_step_off_policy.main_ppo")
    assert found.script == "train_one_step_off.py"
    launched = number(found.launcher, "--nnodes"), number(found.launcher, "--nproc-per-node"), found.flags["--generators"]
    assert launched == (nodes, ranks, generators)


def test_what_does_not_divide_is_said():
    words = ("trainer.n_gpus_per_node=12", "rollout.nnodes=1", "rollout.n_gpus_per_node=5")
    found = ours(*SPLIT, *words, script="one_step_off_policy.main_ppo")
    assert found.verdicts["rollout.n_gpus_per_node"][0] == "not here"


def test_ratios_of_a_run_whose_length_the_data_decide_are_not_guessed():
    key = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"
    found = ours(f"{key}=0.05", "trainer.total_epochs=3")
    assert found.verdicts[key][0] == "not here" and "0.05 times" in found.verdicts[key][1]


def test_every_flag_that_is_printed_is_read_back(tmp_path):
    """Booleans, lists and numbers survive the command line of each script."""
    words = ("data.shuffle=False", "trainer.logger=['console','tensorboard']", "actor_rollout_ref.rollout.temperature=0.7")
    for script, module in (("train_sync.py", "main_ppo"), ("train_async.py", "fully_async_main")):
        found = ours(*SPLIT, *words, "rollout.total_rollout_steps=1000", script=module)
        args = flags.read(SCRIPTS[script].Args, args=found.words()[1:])
        assert (args.data.shuffle, args.log.logger, args.sampling.temperature) == (False, ("console", "tensorboard"), 0.7)


def test_all_of_verls_runs_are_here():
    assert {*RUNS.values()} == {recipe.stem for recipe in RECIPES}
