"""The recipes: every command line, for GPU and for NPU, parses with its script's own flags, and the flags fit together."""

import os
import re
import subprocess

import pytest
from helpers import ROOT

import plan
import rehearse
import report
import train_async
import train_one_step_off
import train_sft
import train_sync
import view
from rl import flags, parts

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


def number(launcher: list[str], flag: str) -> int:
    return int(launcher[launcher.index(flag) + 1]) if flag in launcher else 1


@pytest.mark.parametrize("device", ["gpu", "npu"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_its_flags_fit(recipe, device, tmp_path, monkeypatch, capfd):
    """Each other and its devices, and each has an effect. tests/from_verl compares them with verl's own command."""
    given = words(recipe, device, tmp_path)
    ranks, nodes = number(given, "--nproc-per-node"), number(given, "--nnodes")
    monkeypatch.setenv("WORLD_SIZE", str(ranks * nodes))  # as torchrun sets it: the check asks for a prompt a rank
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    _, module, args = parse(recipe, device, tmp_path)
    assert "does nothing" not in capfd.readouterr().err
    assert args.seed == 7, "the user's own flags come last"
    generate = args.schedule.generators if args.schedule.split else 0
    assert (ranks if module is train_sync else generate) % args.engine.rollout_tp == 0
    assert module is train_sync or 0 < generate < ranks
    learner, learners = args.learner, nodes * (ranks - generate)
    assert learners % learner.sequence_parallel == learners % learner.expert_parallel == 0
    longest = args.data.max_prompt_length + args.sampling.max_response_length
    assert learner.max_tokens_per_micro_batch * learner.sequence_parallel >= longest
    assert args.model.startswith("Qwen/") and learner.dtype == "bfloat16"


# ------------------------------------------------------------------------------------- the tables of flags


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
    "--demonstrations",
}


def of_diffs() -> set[str]:
    """Return the flags that the diffs of examples/forks and of docs/forking.md add."""
    diffs = "".join(file.read_text() for file in [*(ROOT / "examples" / "forks").glob("*.diff"), ROOT / "docs" / "forking.md"])
    return {f"--{name.replace('_', '-')}" for name in re.findall(r"^\+    ([a-z]\w*): ", diffs, re.M)}


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_a_page_names_only_flags_that_exist(page):
    named = {*re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text())}
    assert named - known_flags() - flags_of_tools() - OF_OTHER_PROGRAMS - of_diffs() == set()
