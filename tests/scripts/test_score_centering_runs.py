"""Whole runs with --score-centering, on the demo: in async they are as in sync, and one with stale tokens resumes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import run_script
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
RUN = ("--score-centering", "--loss-mode", "reinforce", "--keep-sampling-mask", "--top-k", 5, "--top-p", 0.9)
RUN = (*RUN, "--total-training-steps", 4, "--rollout-n", 2, "--test-freq", 0, "--save-freq", 2, "--lr", 1e-3)


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "step_000004" / "model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_centered_run_is_the_same_in_async_and_resumes(tmp_path):
    flags = (*RUN, "--output-dir", tmp_path)
    run_script("train_sync.py", *flags, "--experiment-name", "sync", ranks=1)
    run_script("train_async.py", *flags, "--staleness-threshold", 0, "--experiment-name", "async", ranks=2)
    last = last_weights(tmp_path / "sync")
    assert same(last_weights(tmp_path / "async"), last)
    run_script("train_one_step_off.py", *flags, "--experiment-name", "stale", ranks=2)
    ended = last_weights(tmp_path / "stale")
    rows = [json.loads(line) for line in (tmp_path / "stale" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("staleness/max", 0) for row in rows) == 1
    shutil.rmtree(tmp_path / "stale" / "step_000004")
    run_script("train_one_step_off.py", *flags, "--experiment-name", "stale", ranks=2)
    assert same(last_weights(tmp_path / "stale"), ended)
