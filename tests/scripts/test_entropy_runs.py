"""Whole runs with --entropy-target, on the demo: they resume, in async they are as in sync, and they replay."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import is_documented, run_script
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
RUN = ("--entropy-target", 1.0, "--entropy-coeff-delta", 0.1, "--lr", 1e-3, "--total-training-steps", 5)
RUN = (*RUN, "--rollout-n", 2, "--test-freq", 0, "--save-freq", 2)


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "step_000005" / "model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_steered_run_resumes_is_the_same_in_async_and_replays(tmp_path):
    flags, sync = (*RUN, "--output-dir", tmp_path), tmp_path / "sync"
    run_script("train_sync.py", *flags, "--experiment-name", "sync", "--record-samples", tmp_path / "record")
    rows = [json.loads(line) for line in (sync / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "actor/entropy" in row]
    below, coefs = [row["actor/entropy"] <= 1 for row in rows], [row["actor/entropy_coeff"] for row in rows]
    assert coefs[0] == 0 < max(coefs) and [coef > 0 for coef in coefs[1:]] == below[:-1]
    assert all(is_documented(name) for name in rows[-1] if name not in ("step", "time"))
    last = last_weights(sync)
    run_script("train_async.py", *flags, "--staleness-threshold", 0, "--experiment-name", "async", ranks=2)
    assert same(last_weights(tmp_path / "async"), last)
    again = run_script("replay.py", sync, "--output-dir", tmp_path, "--experiment-name", "again", "--from-step", 3)
    assert "the weights are bit for bit those of" in again.stdout
    for step in (4, 5):
        shutil.rmtree(sync / f"step_{step:06d}")
    run_script("train_sync.py", *flags, "--experiment-name", "sync", "--record-samples", tmp_path / "record")
    assert same(last_weights(sync), last)
    run_script("train_sync.py", *RUN[2:], "--output-dir", tmp_path, "--experiment-name", "plain")
    assert not same(last_weights(tmp_path / "plain"), last)
