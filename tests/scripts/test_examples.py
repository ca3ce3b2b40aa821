"""The recipes: every command line, for GPU and for NPU, parses with its script's own flags, and the flags fit together."""

import os
import re
import subprocess

import pytest
from helpers import ROOT
from transformers import CONFIG_MAPPING, Qwen3MoeConfig

import plan
import rehearse
import report
import train_async
import train_one_step_off
import train_sft
import train_sync
import view
from rl import flags, parts
from rl.model.attention import check_supported
from rl.model.pretrained import FAMILIES, takes_images

RECIPES = sorted((ROOT / "examples").glob("*.sh"))
SCRIPTS = {"train_sync.py": train_sync, "train_async.py": train_async, "train_one_step_off.py": train_one_step_off}
FAKE_TORCHRUN = '#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n'


def words(recipe, device: str, tmp_path) -> list[str]:
    """Return the words that the recipe passes to torchrun, with one more flag from its user."""
    fake = tmp_path / "torchrun"
    fake.write_text(FAKE_TORCHRUN)
    fake.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DEVICE": device}
    done = subprocess.run([recipe, "--seed", "7"], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def parse(recipe, device: str, tmp_path):
    """(torchrun's words, the script's module, its Args), the flags checked."""
    given = words(recipe, device, tmp_path)
    at = next(i for i, word in enumerate(given) if word in SCRIPTS)
    module = SCRIPTS[given[at]]
    return given[:at], module, flags.read(module.Args, args=given[at + 1 :])


def generators_of(args) -> int:
    return args.schedule.generators if args.schedule.split else 0


def number(launcher: list[str], flag: str) -> int:
    return int(launcher[launcher.index(flag) + 1]) if flag in launcher else 1


# The numbers of verl's runs, as their authors give them. devices: (generators, learners). What verl counts in publishes is
# multiplied out.
# fmt: off
VERL = {
    "grpo_qwen2.5_0.5b_gsm8k_async": {
        "devices": (1, 1), "max_prompt_length": 2048, "max_response_length": 3072, "truncation": "left", "rollout_n": 8,
        "train_batch_size": 64, "ppo_mini_batch_size": None, "staleness_threshold": 0.2, "publish_every": 4,
        "use_kl_loss": True, "kl_loss_coef": 0.001, "use_kl_in_reward": False, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28,
        "clip_ratio_c": 10, "entropy_coeff": 0, "loss_agg_mode": "token-mean", "max_tokens_per_micro_batch": 5120, "lr": 1e-6,
        "lr_scheduler_type": "constant", "weight_decay": 0.1, "rollout_tp": 1, "gpu_memory_utilization": 0.8,
        "max_num_batched_tokens": 5120, "temperature": 1, "top_p": 1, "val_top_p": 0.7,
        "val_temperature": 1, "overlong_buffer_len": 512, "overlong_penalty_factor": 1, "val_before_train": False,
        "save_freq": 0, "log_val_generations": 10, "param_offload": False, "total_epochs": 1, "prompt_key": "prompt",
        "total_rollout_steps": 51200,
        "test_freq": 20 * 4, "old_is_rollout": True,
    },
    "grpo_qwen2.5_0.5b_gsm8k_sync": {
        "devices": (0, 2), "train_batch_size": 128, "max_prompt_length": 2048, "max_response_length": 3072,
        "filter_overlong_prompts": True, "truncation": "error", "lr": 5e-7, "entropy_coeff": 0.001, "ppo_mini_batch_size": 64,
        "use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl", "gradient_checkpointing": True,
        "param_offload": False, "rollout_tp": 2, "rollout_n": 8, "gpu_memory_utilization": 0.7,
        "test_freq": 5, "total_epochs": 1, "save_freq": 0,
    },
    "grpo_qwen2.5_3b_gsm8k_one_step_off": {
        "devices": (4, 4), "train_batch_size": 1024, "max_prompt_length": 512, "max_response_length": 1024,
        "filter_overlong_prompts": True, "shuffle": False, "lr": 3e-6, "ppo_mini_batch_size": 256, "use_kl_loss": True,
        "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl", "entropy_coeff": 0, "gradient_checkpointing": True, "rollout_n": 5,
        "rollout_tp": 2, "gpu_memory_utilization": 0.6,
        "val_before_train": True, "total_epochs": 15, "save_freq": 0, "test_freq": 0,
    },
    "grpo_qwen3_vl_8b_geo3k_async": {
        "devices": (16, 16), "staleness_threshold": 0.1, "publish_every": 4,
        "train_batch_size": 128, "ppo_mini_batch_size": 64,
        "rollout_is": "sequence", "rollout_is_threshold": "2.0", "rollout_is_batch_normalize": True, "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.6_1.6", "test_freq": 5 * 4,
    },
    "grpo_qwen3_vl_8b_geo3k_async_proposed": {
        "devices": (16, 16), "staleness_threshold": 10, "publish_every": 5,
        "train_batch_size": 128, "ppo_mini_batch_size": 64,
        "rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001", "test_freq": 5 * 5,
    },
    "dapo_qwen3_30b_a3b_async": {
        "devices": (16, 16), "max_prompt_length": 2048, "max_response_length": 6144, "truncation": "left", "rollout_n": 4,
        "train_batch_size": 16, "total_rollout_steps": 3200, "staleness_threshold": 0.75,
        "publish_every": 2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10,
        "loss_agg_mode": "token-mean", "entropy_coeff": 0, "use_kl_loss": False, "gradient_checkpointing": True, "lr": 1e-6,
        "lr_warmup_steps": 10, "weight_decay": 0.1, "grad_clip": 1, "rollout_tp": 2, "gpu_memory_utilization": 0.7,
        "max_tokens_per_micro_batch": 4096, "sequence_parallel": 8,
        "max_num_seqs": 128, "max_num_batched_tokens": 8192, "enforce_eager": False,
        "overlong_buffer_len": 0, "val_top_p": 0.7, "val_temperature": 1, "test_freq": 25 * 2, "save_freq": 50 * 2,
        "filter_groups": False,
    },
    "gspo_qwen2.5_3b_gsm8k": {
        "devices": (0, 8), "train_batch_size": 512, "ppo_mini_batch_size": 128, "max_prompt_length": 2048,
        "max_response_length": 8192, "rollout_n": 16, "loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": False, "entropy_coeff": 0, "grad_clip": 1, "lr": 1e-6,
        "weight_decay": 0.1, "gradient_checkpointing": True, "max_tokens_per_micro_batch": 10240, "sequence_parallel": 4,
        "rollout_tp": 2,
        "gpu_memory_utilization": 0.6, "overlong_buffer_len": 0, "test_freq": 10,
        "save_freq": 10, "total_training_steps": 500,
    },
    "gspo_qwen3_30b_a3b": {
        "devices": (0, 16), "train_batch_size": 32, "ppo_mini_batch_size": 4, "rollout_n": 2, "max_prompt_length": 2048,
        "max_response_length": 8192, "truncation": "left", "loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4,
        "use_kl_loss": False, "lr": 1e-6, "weight_decay": 0.1, "grad_clip": 1, "rollout_tp": 4,
        "gpu_memory_utilization": 0.8, "max_num_batched_tokens": 10240, "overlong_buffer_len": 4096,
        "overlong_penalty_factor": 1, "total_training_steps": 300, "param_offload": True, "expert_parallel": 8,
    },
    "grpo_qwen3.5_2b_geo3k": {
        "max_prompt_length": 2048, "max_response_length": 1536, "lr": 5e-7, "kl_loss_coef": 0.02,
        "max_tokens_per_micro_batch": 2048 + 1536, "gpu_memory_utilization": 0.3, "max_num_batched_tokens": 4096,
        "val_before_train": False,
    },
}
for run in ("grpo_qwen3.5_27b_geo3k", "grpo_qwen3.5_35b_a3b_geo3k"):
    VERL[run] = {
        "max_prompt_length": 1024, "max_response_length": 2048, "lr": 1e-6, "kl_loss_coef": 0.01,
        "max_tokens_per_micro_batch": 1024 + 2048, "gpu_memory_utilization": 0.6, "max_num_batched_tokens": 8192,
        "val_before_train": True,
    }
for run in (run for run in VERL if "qwen3.5" in run):
    VERL[run] |= {
        "devices": (0, 8), "train_batch_size": 64, "ppo_mini_batch_size": 16, "rollout_n": 5, "filter_overlong_prompts": True,
        "truncation": "error", "shuffle": False, "use_kl_loss": True, "kl_loss_type": "low_var_kl", "entropy_coeff": 0,
        "gradient_checkpointing": True, "param_offload": True, "sequence_parallel": 1, "rollout_tp": 4, "total_epochs": 15,
        "test_freq": 5, "save_freq": 5,
    }
for run in ("grpo_qwen3_vl_8b_geo3k_async", "grpo_qwen3_vl_8b_geo3k_async_proposed"):
    VERL[run] |= {
        "max_prompt_length": 1024, "max_response_length": 2048, "filter_overlong_prompts": True, "truncation": "error",
        "shuffle": False, "rollout_n": 4, "ppo_mini_batch_size": 64, "lr": 1e-6, "use_kl_loss": True, "kl_loss_coef": 0.01,
        "kl_loss_type": "low_var_kl", "entropy_coeff": 0, "gradient_checkpointing": True, "max_tokens_per_micro_batch": 16384,
        "rollout_tp": 1, "gpu_memory_utilization": 0.8, "max_num_batched_tokens": 32768,
        "total_epochs": 200, "total_rollout_steps": 51200,
    }
# fmt: on


@pytest.mark.parametrize("device", ["gpu", "npu"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_has_the_numbers_of_verls_run(recipe, device, tmp_path, monkeypatch, capfd):
    """Its flags fit each other and its devices, and each has an effect."""
    given = words(recipe, device, tmp_path)
    ranks, nodes = number(given, "--nproc-per-node"), number(given, "--nnodes")
    monkeypatch.setenv("WORLD_SIZE", str(ranks * nodes))  # as torchrun sets it: the check asks for a prompt a rank
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    _, module, args = parse(recipe, device, tmp_path)
    assert "does nothing" not in capfd.readouterr().err
    assert args.seed == 7, "the user's own flags come last"
    generate = generators_of(args)
    assert (ranks if module is train_sync else generate) % args.engine.rollout_tp == 0
    assert module is train_sync or 0 < generate < ranks
    learner, learners = args.learner, nodes * (ranks - generate)
    assert learners % learner.sequence_parallel == learners % learner.expert_parallel == 0
    longest = args.data.max_prompt_length + args.sampling.max_response_length
    assert learner.max_tokens_per_micro_batch * learner.sequence_parallel >= longest
    assert args.model.startswith("Qwen/") and learner.dtype == "bfloat16"
    expected = dict(VERL[recipe.stem])
    assert (nodes * generate, learners) == expected.pop("devices")
    assert {name: parts.get(args, name) for name in expected} == expected
    warm_up = {"gspo_qwen2.5_3b_gsm8k": 0.05 * 500, "gspo_qwen3_30b_a3b": 10, "grpo_qwen2.5_0.5b_gsm8k_async": 10}
    assert learner.lr_warmup_steps == warm_up.get(recipe.stem, learner.lr_warmup_steps)


def test_epochs_or_prompts_end_a_run_whichever_come_first(tmp_path):
    """7,473 prompts of GSM8K, 2,101 of Geometry3K."""
    steps = {"grpo_qwen2.5_0.5b_gsm8k_async": (7473, 116), "grpo_qwen3_vl_8b_geo3k_async": (2101, 400)}
    for name, (prompts, expected) in steps.items():
        assert parse(ROOT / "examples" / f"{name}.sh", "gpu", tmp_path)[2].total_steps(prompts) == expected


def test_what_the_recipes_say_of_their_models_is_so():
    assert {recipe.stem for recipe in RECIPES} == set(VERL)
    check_supported(Qwen3MoeConfig(), "Qwen3-30B-A3B", longest=32768)  # passes: mixtures of experts are not refused
    assert takes_images(CONFIG_MAPPING["qwen3_vl"]()) and "qwen3_vl" in FAMILIES


# ------------------------------------------------------------------------------------- the tables of flags

FLAG = re.compile(r"`[^`]*`")


def flags_of(text: str) -> set[str]:
    """The flags in the text's code spans: --clip-ratio-low, ..."""
    return {flag for span in FLAG.findall(text) for flag in re.findall(r"--[a-z][a-z0-9-]+", span)}


def verl_pages() -> str:
    """Return the docs on verl's and TRL's words: the page for readers, and the table of all keys."""
    return "".join((ROOT / "docs" / name).read_text() for name in ("from-verl.md", "generated/verl-keys.md"))


def known_flags() -> set[str]:
    names = {name for module in SCRIPTS.values() for name in parts.leaves(module.Args)}
    return {f"--{name.replace('_', '-')}" for name in names} | {f"--no-{name.replace('_', '-')}" for name in names}


def flags_of_tools() -> set[str]:
    """Return the flags of the other scripts: plan.py, train_sft.py, doctor.py and so on, and the translator."""
    args = (plan.PlanArgs, report.Args, train_sft.Args, view.Args, rehearse.Args)
    names = {field for of_one in args for field in parts.leaves(of_one)}
    files = ["replay.py", "doctor.py", "tools/from_verl/__main__.py", "examples/make_data.py"]
    parsed = re.findall(r'add_argument\(\s*"(--[\w-]+)"', "".join((ROOT / file).read_text() for file in files))
    return {f"--{name.replace('_', '-')}" for name in names} | {*parsed, "--step", "--without"}  # the last two are why.py's


OF_OTHER_PROGRAMS = {
    *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--standalone", "--max-restarts"),
    *("--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--rdzv-", "--cpu", "--multi", "--num"),
    *("--ntasks-per-node", "--nodes", "--gpus-per-node", "--shm-size", "--version", "--git", "--recount", "--logdir"),
    *("--extra-index-url", "--no-deps", "--no-binary", "--no-build-isolation"),
    *("--enable-lora", "--lora-modules", "--max-lora-rank"),
    *("--exclude", "--served-model-name", "--port", "--security-opt", "--help", "--help-all", "--steps"),
}


def of_diffs() -> set[str]:
    """Return the flags that the diffs of examples/forks and of docs/forking.md add."""
    diffs = "".join(file.read_text() for file in [*(ROOT / "examples" / "forks").glob("*.diff"), ROOT / "docs" / "forking.md"])
    return {f"--{name.replace('_', '-')}" for name in re.findall(r"^\+    ([a-z]\w*): ", diffs, re.M)}


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_a_page_names_only_flags_that_exist(page):
    named = {*re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text())}
    assert named - known_flags() - flags_of_tools() - OF_OTHER_PROGRAMS - of_diffs() == set()


def test_the_tables_cover_every_flag_of_the_recipes():
    used = {flag for recipe in RECIPES for flag in re.findall(r"(?<=\s)--[a-z][a-z0-9-]+|(?<=\()--[a-z-]+", recipe.read_text())}
    mine = {flag.replace("--no-", "--", 1) for flag in used & known_flags()}
    assert len(mine) > 40
    assert mine - flags_of(verl_pages()) == set()
