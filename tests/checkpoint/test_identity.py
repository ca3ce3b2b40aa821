"""A run resumes as the same run: all flags and the files they name are compared, but those that may change."""

import copy
import json
import shutil
from pathlib import Path

import pytest

import train_async
import train_one_step_off
import train_sft
import train_sync
from rl import parts
from rl.checkpoint import files
from rl.checkpoint.files import identity_of
from rl.checkpoint.resume import MUST_STAY, MUST_STAY_IN_A_STREAM, check_same
from rl.data.args import DataArgs
from rl.data.prompts import PromptDataset
from rl.errors import UserError
from rl.model.pretrained import load_tokenizer
from rl.ranges import may_change

SCRIPTS = {module.__name__: module.Args for module in (train_sync, train_one_step_off, train_async)}


@pytest.fixture(scope="module")
def prompts(demo_model):
    return PromptDataset(["demo"], "train", load_tokenizer(demo_model), DataArgs())


def other(value):
    """Return another value of the same type. The ranges of flags do not matter here."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ("other",) if isinstance(value, tuple) else "other"


def saved(*run) -> dict:
    """The identity of a run of these args, script, model and prompts, as a checkpoint has it."""
    return json.loads(json.dumps(identity_of(*run)))


def check(args, script, model, prompts, was: dict) -> list[str]:
    return check_same(args, identity_of(args, script, model, prompts), was, Path("step_1"))


def test_a_run_of_an_earlier_version_without_a_kl_resumes_without_one(prompts, demo_model):
    args = SCRIPTS["train_sync"]()
    was = saved(args, "train_sync", demo_model, prompts)
    was["flags"] |= {"use_kl_loss": False, "kl_loss_coef": 0.001}
    assert check(args, "train_sync", demo_model, prompts, was) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_belongs_to_the_run_or_is_named_as_one_that_may_change(script, prompts, demo_model, monkeypatch):
    for digest in ("_digest_model", "_digest_prompts", "_digest_tokenizer"):  # the content stays
        monkeypatch.setattr(files, digest, lambda _: f"{len(prompts)} prompts, the same")
    args = parts.make(SCRIPTS[script], train_batch_size=8)
    was = saved(args, script, demo_model, prompts)
    assert check(args, script, demo_model, prompts, was) == []
    stays = MUST_STAY | (MUST_STAY_IN_A_STREAM if script == "train_async" else set())
    for field, was_value in parts.flat(args).items():
        name = "--" + field.replace("_", "-")
        value = f"{__file__}:other" if field == "reward" else other(was_value)
        changed = parts.replace(args, **{field: value})
        now = changed, script, demo_model, prompts
        if field in may_change(type(args)):
            assert check(*now, was) == [], field
            continue
        with pytest.raises(UserError, match=rf"step_1 (is of a run with other settings|was written with {name})") as refused:
            check(*now, was)
        assert name in str(refused.value)
        changed = parts.replace(changed, resume_mode="step_1")
        now = changed, script, demo_model, prompts
        if field in stays:
            with pytest.raises(UserError, match="its state means nothing under another value"):
                check(*now, was)
        else:
            line, *rest = check(*now, was)
            assert line.startswith(f"{name}: was ") and ", is " in line
            assert not rest or field == "train_batch_size", "a mini-batch that was not given is the batch"


def test_a_supervised_run_resumes(prompts, demo_model):
    """Its script has fewer flags than the others."""
    own = train_sft.Args(), "train_sft", demo_model, prompts
    assert check(*own, saved(*own)) == []


def test_another_script_is_refused_in_any_case(prompts, demo_model):
    args = parts.make(train_sync.Args, resume_mode="step_1")
    was = saved(args, "train_sync", demo_model, prompts)
    with pytest.raises(UserError, match="written by train_sync, not by my_experiment"):
        check(args, "my_experiment", demo_model, prompts, was)


def test_a_flag_that_an_older_version_did_not_have_counts_as_its_default(prompts, demo_model):
    was = saved(train_sync.Args(), "train_sync", demo_model, prompts)
    del was["flags"]["grad_clip"]
    assert check(train_sync.Args(), "train_sync", demo_model, prompts, was) == []
    with pytest.raises(UserError, match=r"--grad-clip: was 1\.0, is 2\.0"):
        check(parts.make(train_sync.Args, grad_clip=2.0), "train_sync", demo_model, prompts, was)


def rows(path: Path, texts) -> Path:
    lines = [{"prompt": f"{t}+{t}=", "data_source": "x", "ground_truth": str(t)} for t in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_the_flags_name_is_compared_by_content(prompts, demo_model, models, tmp_path):
    """Under the same name with another content: refused. Under another name with the same content: the same run."""
    reward = tmp_path / "reward.py"
    reward.write_text("def f(data_source, solution_str, ground_truth, extra_info): return 1.0\n")
    data, model = rows(tmp_path / "data.jsonl", range(9)), tmp_path / "model"
    shutil.copytree(models["qwen3"], model)

    def of(name="data.jsonl", path=model, tokenizer=prompts.tokenizer) -> tuple:
        args = parts.make(train_sync.Args, train_files=(str(tmp_path / name),), reward=f"{reward}:f", model=str(path))
        return args, "train_sync", str(path), PromptDataset(args.data.train_files, "train", tokenizer, args.data)

    was = saved(*of())
    rows(tmp_path / "moved.jsonl", range(9))
    shutil.copytree(model, tmp_path / "moved")
    assert check(*of("moved.jsonl", tmp_path / "moved"), was) == []
    assert check(*of(path=models["qwen3"]), was) == []

    def refused(what: str, **how) -> None:
        with pytest.raises(UserError) as error:
            check(*of(**how), was)
        assert what in str(error.value) and str(error.value).count("\n") == 1, error.value

    for other_rows in (range(8), range(10), [*range(8), 9], reversed(range(9))):
        rows(data, other_rows)
        refused("the content of --train-files: was ")
    rows(data, range(9))
    refused("the content of --model: was ", path=models["qwen2-untied"])
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-4000] + bytes(4000))
    refused("the content of --model: was ")
    (model / "model.safetensors").write_bytes(weights)
    other_tokenizer = copy.deepcopy(prompts.tokenizer)
    other_tokenizer.chat_template += " "
    refused("the tokenizer: was ", tokenizer=other_tokenizer)
    reward.write_text(reward.read_text().replace("1.0", "2.0"))
    refused("the content of --reward: was ")
