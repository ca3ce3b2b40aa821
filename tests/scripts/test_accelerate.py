"""`accelerate launch` starts the scripts as torchrun does."""

import subprocess
import sys

import pytest
from helpers import ROOT, environment

pytestmark = pytest.mark.runs


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_accelerate_launch_starts_split_ranks(demo_model, tmp_path):
    """accelerate's flag for several ranks on a node is --multi_gpu, on a CPU too."""
    launch = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    flags = ["train_async.py", "--output-dir", tmp_path, "--total-training-steps", "2", "--val-max-samples", "8"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "16 tickets started = 16 trained + 0 dropped + 0 in flight" in done.stdout
    assert len(list(tmp_path.glob("train_async-*/step_000002"))) == 1
