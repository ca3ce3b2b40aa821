"""Each script once for two steps, as a user starts it, and a vLLM engine: what the plain tests run of whole jobs."""

import json
from pathlib import Path

import pytest
from helpers import is_documented, train

RUN = ("--total-training-steps", 2, "--test-freq", 2, "--no-val-before-train", "--val-max-samples", 20)
SCRIPTS = {
    "sync": ("train_sync.py", 1, ("--rollout-n", 4, "--lr", 1e-3, "--lr-warmup-steps", 0)),
    "one step off": (
        "train_one_step_off.py",
        2,
        (
            "--rollout-n",
            4,
        ),
    ),
    "async": (
        "train_async.py",
        2,
        (
            "--rollout-n",
            4,
        ),
    ),
    "supervised": (
        "train_sft.py",
        1,
        (
            "--train-batch-size",
            16,
        ),
    ),
    "vLLM": ("train_sync.py", 1, ("--rollout-n", 4, "--engine", "vllm", "--max-num-seqs", 16)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains(name, demo_model, tmp_path):
    if name == "vLLM":
        pytest.importorskip("vllm")
    script, ranks, flags = SCRIPTS[name]
    more = {"imported": "vllm"} if name == "vLLM" else {}
    metrics, run, done = train(script, *RUN, *flags, out=tmp_path, **more, **({"ranks": ranks} if ranks > 1 else {}))
    assert [step for step in metrics if step] == [1, 2]
    assert not [key for key in metrics[2] if key not in ("step", "time") and not is_documented(key)]
    assert (run / "step_000002" / "model.safetensors").exists() and "warning" not in done.stdout + done.stderr
    assert json.loads((Path(run) / "config.json").read_text())["flags"]["total_training_steps"] == 2
