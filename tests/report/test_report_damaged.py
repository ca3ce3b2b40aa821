"""Records of every kind of damage: report.py reads what can be read, and never ends with a traceback."""

import json

import pytest

import report
from report import Args, main
from rl.errors import UserError
from tools.report.logs import load

ACCURACY = "val-core/demo/acc/mean@1"
CONFIG = {
    "script": "train_async",
    "flags": {
        "seed": 0,
        "rollout_n": 8,
        "train_batch_size": 4,
        "ppo_mini_batch_size": 4,
        "publish_every": 1,
        "dtype": "float32",
    },
    "hardware": {"world_size": 1, "layout": [{"ranks": {"0": "learner 0", "1": "generator 0"}}], "cpu": "x", "cores": 2},
    "total_steps": 3,
    "code": "0123456789ab",
    "commit": "0123456789",
}


def rows(steps: int) -> list[dict]:
    """Of a short asynchronous run: a generator's ledger is in its first step only."""
    usual = {"timing_s/step": 2.0, "perf/time_per_step": 2.0, "perf/total_num_tokens": 100, "perf/throughput": 50.0}
    usual |= {
        "critic/score/mean": 0.5,
        "perf/mfu/actor": 0.4,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "staleness/age_0": 0.5,
    }
    usual |= {"fully_async/trainer/idle_ratio": 0.2, "fully_async/rollouter/idle_ratio": 0.2, "response_length/clip_ratio": 0.5}
    usual |= {"fully_async/rollouter/held_ratio": 0.1, "ledger/learner_0/train": 0.5, "training/rollout_probs_diff_max": 0.1}
    made = [{"step": step, "time": 1000.0 + 2 * step} | usual for step in range(1, steps + 1)]
    made[0] |= {"ledger/generator_0/score": 0.5, ACCURACY: 0.5, "training/validated_step": 0}
    return made


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(report, "save", lambda figure, target: target.write_bytes(b""))


def report_of(path, metrics: list[dict] | str | bytes, **files: str) -> str:
    path.mkdir()
    if not isinstance(metrics, str | bytes):
        metrics = "".join(json.dumps(row) + "\n" for row in metrics)
    files = {"config.json": json.dumps(CONFIG), "metrics.jsonl": metrics} | files
    for name, content in files.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return said(path)


def said(*runs) -> str:
    out = runs[0].parent / "out"
    try:
        main(Args(tuple(map(str, runs)), output=str(out)))
    except UserError as error:
        return str(error)
    return (out / "report.md").read_text()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs(steps, tmp_path):
    assert "train_async" in report_of(tmp_path / "a", rows(steps))


def test_rewards_are_means_of_as_many_steps(tmp_path):
    """The longer run's reward rises: its last 20 steps would have another mean than its last 10."""
    for name, steps in (("a", 10), ("b", 40)):
        data = [row | {"critic/score/mean": row["step"] / 100} for row in rows(steps)]
        report_of(tmp_path / name, data, **{"config.json": json.dumps(CONFIG | {"script": name})})
    page = said(tmp_path / "a", tmp_path / "b")
    assert "reward of the last steps: 0.355 / 0.055, 1 and 1 run, 10 steps of each" in page
    report_of(tmp_path / "c", rows(4), **{"config.json": json.dumps(CONFIG | {"script": "c"})})
    assert "reward, last 4 steps" in said(tmp_path / "a", tmp_path / "c"), "in the table, too"


@pytest.mark.parametrize("name", ["a.log", "metrics.jsonl"])
def test_the_score_of_older_versions_of_verl_is_a_validation(name, tmp_path):
    line = "step:1 - val/test_score/openai/gsm8k:0.5 - critic/score/mean:0.1\n"
    if name == "metrics.jsonl":
        line = json.dumps({"step": 1, "data": {"val/test_score/openai/gsm8k": 0.5, "critic/score/mean": 0.1}}) + "\n"
    (tmp_path / name).write_text(line)
    assert load(tmp_path / name).points("val-core/openai/gsm8k/acc/mean@1").tolist() == [[1, 0.5]]
