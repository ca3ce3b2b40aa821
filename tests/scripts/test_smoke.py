"""Each script once for two steps, as a user starts it, and a vLLM engine: what the plain tests run of whole jobs."""

import json

import pytest
from helpers import train, undocumented

RUN = ("--total-training-steps", 2, "--test-freq", 2, "--no-val-before-train", "--val-max-samples", 20)
SCRIPTS = {
    "sync": ("train_sync.py", None, ("--rollout-n", 4, "--lr", 1e-3, "--lr-warmup-steps", 0)),
    "one step off": ("train_one_step_off.py", 2, ("--rollout-n", 4)),
    "async": ("train_async.py", 2, ("--rollout-n", 4)),
    "supervised": ("train_sft.py", None, ("--train-batch-size", 16)),
    "vLLM": ("train_sync.py", None, ("--rollout-n", 4, "--engine", "vllm", "--max-num-seqs", 16)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains(name, demo_model, tmp_path):
    if name == "vLLM":
        pytest.importorskip("vllm")
    script, ranks, flags = SCRIPTS[name]
    imported = "vllm" if name == "vLLM" else "plain"
    metrics, run, done = train(script, *RUN, *flags, out=tmp_path, ranks=ranks, imported=imported)
    assert [step for step in metrics if step] == [1, 2]
    assert not undocumented(metrics)
    assert (run / "step_000002" / "model.safetensors").exists() and "warning" not in done.stdout + done.stderr
    assert json.loads((run / "config.json").read_text())["flags"]["total_training_steps"] == 2
