"""verl's own logs in the report: console logs saved with `tee`, its file logger, its TensorBoard directories. The tests write
them in the format of verl's logger (`step:N - key:value - ...`, each value as pprint prints it)."""

import json
import pprint
from pathlib import Path

import pytest

from report import Args, main
from rl.errors import UserError
from tools.report.logs import find_runs, load
from tools.report.readers import MAX_REQUIRED, holds_steps

ACCURACY = "val-core/openai/gsm8k/acc/mean@1"
CYAN, PLAIN = "\x1b[36m", "\x1b[0m"


def line(step: int, metrics: dict, numpy: bool = True) -> str:
    """Return a line as verl's LocalLogger prints it. numpy: numbers as numpy 2 prints them, which verl often logs."""
    form = (lambda value: f"np.float64({value!r})") if numpy else pprint.pformat
    return " - ".join([f"step:{step}", *(f"{name}:{form(value)}" for name, value in metrics.items())])


def a_step(i: int, seconds=625.0, tokens=1_825_000.0, gpus=8, **more) -> dict:
    out = {"global_seqlen/mean": tokens / gpus, "actor/grad_norm": 0.13, "perf/mfu/actor": 0.012, "training/global_step": i}
    out |= {"critic/score/mean": 0.5 + i / 1000, "timing_s/gen": 0.7 * seconds, "timing_s/step": seconds}
    out |= {"response_length/mean": 288.7, "response_length/clip_ratio": 0.0}
    out |= {"perf/total_num_tokens": tokens, "perf/time_per_step": seconds, "perf/throughput": tokens / seconds / gpus}
    return out | more


def console(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def sync_log(steps=58, **how) -> str:
    """A synchronous run's console: Ray's prefixes in color, other ranks' lines, a progress bar, a validation before the first
    step."""
    before = "+ python3 -m verl.trainer.main_ppo\n2025-11-03 10:00:00\tINFO worker.py:1832 -- Started a local Ray instance.\n"
    out = [before, f"{CYAN}(TaskRunner pid=222265){PLAIN} {line(0, {ACCURACY: 0.508}, numpy=False)}\n"]
    for i in range(1, steps + 1):
        out.append(f"{CYAN}(WorkerDict pid=22{i:04d}){PLAIN} INFO:2025 compute_log_prob step: {i} - done\n")
        bar = f"Training Progress:  {i}%|#         | {i}/58 [1:02:03<9:08:07, 625.1s/it]\r"
        out.append(f"{bar}{CYAN}(TaskRunner pid=222265, ip=10.0.0.1){PLAIN} {line(i, a_step(i, **how))}\n")
    return "".join(out)


def async_log(steps=20) -> str:
    """A fully asynchronous run's: the step's own line, one of the publish, and later what the rollouter measured; pauses."""
    name = "(FullyAsyncRollouter pid=7)"
    out = [f"{name} [FullyAsyncRollouter] required_samples : 64 max_required_samples: 307 max_queue_size: 307 \n"]
    for i in range(1, steps + 1):
        pause = "due to staleness_samples 307 >= max_required_samples 307 " if i % 2 else "due to full queue: size=307, max=307"
        out.append(f"{name} [FullyAsyncRollouter][ShouldPause]  {pause}\n")
        more = {"trainer/idle_ratio": 0.36, "fully_async/partial/partial_ratio": 0.1}
        own = a_step(i, seconds=355.0, tokens=434_875.0 * 8, **more, **{"perf/mfu/actor": 0.053})
        out.append(f"(FullyAsyncTrainer pid=9) {line(i, own)}\n")
        out.append(f"(FullyAsyncTrainer pid=9) {line(i, {'timing_s/param_sync': 11.5})}\n")
        out.append(f"{name} [FullyAsyncRollouter][MonitorLoop][Statistics] {{'count/staleness_samples': 243,\n")
        out.append(f"{name}  'static/max_required_samples': 307,\n")
        if i > 1:  # of the version before
            late = {"rollouter/active_time": 185.0, "rollouter/version_time": 355.0, "rollouter/idle_ratio": 0.48}
            late |= {ACCURACY: 0.5} if i == 11 else {}
            out.append(f"(FullyAsyncTrainer pid=9) {line(i - 1, late)} [repeated 2x across cluster]\n")
    return "".join(out)


def page(directory: Path, *runs: Path) -> str:
    main(Args(tuple(map(str, runs)), output=str(directory)))
    return (directory / "report.md").read_text()


def test_a_console_log_read_back(tmp_path):
    log = load(console(tmp_path / "sync.log", sync_log(3)))
    assert log.points("critic/score/mean").tolist() == [[1, 0.501], [2, 0.502], [3, 0.503]]
    assert log.points(ACCURACY).tolist() == [[0, 0.508]] and log.seconds == 3 * 625 and log.steps == 3
    assert log.rows[1]["tokens/s"] == 2920 and log.rows[1]["perf/throughput"] == 365
    assert log.rows[1].keys() == {"step", "time", "tokens/s", *a_step(1)}, "other ranks' lines and the bar are no metrics"
    assert not any("cut off" in note or "twice" in note for note in log.notes)


def test_lines_of_one_step_are_parts_of_it_until_a_restart(tmp_path):
    """A log to which a second start was appended: it resumes at step 15, and its steps count once."""
    again = [f"(TaskRunner pid=1) {line(i, a_step(i, seconds=100.0))}\n" for i in range(15, 31)]
    log = load(console(tmp_path / "a.log", async_log() + "".join(again)))
    assert log.steps == 30 and len(log.rows) == 30
    assert [row["timing_s/step"] for row in log.rows] == [355.0] * 14 + [100.0] * 16
    assert "6 steps were recorded twice, as after a restart: the later record counts" in log.notes
    assert log.rows[12]["timing_s/param_sync"] == 11.5 and "timing_s/param_sync" not in log.rows[15]
    assert log.points(MAX_REQUIRED)[-1, 1] == 307


NUMBERS = {"0.25": 0.25, "np.float64(0.25)": 0.25, "np.float32(-2.5e-07)": -2.5e-7, "np.int64(12)": 12, "3": 3, "1e-06": 1e-6}
NUMBERS |= {"-0.000": 0, ".5": 0.5, "True": 1} | dict.fromkeys(("nan", "inf", "-inf", "np.float64(nan)"))


@pytest.mark.parametrize(("text", "number"), NUMBERS.items())
def test_numbers_as_python_prints_them_and_what_is_none(tmp_path, text, number):
    log = load(console(tmp_path / "a.log", f"step:1 - a/b:{text} - c/d@1:7\n"))
    assert log.rows[0].get("a/b") == number and log.rows[0]["c/d@1"] == 7
    assert number is not None or "a/b is NaN or infinite at 1 of 1 steps, which are left out" in log.notes


def test_a_log_that_ends_within_a_line(tmp_path):
    """The last number may lack digits. A line that lacks only its line feed is complete."""
    whole = f"{line(1, a_step(1))}\n{line(2, a_step(2))}"
    assert load(console(tmp_path / "whole.log", whole)).rows[1].items() >= a_step(2).items()
    cut = load(console(tmp_path / "cut.log", whole[: whole.rindex("timing_s/step:") + len("timing_s/step:np.float64(6")]))
    assert "timing_s/step" not in cut.rows[1] and cut.rows[1]["timing_s/gen"] == pytest.approx(437.5)
    assert any("cut off" in note for note in cut.notes)


def test_a_directory_of_console_logs(tmp_path):
    one, other = console(tmp_path / "sync.log", sync_log(2)), console(tmp_path / "async.txt", async_log(2))
    console(tmp_path / "notes.txt", "step: 1, make coffee; global_step:5 - x/y:1\n")
    assert find_runs((str(tmp_path),)) == [other, one]
    assert not holds_steps(tmp_path / "notes.txt")


def test_a_log_without_a_step_is_said_to_be_none(tmp_path, capsys):
    empty = console(tmp_path / "a.log", "Started a local Ray instance\n")
    with pytest.raises(UserError, match="no step was recorded"):
        main(Args((str(empty),), output=str(tmp_path / "out")))
    assert "no line of verl's console logger (step:1 - critic/score/mean:0.5 - ...) is in it" in capsys.readouterr().err
    text = page(tmp_path / "out", empty, console(tmp_path / "b.log", sync_log(2)))
    assert "## Runs without a step" in text


def test_verls_file_logger(tmp_path):
    lines = [{"step": 0, "data": {ACCURACY: 0.5}}] + [{"step": i, "data": a_step(i)} for i in (1, 2)]
    lines += [{"step": 2, "data": {"timing_s/param_sync": 3.0}}, {"step": 2, "data": None}]
    path = console(tmp_path / "exp.jsonl", "".join(json.dumps(row) + "\n" for row in lines))
    log = load(path)
    assert log.steps == 2 and log.rows[2]["timing_s/param_sync"] == 3 and log.points(ACCURACY).tolist() == [[0, 0.5]]
    assert log.seconds == 1250


@pytest.mark.parametrize("name", ["a.log", "metrics.jsonl"])
def test_the_score_of_older_versions_of_verl_is_a_validation(name, tmp_path):
    line = "step:1 - val/test_score/openai/gsm8k:0.5 - critic/score/mean:0.1\n"
    if name == "metrics.jsonl":
        line = json.dumps({"step": 1, "data": {"val/test_score/openai/gsm8k": 0.5, "critic/score/mean": 0.1}}) + "\n"
    (tmp_path / name).write_text(line)
    assert load(tmp_path / name).points("val-core/openai/gsm8k/acc/mean@1").tolist() == [[1, 0.5]]
