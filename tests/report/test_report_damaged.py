"""Records of every kind of damage: report.py reads what can be read, and never ends with a traceback."""

import json
import random

import pytest

import report
from report import Args, main
from rl.errors import UserError

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


@pytest.mark.slow
def test_every_metric_may_be_missing_or_of_any_kind(tmp_path):
    """In all rows, in the first or in the others, of two or three metrics at once. A sample, with a fixed seed: 2 of the values
    of each metric in each place."""
    dice, number = random.Random(0), 0
    names = sorted({name for row in rows(3) for name in row})
    for where in (range(3), range(1), range(1, 3)):
        for _ in range(2):
            dice.shuffle(names)
            for first in range(0, len(names), 3):
                changed = rows(3)
                for name in names[first : first + 3]:
                    value = dice.choice([None, "x", -1, 0, 10**400, float("inf"), True, [1], {"a": 1}, ...])
                    for row in where:
                        changed[row].pop(name, None)
                        changed[row] |= {} if value is ... else {name: value}
                report_of(tmp_path / f"{(number := number + 1)}", changed)


BAD = ("", "[", "null", "[]", "7", "{}", "\xff", "[" * 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "validations.jsonl", "metrics.jsonl"])
def test_files_that_are_something_else(name, tmp_path):
    contents = [*BAD, '{"step": 1}', '{"step": null}', '{"step": 1.5, "val-core/demo/acc/mean@1": "x"}']
    for number, content in enumerate(contents):
        report_of(tmp_path / f"{number}", rows(3), **{name: content})
    report_of(tmp_path / "a", rows(3))
    (tmp_path / "a" / name).unlink(missing_ok=True)
    (tmp_path / "a" / name).mkdir()
    assert ("nothing to report yet" if name == "metrics.jsonl" else "| group | runs | steps |") in said(tmp_path / "a")


def test_rewards_are_means_of_as_many_steps(tmp_path):
    """The longer run's reward rises: its last 20 steps would have another mean than its last 10."""
    for name, steps in (("a", 10), ("b", 40)):
        data = [row | {"critic/score/mean": row["step"] / 100} for row in rows(steps)]
        report_of(tmp_path / name, data, **{"config.json": json.dumps(CONFIG | {"script": name})})
    page = said(tmp_path / "a", tmp_path / "b")
    assert "reward of the last steps: 0.355 / 0.055, 1 and 1 run, 10 steps of each" in page
    report_of(tmp_path / "c", rows(4), **{"config.json": json.dumps(CONFIG | {"script": "c"})})
    assert "reward, last 4 steps" in said(tmp_path / "a", tmp_path / "c"), "in the table, too"
