"""The report: numbers checked by hand; logs that are cut, empty, uneven or contain NaN; and no claim without enough data."""

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT

import report
from report import Args, main
from rl.errors import UserError
from rl.record.provenance import code_digest, package_files
from rl.rewards.score import EVENTS
from tools.report.conclusions import conclude, first_at, overview, speedup
from tools.report.logs import Log, RunGroup, find_runs, group_runs, load

MEDIAN = "tokens/s of all ranks, median step"
ACCURACY = "val-core/demo/acc/mean@1"


def write(path: Path, rows: list[dict], script="train_sync", **flags) -> Path:
    path.mkdir(parents=True)
    usual = {"seed": 0, "rollout_n": 8, "train_batch_size": 4, "dtype": "float32"}
    (path / "config.json").write_text(json.dumps({"script": script, "flags": usual | flags, "total_steps": 40}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(steps=40, slope=0.02, seconds=2.0, **more) -> list[dict]:
    """Rewards 0, slope, 2 slope, ...; the clock starts at 1000."""
    return [
        {"step": i, "time": 1000 + seconds * i, "timing_s/step": seconds, "critic/score/mean": slope * (i - 1), **more}
        for i in range(1, steps + 1)
    ]


def said(directory: Path, *runs: Path, **flags) -> str:
    main(Args(tuple(map(str, runs)), output=str(directory), **flags))
    return (directory / "report.md").read_text()


def test_a_run_read_back(tmp_path):
    log = load(write(tmp_path / "a", rows(3)))
    assert log.points("critic/score/mean").tolist() == [[1, 0], [2, 0.02], [3, 0.04]]
    assert log.points("critic/score/mean", "responses")[:, 0].tolist() == [32, 64, 96], "4 prompts of 8 responses"
    assert log.points("critic/score/mean", "seconds")[:, 0].tolist() == [2, 4, 6], "from the first step's beginning"
    assert (log.steps, log.seconds, log.state, log.notes) == (3, 6, "stopped at 3 of 40", [])


def test_a_validation_stands_at_its_own_step(tmp_path):
    data = rows(4)
    data[3] |= {ACCURACY: 0.5, "training/validated_step": 2}
    log = load(write(tmp_path / "a", data, train_batch_size=8))
    assert log.points(ACCURACY).tolist() == [[2, 0.5]]
    assert log.points(ACCURACY, "responses")[0, 0] == 2 * 4 * 2 * 8
    assert log.points(ACCURACY, "seconds")[0, 0] == 8, "known when it came in"


def changed(data: list[dict], step: int, seconds: float) -> list[dict]:
    """Rows whose clock jumps before this step."""
    return [row | {"time": row["time"] + seconds * (row["step"] >= step)} for row in data]


CLOCKS = {  # rows of steps of 2 s -> seconds of training, starts, a note
    "a pause": (changed(rows(8), 5, 848), (16, {1, 5}, "2 attempts: the 848 seconds between them are not counted")),
    "a crash after step 6, resumed from 5, whose start-up takes 5 s": (
        rows(6) + [row | {"timing_s/step": 7.0 if row["step"] == 5 else 2.0} for row in changed(rows(8)[4:], 5, 100)],
        (4 * 2 + 7 + 3 * 2, {1, 5}, "2 attempts: the 95 seconds between them are not counted"),
    ),
    "a line is missing": (rows(4) + rows(8)[5:], (16, {1}, None)),
    "the clock was set back": (changed(rows(8), 5, -3600), (16, {1}, None)),
}


@pytest.mark.parametrize("case", CLOCKS)
def test_time_between_attempts_does_not_count_and_lost_lines_do(case, tmp_path):
    data, (seconds, starts, note) = CLOCKS[case]
    for row in data:
        row["perf/total_num_tokens"] = 100.0
    log = load(write(tmp_path / "a", data))
    assert (log.seconds, log.starts) == (seconds, starts) and log.notes[-1:] == ([note] if note else [])
    assert log.tokens_per_second == log.steps * 100 / seconds or case == "a line is missing"
    assert log.points("critic/score/mean", "seconds")[-1, 0] == seconds
    assert f"| train_sync | 1 | 8 | {seconds} |" in said(tmp_path / "out", tmp_path / "a", smooth=1)


def test_groups_differ_in_more_than_the_seed(tmp_path):
    for seed in range(3):
        write(tmp_path / f"sync-{seed}", rows(2), seed=seed, experiment_name=f"s{seed}", output_dir=f"d{seed}")
        write(tmp_path / f"fast-{seed}", rows(2), seed=seed, lr=1.0)
    write(tmp_path / "async", rows(2), script="train_async")
    groups = {g.label: len(g.logs) for g in group_runs([load(p) for p in sorted(tmp_path.iterdir())])}
    assert groups.pop("train_async") == 1
    assert groups == {"train_sync": 3, "train_sync --lr 1.0": 3}


def test_a_group_is_named_by_what_it_does_not_share_with_most(tmp_path):
    for name, more in {"a": {}, "b": {"lr": 2.0}, "c": {"rollout_n": 4}}.items():
        write(tmp_path / name, rows(2), **{"lr": 1.0, "rollout_n": 8} | more)
    labels = [group.label for group in group_runs([load(path) for path in sorted(tmp_path.iterdir())])]
    assert labels == ["train_sync", "train_sync --lr 2.0", "train_sync --rollout-n 4"]


def test_a_digest_tells_a_fork_from_its_parent(tmp_path, monkeypatch):
    """The script, a module next to it that it imports, and its reward function count; a file that nothing imports does not."""
    script, reward, module = (tmp_path / name for name in ("train_mine.py", "reward.py", "helper_of_mine.py"))
    script.write_text("import helper_of_mine")
    module.write_text("A = 1")
    reward.write_text("def f(): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("helper_of_mine")
    parent = code_digest(script, reward)
    (tmp_path / "unused.py").write_text("B = 1")
    assert parent == code_digest(script, reward), "nothing that runs has changed"
    seen = {parent, code_digest(script)}
    for file in (script, reward, module):
        file.write_text(file.read_text() + "\n# changed")
        seen.add(code_digest(script, reward))
    assert len(seen) == 5


def test_all_packages_that_runs_execute_count():
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")} - {"tools"}
    assert {file.relative_to(ROOT).parts[0] for file in package_files()} == packages


def test_runs_on_other_hardware_are_another_group():
    logs = [
        Log(Path("a"), {"script": "s", "flags": {"seed": i}, "hardware": {"world_size": 1 + i % 2, "device": "cpu"}}, [])
        for i in range(4)
    ]
    assert [(g.label, len(g.logs)) for g in group_runs(logs)] == [("s ranks: 1", 2), ("s ranks: 2", 2)]


def test_a_directory_of_runs_however_deep(tmp_path):
    deep, flat = write(tmp_path / "set" / "a", rows(2)), write(tmp_path / "b", rows(2))
    (flat / "tensorboard").mkdir()
    (flat / "tensorboard" / "events.out.tfevents.1").touch()
    (tmp_path / "c" / "tensorboard").mkdir(parents=True)
    (tmp_path / "c" / "tensorboard" / "events.out.tfevents.1").touch()
    assert find_runs((str(tmp_path),)) == [flat, tmp_path / "c", deep]
    assert find_runs((str(flat), str(flat))) == [flat]


def waits(g: float, n: float, generators: int, learners: int, steps=40, of_each_node: int | None = None) -> RunGroup:
    """The first step holds the start-up, in which everybody waits."""
    names = [f"generator_{i}" for i in range(generators)] + [f"learner_{i}" for i in range(learners)]
    more = {"fully_async/rollouter/idle_ratio": g, "fully_async/trainer/idle_ratio": n} | {f"ledger/{x}/wait": g for x in names}
    data = rows(steps, **more)
    data[0] |= {"fully_async/rollouter/idle_ratio": 0.97, "fully_async/trainer/idle_ratio": 0.99, "timing_s/step": 500.0}
    count = generators // (of_each_node or generators)
    roles = ["learner 0"] * (learners // count) + ["generator 0"] * (generators // count)
    layout = [{"host": f"host{i}", "ranks": dict(enumerate(roles))} for i in range(count)]
    return RunGroup("a", [Log(Path("a"), {"hardware": {"layout": layout}}, data)])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0.6, 0.0, 2, 1), "generators waited 60% of the time, learners 0%: 1 to 2 would balance 3 ranks better"),
        ((0.5, 0.0, 1, 2), "1 to 2 is the best split of 3 ranks (0.6 to 2.4 would balance exactly)"),
        ((0.0, 0.5, 2, 2), "3 to 1 would balance 4 ranks better (2.7 to 1.3 exactly): --generators 3"),
        ((0.25, 0.0, 2, 2), "2 to 2 is the best split of 4 ranks (1.7 to 2.3 would balance exactly)"),
        (
            (0.0, 0.7, 4, 4, 40, 2),
            "6 to 2 would balance 8 ranks better (6.2 to 1.8 exactly): --generators 3 on each of 2 nodes",
        ),
        ((0.05, 0.04, 1, 1), "balanced"),
        ((0.4, 0.5, 1, 1), "they take turns"),
    ],
)
def test_who_waits_and_what_would_balance(given, expected):
    (text,) = [text for _, text, rests in conclude([waits(*given)]) if "idle_ratio" in rests]
    assert expected in text


def test_too_few_steps_are_said_to_be():
    texts = [text for _, text, _ in conclude([waits(0.5, 0.0, 1, 1, steps=19)])]
    assert texts == [
        "too few steps to say anything: 19, where 20 are the least",
        "too few steps to say who waits for whom: 19, where 20 are the least",
    ]


def alone(data: list[dict], **flags) -> RunGroup:
    return RunGroup("a", [Log(Path("a"), {"flags": flags}, data)])


def test_whether_the_reward_moved():
    _, text, rests = conclude([alone(rows(40))])[0]  # means of 0..19 and of 20..39, times 0.02
    assert text == "the reward rose from 0.190 to 0.590"
    error = math.sqrt(2 * np.var(0.02 * np.arange(20), ddof=1) / 20)
    assert f"change +0.400, standard error {error:.3f}" in rests
    flat = [row | {"critic/score/mean": row["step"] % 2} for row in rows(40)]
    assert "did not move beyond its noise (0.500 to 0.500)" in conclude([alone(flat)])[0][1]


def test_clipping_mismatch_and_trouble_are_reported():
    more = {"response_length/clip_ratio": 0.25, "training/rollout_probs_diff_max": 0.5}
    more |= {f"reward/events/{kind}": 3 for kind in EVENTS}
    texts = [text for _, text, _ in conclude([alone(rows(40, **more), dtype="float32")])]
    assert any(t.startswith("25% of the last responses were cut") for t in texts)
    assert "generator and learner disagree on a token's probability: something is wrong (fp32, on-policy)" in texts
    assert all(f"3 responses could not be scored ({kind})" in texts for kind in EVENTS)
    stale = rows(40, **more | {"staleness/max": 1})
    assert not any("agree" in t for _, t, _ in conclude([alone(stale, dtype="float32")])), "staleness explains a difference"
    assert not any("agree" in t for _, t, _ in conclude([alone(rows(40, **more), dtype="bfloat16")]))


def test_learning_is_compared_only_with_several_runs_each():
    def group(name, slopes):
        return RunGroup(name, [Log(Path(name), {}, rows(40, slope=slope)) for slope in slopes])

    def texts(a, b):
        return [t for _, t, rests in conclude([group("base", a), group("other", b)]) if rests.startswith("reward of")]

    what = "reward of the last steps"  # those 20 are slope * (20 ... 39)
    assert texts([0.1], [0.2]) == [f"{what}: too few runs to compare; 3 of each are the least"]
    assert texts([0.1, 0.11, 0.12], [0.2, 0.22, 0.24]) == [f"{what} higher in every run: 2.00 times as much"]
    assert texts([0.1, 0.11, 0.25], [0.2, 0.22, 0.24]) == [f"{what}: the runs overlap, no difference is shown"]


def test_speedup_by_hand():
    base, fast = alone(rows(40, seconds=2.0)), RunGroup("b", [Log(Path("b"), {}, rows(40, seconds=1.0))])
    table = speedup([base, fast], base, smooth=1)
    # both start at 0 and end at 0.78: halfway is 0.39, first reached at step 21 (0.40): 42 s against 21 s
    assert table[1] == ["b", "0.390", "21.0", "42.0", "2.00", "one pair: no spread"]
    assert [row[4] for row in table[1:]] == ["2.00"] * 4
    assert first_at(np.array([[1, 0.1], [2, 0.5], [3, 0.4]]), 0.4) == 2


def test_speedup_says_when_it_cannot_tell():
    base, flat = alone(rows(40)), RunGroup("b", [Log(Path("b"), {}, rows(40, slope=0))])
    assert speedup([base, flat], base, smooth=1)[1][-1] == "no level that all runs reach and none starts above"
    short = RunGroup("b", [Log(Path("b"), {}, rows(12))])
    assert speedup([base, short], base, smooth=5)[1][-1] == "too few steps: 24 are the least"
    three, same = (RunGroup(n, [Log(Path(n), {}, rows(40, seconds=s)) for s in (1.0, 1.1, 1.2)]) for n in "cd")
    assert speedup([three, same], three, smooth=1)[1][-1].endswith("not distinguishable")


def test_the_median_step_and_the_whole_run_are_two_numbers(tmp_path):
    """Nine steps of 1 s and one of 11 s, 100 tokens each: 100 tokens/s in the median step, 50 over all."""
    data, clock = [], 1000.0
    for step, seconds in enumerate([1.0] * 9 + [11.0], 1):
        clock += seconds
        data.append({"step": step, "time": clock, "timing_s/step": seconds, "perf/time_per_step": seconds})
        data[-1]["perf/total_num_tokens"] = 100.0
    header, row = overview(group_runs([load(write(tmp_path / "a", data))]), 1)
    cells = dict(zip(header, row, strict=True))
    assert (cells[MEDIAN], cells["tokens/s of all ranks, all steps"]) == ("100", "50")


# ------------------------------------------------------------------------------------------------------ odd logs


def test_a_line_cut_in_the_middle(tmp_path):
    run = write(tmp_path / "a", rows(30))
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-40])
    assert load(run).notes == ["metrics.jsonl line 30: cut off or not a record of a step, left out"]
    page = said(tmp_path / "out", run)
    assert "stopped at 29 of 40" in page and "line 30: cut off" in page and "the reward rose" in page


def test_an_empty_run_alone_and_with_others(tmp_path):
    empty, run = write(tmp_path / "empty", []), write(tmp_path / "a", rows(30))
    with pytest.raises(UserError, match="no step was recorded, so there is nothing to report yet"):
        main(Args((str(empty),), output=str(tmp_path / "out")))
    page = said(tmp_path / "out", empty, run)
    assert "## Runs without a step" in page and f"| {empty} | no step was recorded |" in page


def test_nan_is_left_out_and_counted(tmp_path):
    data = rows(30)
    data[4]["critic/score/mean"], data[5]["critic/score/mean"] = None, math.nan
    data[6]["actor/grad_norm"] = math.inf
    log = load(write(tmp_path / "a", data))
    assert len(log.points("critic/score/mean")) == 28
    assert "critic/score/mean is NaN or infinite at 2 of 30 steps, which are left out" in log.notes
    assert "actor/grad_norm is NaN" in said(tmp_path / "out", tmp_path / "a")


def test_a_step_recorded_twice_counts_once(tmp_path):
    log = load(write(tmp_path / "a", rows(10) + [r | {"critic/score/mean": 9.0} for r in rows(10)[5:]]))
    assert log.steps == 10 and len(log.rows) == 10 and log.points("critic/score/mean")[-1, 1] == 9
    assert log.notes == ["5 steps were recorded twice, as after a restart: the later record counts"]


def test_rewards_are_means_of_as_many_steps(tmp_path):
    """The longer run's reward rises: its last 20 steps would have another mean than its last 10."""
    short, long = (write(tmp_path / name, rows(steps, slope=0.01), script=name) for name, steps in (("a", 10), ("b", 40)))
    page = said(tmp_path / "out", short, long)
    assert "reward of the last steps: 0.345 / 0.045, 1 and 1 run, 10 steps of each" in page
    few = write(tmp_path / "c", rows(4), script="c")
    assert "reward, last 4 steps" in said(tmp_path / "out", short, few), "in the table, too"


def test_without_a_config_a_run_stands_alone(tmp_path):
    for name in ("a", "b"):
        (write(tmp_path / name, rows(30)) / "config.json").unlink()
    (tmp_path / "b" / "config.json").write_text("{")
    page = said(tmp_path / "out", tmp_path)  # a directory of runs
    assert "| a | 1 |" in page and "| b | 1 |" in page and "config.json cannot be read" in page


def test_event_files_of_tensorboard(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "a" / "tensorboard")) as writer:
        for row in rows(30):
            writer.add_scalar("critic/score/mean", row["critic/score/mean"], row["step"], walltime=row["time"])
            writer.add_scalar("timing_s/step", 2.0, row["step"], walltime=row["time"])
    (file,) = (tmp_path / "a" / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])  # cut in the middle of a record
    for given in (tmp_path / "a", file):
        log = load(given)
        assert log.points("critic/score/mean", "seconds")[1] == pytest.approx([4.0, 0.02])
    assert "the reward rose" in said(tmp_path / "out", tmp_path / "a")


def test_what_cannot_be_read_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "nothing").mkdir()
    run = write(tmp_path / "a", rows(30))
    for runs, flags, message in [
        ("missing", {}, "there is no such file. Give a run's directory"),
        ("nothing", {}, "neither metrics.jsonl nor TensorBoard event files"),
        ("a", {"speedup": "elsewhere"}, "no such group. Give one of 'train_sync'"),
        ("a", {"smooth": 0}, "--smooth must be at least 1"),
        ("a", {"output": str(run / "config.json" / "x")}, "cannot be made"),
    ]:
        with pytest.raises(UserError, match=re.escape(message)):
            main(Args((str(tmp_path / runs),), **{"output": str(tmp_path / "out"), **flags}))


@pytest.mark.slow
def test_the_command_line(tmp_path):
    a = write(tmp_path / "a", rows(40))
    b = write(tmp_path / "b", rows(40, seconds=1.0), script="train_async")
    command = [sys.executable, ROOT / "report.py", b, a, "--speedup", "train_sync", "--output", tmp_path / "out"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "2 runs in 2 groups" in done.stdout and "| train_async |" in done.stdout and "| 2.00 |" in done.stdout
    assert "| train_async / train_sync |" in (tmp_path / "out" / "report.md").read_text(), (
        "the baseline is what others stand against"
    )
    failed = subprocess.run([sys.executable, str(ROOT / "report.py"), "no"], capture_output=True, text=True, cwd=ROOT)
    assert failed.returncode == 1 and failed.stderr.startswith("error: no: there is no such file")


# ------------------------------------------------------------------------------------------------------ the page


def full_run(path: Path, script: str, seed: int) -> Path:
    """A run with every kind of metric that the report draws."""
    more = {name: 0.1 for _, panels in report.LINES.values() for name in panels}
    more |= {f"ledger/{rank}/{phase}": 0.5 for rank in ("learner_0", "generator_0") for phase in ("train", "wait")}
    more |= {"staleness/mean": 0.5, "staleness/age_0": 0.5, "staleness/age_1": 0.5, ACCURACY: 0.3}
    return write(path, rows(30, **more), script=script, seed=seed)


@pytest.mark.slow
def test_every_plot_is_there_and_nothing_is_fetched(tmp_path):
    runs = [full_run(tmp_path / f"{s}{i}", s, i) for s in ("train_sync", "train_async") for i in range(2)]
    page = said(tmp_path / "out", *runs, title="<b>odd</b> & title")
    html = (tmp_path / "out" / "report.html").read_text()
    images = re.findall(r'<img src="([^"]+)"', html)
    assert len(images) == 10 and images == re.findall(r"\]\(([^)]+)\)", page)
    assert all((tmp_path / "out" / image).exists() for image in images)
    assert "Not recorded by any" not in page
    assert not re.search(r"(https?:)?//", html), "no external request"
    assert "<b>" not in html and "&lt;b&gt;odd" in html
