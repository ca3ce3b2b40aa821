"""The recipes: every command line, for GPU and for NPU, parses with its script's own flags, and the flags fit together."""

import os
import re
import subprocess

import pytest
from conftest import ROOT
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, Qwen3MoeConfig

import train_async
import train_one_step_off
import train_sync
from rl import flags
from rl.attention import check_supported
from rl.errors import UserError
from rl.ranges import check

RECIPES = sorted((ROOT / "examples").glob("*.sh"))
SCRIPTS = {"train_sync.py": train_sync, "train_async.py": train_async, "train_one_step_off.py": train_one_step_off}
FAKE_TORCHRUN = '#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n'


def words(recipe, device: str, tmp_path) -> list[str]:
    """What the recipe hands to torchrun, with one more flag from its user."""
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


def test_all_six_are_there():
    assert len(RECIPES) == 6


@pytest.mark.parametrize("device", ["gpu", "npu"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_its_flags_fit(recipe, device, tmp_path):
    launcher, module, args = parse(recipe, device, tmp_path)
    ranks = number(launcher, "--nproc-per-node")
    assert args.seed == 7, "the user's own flags come last"
    if module is train_sync:
        assert ranks % args.rollout_tp == 0
    else:
        assert 0 < args.generators < ranks and args.generators % args.rollout_tp == 0
    assert args.ppo_max_token_len_per_gpu >= args.max_prompt_length + args.max_response_length
    assert args.dtype == "bfloat16" and args.lr <= 3e-6 and args.model.startswith("Qwen/")
    assert args.enforce_eager == (device == "npu")


def test_what_the_issue_asks_of_each(tmp_path):
    by_name = {recipe.stem: parse(recipe, "gpu", tmp_path)[2] for recipe in RECIPES}
    fully_async = by_name["grpo_qwen2.5_0.5b_gsm8k_async"]
    assert (fully_async.staleness_threshold, fully_async.trigger_parameter_sync_step) == (0.2, 4)
    gspo = by_name["gspo_qwen2.5_3b_gsm8k"]
    assert (gspo.loss_mode, gspo.clip_ratio_low, gspo.clip_ratio_high) == ("gspo", 3e-4, 4e-4)
    assert gspo.aggregation == "seq-mean-token-mean"
    assert by_name["grpo_qwen3_vl_8b_geo3k_async"].correction["rollout_rs_threshold"] == "0.999_1.001"
    assert by_name["grpo_qwen2.5_3b_gsm8k_one_step_off"].generators == 4


def test_what_the_recipes_say_of_their_models_is_so():
    check_supported(Qwen3MoeConfig(), "Qwen3-30B-A3B", longest=32768)  # passes: mixtures of experts are not refused
    assert type(CONFIG_MAPPING["qwen3_vl"]()) not in MODEL_FOR_CAUSAL_LM_MAPPING


def test_a_flag_that_a_script_has_not_is_noticed(tmp_path):
    recipe = tmp_path / "recipe.sh"
    recipe.write_text('#!/bin/sh\ntorchrun train_sync.py --no-such-flag 1 "$@"\n')
    recipe.chmod(0o755)
    with pytest.raises(UserError, match="no-such-flag"):
        parse(recipe, "gpu", tmp_path)
    _, _, args = parse(RECIPES[0], "gpu", tmp_path)
    args.clip_ratio_low, args.rollout_is = 0.2, "token"
    args.use_rollout_log_probs = True
    with pytest.raises(UserError):
        check(args)


# ------------------------------------------------------------------------------------- the tables of flags

FLAG = re.compile(r"`[^`]*`")


def flags_of(text: str) -> set[str]:
    """The flags in the text's code spans: --clip-ratio-low, ..."""
    return {flag for span in FLAG.findall(text) for flag in re.findall(r"--[a-z][a-z0-9-]+", span)}


def known_flags() -> set[str]:
    names = {name for module in SCRIPTS.values() for name in module.Args.__dataclass_fields__}
    return {f"--{name.replace('_', '-')}" for name in names} | {f"--no-{name.replace('_', '-')}" for name in names}


def test_the_tables_name_only_flags_that_exist():
    text = (ROOT / "docs" / "from-verl.md").read_text()
    of_torchrun = {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--standalone"}
    assert flags_of(text) - known_flags() - of_torchrun == set()
    pitfalls = (ROOT / "docs" / "pitfalls.md").read_text()
    assert flags_of(pitfalls) - known_flags() - of_torchrun - {"--speedup", "--shm-size", "--extra-index-url"} == set()


def test_the_tables_cover_every_flag_of_the_recipes():
    used = {flag for recipe in RECIPES for flag in re.findall(r"(?<=\s)--[a-z][a-z0-9-]+|(?<=\()--[a-z-]+", recipe.read_text())}
    mine = used & known_flags()
    assert len(mine) > 40
    assert mine - flags_of((ROOT / "docs" / "from-verl.md").read_text()) == set()
