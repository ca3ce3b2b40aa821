"""benchmarks/scripts/gpu.py under a time limit: it writes rows one by one, and a failing part does not stop the others."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, environment
from transformers import AutoTokenizer

sys.path.insert(0, str(ROOT / "benchmarks"))
from scripts import gpu


def test_each_row_is_written_as_it_comes_and_a_failure_is_one(tmp_path, monkeypatch):
    seen = []

    def measured(args, part, shape, path, checkpointing):
        written = tmp_path / "gpu.json"
        seen.append(len(json.loads(written.read_text())["results"]) if written.exists() else 0)
        if part == "engine":
            raise RuntimeError("Traceback\nValueError: no such kernel")
        return {"tokens_per_s": 1000.0, "mfu": 0.25}

    monkeypatch.setattr(gpu, "measured", measured)
    monkeypatch.setattr(gpu, "shared", lambda *_: {"tokens_per_s": 7.0})
    monkeypatch.setattr(gpu, "save", lambda *_: None)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu.device, "kind", lambda: "cuda")
    monkeypatch.setattr(gpu.device, "name", lambda: "a GPU")
    gpu.main(gpu.Args(shapes=("toy",)))
    assert seen == [0, 1, 2, 3, 4, 5]
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert results["embedded engine/toy"] == {"error": "ValueError: no such kernel"}
    assert {name for name, result in results.items() if "tokens_per_s" in result} == {
        "learner/toy",
        "learner, gradient checkpointing/toy",
        "vLLM/toy",
        "vLLM, sleep/toy",
        "vLLM, values/toy",
        "async, one device/toy",
    }
    assert "no such kernel" in (tmp_path / "gpu.md").read_text()


def test_another_kind_of_device_than_the_one_asked_for_is_refused(monkeypatch):
    monkeypatch.setattr(gpu.device, "kind", lambda: "cpu")
    with pytest.raises(SystemExit, match="--kind npu, but this machine has cpu"):
        gpu.main(gpu.Args(kind="npu"))


def test_the_tokenizer_has_a_token_for_each_of_a_large_vocabulary(tmp_path):
    gpu.random_model(str(tmp_path), 64, 1, 1000, fill=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 1000 and tokenizer.decode([999])


@pytest.mark.slow
def test_every_part_runs_at_toy_size():
    command = [sys.executable, "benchmarks/scripts/gpu.py", "--toy", "--repeats", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    table = done.stdout[done.stdout.rindex("| what") :]
    for part in ("learner", "learner, gradient checkpointing", "embedded engine", "vLLM", "async, one device"):
        assert f"| {part} |" in table
    assert "Error" not in table and "WRONG" not in table
