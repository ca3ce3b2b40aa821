"""--push-to: what is pushed, and runs that push, or may not."""

import json

import huggingface_hub
import pytest
import yaml
from helpers import run_script

import train_sft
from rl import parts
from rl.checkpoint import push
from rl.errors import UserError

ARGS = parts.make(train_sft.Args, push_to="me/sums", model="Qwen/Qwen2.5-0.5B", lr=1e-6, seed=7)


@pytest.mark.parametrize("is_local", [False, True])
def test_what_is_pushed_and_the_card(tmp_path, monkeypatch, is_local):
    """A local model is named without its path."""
    model = str(tmp_path) if is_local else ARGS.model
    base = tmp_path.name if is_local else model
    pushed = {}
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda self, **how: pushed.update(how))
    (checkpoint := tmp_path / "run" / "step_000020").mkdir(parents=True)
    args = parts.replace(ARGS, model=model)
    assert push.push(args, "train_async", tmp_path / "run", checkpoint).endswith("/me/sums")
    assert pushed["repo_id"] == "me/sums" and pushed["folder_path"] == checkpoint
    assert pushed["commit_message"] == "Step 20 of run" and "training/*" in pushed["ignore_patterns"]
    _, head, text = (checkpoint / "README.md").read_text().split("---\n")
    assert yaml.safe_load(head).get("base_model") == (base if "/" in base else None)
    assert f"# sums\n\n`{base}` after 20 steps of supervised training with `train_async.py`, lr 1e-06, seed 7." in text


def test_a_push_that_fails_says_where_the_checkpoint_is(tmp_path, monkeypatch):
    def fail(self, *_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    (tmp_path / "step_000003").mkdir()
    with pytest.raises(UserError, match=r"me/sums: no route to host. The run is complete.* hf upload me/sums .*_000003"):
        push.push(ARGS, "train_sync", tmp_path, tmp_path / "step_000003")
    with pytest.raises(UserError, match=r"--push-to me/sums: no route to host. Correct"):
        push.open_repository("me/sums")


@pytest.mark.slow
def test_a_run_pushes_its_last_checkpoint_and_a_push_that_fails_loses_nothing(demo_model, tmp_path):
    flags = ["--total-training-steps", 2, "--test-freq", 2, "--val-max-samples", 20, "--push-to", "me/sums"]

    def run(script: str, name: str = "sums", refused: str = "", **how):
        env = {"CALLS": str(tmp_path / "calls"), "REFUSED": refused}
        where = ["--experiment-name", name, "--output-dir", tmp_path]
        return run_script("tests/programs/pushes.py", script, *flags, *where, env=env, **how)

    assert "hub         https://huggingface.co/me/sums" in run("train_async.py", ranks=2).stdout
    made, pushed = map(json.loads, (tmp_path / "calls").read_text().splitlines())
    assert made == {"call": "create_repo", "repo": "me/sums", "private": True, "exist_ok": True}
    checkpoint = tmp_path / "sums" / "step_000002"
    assert (pushed["repo_id"], pushed["folder_path"], pushed["commit_message"]) == (
        "me/sums",
        str(checkpoint),
        "Step 2 of sums",
    )
    assert {"model.safetensors", "config.json", "tokenizer_config.json", "README.md"} <= {*pushed["files"]}
    assert not [name for name in pushed["files"] if name.startswith("training")]

    done = run("train_async.py", refused="upload_folder", ranks=2, check=False)  # again: there is nothing left to train
    assert done.returncode == 1 and "The run is complete" in done.stderr and f"hf upload me/sums {checkpoint}" in done.stderr
    assert (checkpoint / "model.safetensors").exists()
    done = run("train_sync.py", "refused", refused="create_repo", check=False)
    assert done.returncode == 1 and "error: --push-to me/sums: 403" in done.stderr
    assert not (tmp_path / "refused").exists(), "nothing was trained"
