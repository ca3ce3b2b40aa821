"""Validations: each is recorded once, at the step of its weights."""

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import job_of, train
from matplotlib.axes import Axes
from safetensors.torch import load_file

import train_async
import train_sync
from rl.parts import make
from rl.record import validations
from rl.record.run import Origin, Run, plot_reward
from rl.samples.channel import Parts
from rl.split_run import SplitRun
from tools.report import logs
from tools.report.conclusions import conclude
from tools.report.logs import RunGroup

ACCURACY = "val-core/demo/acc/mean@1"


def strict(file: Path) -> list[dict]:
    def refuse(constant):
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def accuracies(run: Path) -> dict[int, float]:
    """Return the accuracies of a run's validations by step. Each must appear once, in order of step."""
    lines = strict(run / "validations.jsonl")
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    (name,) = {name for line in lines for name in line if name.startswith("val-core/") and "/acc/mean@" in name}
    return {line["step"]: line[name] for line in lines}


# ------------------------------------------------------------------------------------------------------- the record


def make_run(tmp_path, origin=None, logger=("tensorboard",), **flags) -> Run:
    args = make(train_sync.Args, output_dir=str(tmp_path), logger=logger, **flags)
    return Run(args, job_of(9), {"device": "cpu"}, enabled=True, origin=origin)


def log(run: Run, step: int, *arrived: tuple[int, float]) -> None:
    """Log a step, with validations (validated step, accuracy) that arrived during it."""
    newest = {}
    for validated, accuracy in arrived:
        newest = {ACCURACY: accuracy, "val-aux/reward/unscored": 0, "training/validated_step": validated}
        run.log_validation(newest, version=validated // 2, at_step=step, chooses_best=True)
    run.log(step, {"critic/score/mean": step / 10, "training/global_step": step} | newest)


def resume(run: Run, tmp_path, step: int, **flags) -> Run:
    run._lock.close()
    return make_run(tmp_path, Origin(run.dir, run.dir / f"step_{step:06d}"), **flags)


def scalars(run: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(e.step, pytest.approx(e.value)) for e in EventAccumulator(str(run / "tensorboard")).Reload().Scalars(name)]


def test_every_validation_is_recorded_at_its_own_step(tmp_path, monkeypatch):
    """Three that arrive during one step: in the file, on TensorBoard, in the plot and in the report."""
    run = make_run(tmp_path)
    log(run, 0, (0, 0.1))
    for step in (1, 2, 3, 4, 5):
        log(run, step)
    log(run, 6, (2, 0.2), (4, math.nan), (6, 0.4))
    lines = strict(run.dir / "validations.jsonl")
    assert [(line["step"], line["version"], line["at_step"], line[ACCURACY]) for line in lines] == [
        (0, 0, 0, 0.1),
        (2, 1, 6, 0.2),
        (4, 2, 6, None),
        (6, 3, 6, 0.4),
    ]
    assert all(line["time"] > 1e9 and line["chooses_best"] for line in lines)
    row = strict(run.dir / "metrics.jsonl")[-1]
    assert (row["step"], row["training/validated_step"], row[ACCURACY]) == (6, 6, 0.4), "the row keeps the newest"
    run.finish(tmp_path)
    shown = scalars(run.dir, ACCURACY)
    assert [step for step, _ in shown] == [0, 2, 4, 6] and [shown[i][1] for i in (0, 1, 3)] == [0.1, 0.2, 0.4]
    assert [step for step, _ in scalars(run.dir, "critic/score/mean")] == [*range(7)]
    drawn, plot = {}, Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda axes, x, y, **style: drawn.update({style["label"]: (x, y)}) or plot(axes, x, y, **style)
    )
    plot_reward(run.dir / "metrics.jsonl", tmp_path / "plot.png")
    assert drawn["demo/acc/mean@1"] == ((0, 2, 6), (0.1, 0.2, 0.4))
    assert drawn["training reward"][0] == tuple(range(7))
    points = logs.load(run.dir).points
    assert points(ACCURACY).tolist() == [[0, 0.1], [2, 0.2], [6, 0.4]]
    assert points(ACCURACY, "seconds")[1, 0] == points("critic/score/mean", "seconds")[6, 0], "on the clock, when it arrived"
    (run.dir / "metrics.jsonl").unlink()
    log_of_events = logs.load(run.dir)
    assert log_of_events.points(ACCURACY)[:, 0].tolist() == [0, 2, 6], "TensorBoard's files say the same"
    assert log_of_events.steps == 6


def test_a_run_that_resumes_forgets_validations_of_later_steps_only(tmp_path):
    run = make_run(tmp_path)
    log(run, 0, (0, 0.1))
    for step in range(1, 7):
        log(run, step, *[[], [(2, 0.2)], [(4, 0.3)], [(6, 0.4)]][step // 2 if step % 2 == 0 else 0])
    with open(run.dir / "validations.jsonl", "a") as file:
        file.write('garbage\n{"step": 8, "cu')
    run = resume(run, tmp_path, 5)
    log(run, 6, (6, 0.9))
    run.finish(tmp_path)
    assert accuracies(run.dir) == {0: 0.1, 2: 0.2, 4: 0.3, 6: 0.9}
    aside = (run.dir / "validations_superseded.jsonl").read_text().splitlines()
    assert sorted(aside)[0] == "garbage" and [json.loads(line)["step"] for line in aside if line != "garbage"] == [6]
    assert [step for step, _ in scalars(run.dir, ACCURACY)] == [0, 2, 4, 6]
    assert scalars(run.dir, ACCURACY)[-1][1] == 0.9


def test_the_last_validation_of_a_step_counts_and_a_report_takes_those_of_rows_too(tmp_path):
    rows = [{"step": 0, ACCURACY: 0.1}, {"step": 3, "critic/score/mean": 1.0}, {"step": 5, ACCURACY: 0.2}]
    rows[2]["training/validated_step"] = 4
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert validations.read(tmp_path) == []
    assert logs.load(tmp_path).points(ACCURACY).tolist() == [[0, 0.1], [4, 0.2]]
    lines = [{"step": 4, ACCURACY: 0.3}, {"step": 6, ACCURACY: 0.5}, {"step": 6, ACCURACY: 0.6}]  # it resumed with this one
    (tmp_path / "validations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 8, "cut')
    assert {row["step"]: row[ACCURACY] for row in validations.read(tmp_path)} == {4: 0.3, 6: 0.6}
    loaded = logs.load(tmp_path)
    assert loaded.points(ACCURACY).tolist() == [[0, 0.1], [4, 0.3], [6, 0.6]]
    assert any("validations.jsonl line 4" in note for note in loaded.notes)
    said = str(conclude([RunGroup("a", [loaded])]))
    assert "3 validations, 1 run: 0.100 before, 0.600 after" in said, said


# ------------------------------------------------------------------------------------------- parts of several ranks


def part(step: int, rank, parts: int = 2, index: int = 0) -> dict:
    return {"step": step, "version": step // 2, "rank": rank, "parts": parts, "rows": [{"index": index}]}


def test_parts_are_put_together_in_order_of_step():
    """The faster of two generators is two validations ahead."""
    parts = Parts()
    for step in (2, 4):
        parts.add(part(step, 0, index=1))
    assert parts.take() == [] and parts.newest == -1
    for step in (2, 4):
        parts.add(part(step, 1, index=0))
    assert parts.newest == 4
    assert parts.take() == [(step, [{"index": 0}, {"index": 1}], step // 2) for step in (2, 4)]
    assert parts.take() == []


def test_what_the_record_has_is_not_taken_from_a_checkpoint_again():
    parts = Parts()
    for step in (2, 4):
        parts.add(part(step, 0, parts=1))
    state, parts = json.loads(json.dumps(parts.state())), Parts()
    parts.restore(state)
    parts.skip_recorded([0, 2])
    assert parts.newest == 4 and [step for step, *_ in parts.take()] == [4]
    parts.skip_recorded([6])
    assert parts.newest == 6, "one that was recorded after the checkpoint is not made again"


@pytest.mark.parametrize(
    ("flags", "done", "step", "awaited"),
    [
        (dict(test_freq=1), 0, 4, 3),  # that of step 4 comes again after a restart, of the checkpoint's weights
        (dict(test_freq=1), 0, 5, None),  # nothing is saved
        (dict(test_freq=1), 0, 12, 12),
        (dict(test_freq=3), 0, 8, 6),
        (dict(test_freq=4, publish_every=4), 0, 6, 4),  # a restart would publish the weights of step 6
        (dict(test_freq=4, publish_every=4), 0, 4, 0),
        (dict(test_freq=4, publish_every=4, val_before_train=False), 0, 4, None),
        (dict(test_freq=1), 4, 6, 5),
        (dict(test_freq=4), 6, 8, None),  # the run had no --test-freq before it resumed: step 4 never was validated
        (dict(test_freq=0), 0, 12, None),
    ],
)
def test_a_checkpoint_waits_for_validations_that_cannot_be_made_again(flags, done, step, awaited):
    args = make(train_async.Args, save_freq=2, **flags)
    run = SimpleNamespace(args=args, job=SimpleNamespace(total_steps=12), done=done)
    run._saves_after = lambda step: SplitRun._saves_after(run, step)
    assert SplitRun._awaited_validation(run, step) == awaited


# --------------------------------------------------------------------------------------------------------------- runs

WORSE_AND_WORSE = """
from rl import training_run
from rl.samples.channel import Inbox

take, metrics, accuracies = Inbox.take_validations, training_run.validation_metrics, iter(range(10, 0, -1))

def worse(rows):
    accuracy = next(accuracies) / 10
    return {name: accuracy if "/acc/" in name else value for name, value in metrics(rows).items()}

# so slow that none arrives before the learners wait for it
Inbox.take_validations = lambda inbox, until=None: [] if until is None else take(inbox, until)
training_run.validation_metrics = worse
"""
SMALL = ["--val-max-samples", "16", "--lr-scheduler-type", "constant", "--lr-warmup-steps", "0", "--max-response-length", "4"]


@pytest.mark.runs
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "flags", "validated", "together"),
    [
        ("train_sync", ["--test-freq", "1"], range(7), 1),
        ("train_async", ["--test-freq", "1", "--val-n", "2"], range(7), 3),
        ("train_async", ["--publish-every", "2", "--test-freq", "2"], (0, 2, 4, 6), 2),
    ],
)
def test_validations_that_arrive_together_are_all_recorded_and_best_is_the_best(
    script, flags, validated, together, demo_model, tmp_path
):
    """With one checkpoint kept: that of step 2, which is better than all later ones, has made room when the run ends."""
    flags = [*flags, *SMALL, "--max-ckpt-to-keep", "1", "--total-training-steps", "6", "--save-freq", "2"]
    words = [WORSE_AND_WORSE, f"{script}.py", *flags]
    metrics, run, _ = train("tests/programs/patched.py", *words, out=tmp_path, ranks=1 + (script != "train_sync"))
    expected = {step: (10 - number) / 10 for number, step in enumerate(validated)}
    assert accuracies(run) == expected
    lines = strict(run / "validations.jsonl")
    period = 2 if "--publish-every" in flags else 1
    assert all(line["version"] * period == line["training/validated_step"] == line["step"] for line in lines)
    assert max(Counter(line["at_step"] for line in lines).values()) == together
    for step, row in metrics.items():
        newest = max((line["step"] for line in lines if line["at_step"] == step), default=None)
        assert row.get("training/validated_step") == newest, "the row keeps the newest"
    assert json.loads((run / "best" / "best.json").read_text()) == {"step": 2, "score": expected[2]}
    assert sorted(path.name for path in run.glob("step_*")) == ["step_000002", "step_000006"]
    best, last = (load_file(path / "model.safetensors") for path in (run / "best", run / "step_000006"))
    assert any(not best[name].equal(last[name]) for name in best)
