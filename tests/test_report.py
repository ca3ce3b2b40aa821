"""The report: numbers checked by hand, logs that are cut, empty, uneven or hold NaN, claims only where numbers carry them."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

import report
from report import Args, main
from rl.errors import UserError
from rl.report.conclusions import conclude, first_at, overview, speedup
from rl.report.logs import Log, RunGroup, find_runs, group_runs, load, smoothed

ACCURACY = "val-core/demo/acc/mean@1"


def write(path: Path, rows: list[dict], script="train_sync", **flags) -> Path:
    path.mkdir(parents=True)
    usual = {"seed": 0, "rollout_n": 8, "train_batch_size": 4, "total_training_steps": 40, "dtype": "float32"}
    (path / "config.json").write_text(json.dumps({"script": script, "flags": usual | flags}))
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
    log = load(write(tmp_path / "a", data, ppo_mini_batch_size=4, require_batches=2, train_batch_size=None))
    assert log.points(ACCURACY).tolist() == [[2, 0.5]]
    assert log.points(ACCURACY, "responses")[0, 0] == 2 * 4 * 2 * 8
    assert log.points(ACCURACY, "seconds")[0, 0] == 8, "known when it came in"


def test_shares_weigh_by_the_steps_length():
    log = Log(Path("a"), {}, [{"step": 1, "timing_s/step": 9.0, "w": 0.1}, {"step": 2, "timing_s/step": 1.0, "w": 0.9}])
    assert log.over_time("w") == pytest.approx(0.18) and log.over_time("none") is None


def test_groups_differ_in_more_than_the_seed(tmp_path):
    for seed in range(3):
        write(tmp_path / f"sync-{seed}", rows(2), seed=seed, experiment_name=f"s{seed}", output_dir=f"d{seed}")
        write(tmp_path / f"fast-{seed}", rows(2), seed=seed, lr=1.0)
    write(tmp_path / "async", rows(2), script="train_async")
    groups = {g.label: len(g.logs) for g in group_runs([load(p) for p in sorted(tmp_path.iterdir())])}
    assert groups.pop("train_async") == 1
    assert groups == {"train_sync": 3, "train_sync --lr 1.0": 3}


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


def test_smoothing_is_a_mean_of_the_steps_before():
    points = np.array([[1, 1], [2, 3], [3, 8.0]])
    assert smoothed(points, 2).tolist() == [[2, 2], [3, 5.5]]
    assert len(smoothed(points, 4)) == 0


def waits(g: float, n: float, generators: int, learners: int, steps=40) -> RunGroup:
    names = [f"generator_{i}" for i in range(generators)] + [f"learner_{i}" for i in range(learners)]
    more = {"fully_async/rollouter/idle_ratio": g, "fully_async/trainer/idle_ratio": n} | {f"ledger/{x}/wait": g for x in names}
    return RunGroup("a", [Log(Path("a"), {}, rows(steps, **more))])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0.41, 0.0, 1, 1), "the generators waited 41% of the time, the learners 0%: 2 generators to 3 learners would balance"),
        ((0.5, 0.0, 1, 1), "the generators waited 50% of the time, the learners 0%: 1 generator to 2 learners would balance"),
        ((0.0, 0.5, 2, 2), "the generators waited 0% of the time, the learners 50%: 2 generators to 1 learner would balance"),
        ((0.05, 0.04, 1, 1), "balanced"),
        ((0.4, 0.5, 1, 1), "they take turns"),
        ((0.12, 0.05, 1, 1), "1 to 1 is about balanced"),
    ],
)
def test_who_waits_and_what_would_balance(given, expected):
    (told,) = [told for _, told, rests in conclude([waits(*given)]) if "idle_ratio" in rests]
    assert expected in told


def test_too_few_steps_are_said_to_be():
    told = [told for _, told, _ in conclude([waits(0.5, 0.0, 1, 1, steps=19)])]
    assert told == [
        "too few steps to say anything: 19, where 20 are the least",
        "too few steps to say who waits for whom: 19, where 20 are the least",
    ]


def alone(data: list[dict], **flags) -> RunGroup:
    return RunGroup("a", [Log(Path("a"), {"flags": flags}, data)])


def test_whether_the_reward_moved():
    _, told, rests = conclude([alone(rows(40))])[0]  # means of 0..19 and of 20..39, times 0.02
    assert told == "the reward rose from 0.190 to 0.590"
    error = math.sqrt(2 * np.var(0.02 * np.arange(20), ddof=1) / 20)
    assert f"change +0.400, standard error {error:.3f}" in rests
    flat = [row | {"critic/score/mean": row["step"] % 2} for row in rows(40)]
    assert "did not move beyond its noise (0.500 to 0.500)" in conclude([alone(flat)])[0][1]


def test_clipping_mismatch_and_trouble_are_told():
    more = {"response_length/clip_ratio": 0.25, "training/rollout_probs_diff_max": 0.5, "reward/events/timeout": 3}
    told = [told for _, told, _ in conclude([alone(rows(40, **more), dtype="float32")])]
    assert any(t.startswith("25% of the last responses were cut") for t in told)
    assert "generator and learner disagree on a token's probability: something is wrong (fp32, on-policy)" in told
    assert "3 responses could not be scored (timeout)" in told
    stale = rows(40, **more | {"staleness/max": 1})
    assert not any("agree" in t for _, t, _ in conclude([alone(stale, dtype="float32")])), "staleness explains a difference"
    assert not any("agree" in t for _, t, _ in conclude([alone(rows(40, **more), dtype="bfloat16")]))


def speed(tokens: float) -> dict[str, float]:
    return {"perf/total_num_tokens": 2 * tokens, "perf/time_per_step": 2.0}


def test_groups_are_compared_only_with_several_runs_each():
    def group(name, speeds):
        return RunGroup(
            name, [Log(Path(name), {}, rows(40, **{"perf/total_num_tokens": s, "perf/time_per_step": 1.0})) for s in speeds]
        )

    def told(a, b):
        return [t for _, t, rests in conclude([group("base", a), group("other", b)]) if "tokens/s" in rests]

    assert told([100], [200]) == ["tokens/s: too few runs to compare; 3 of each are the least"]
    assert told([100, 101, 102], [200, 202, 204]) == ["tokens/s higher in every run: 2.00 times as much"]
    assert told([100, 101, 250], [200, 202, 204]) == ["tokens/s: the runs overlap, no difference is shown"]


def test_ends_at_different_steps_do_not_compare():
    groups = [RunGroup(n, [Log(Path(n), {}, rows(steps)) for _ in range(3)]) for n, steps in (("base", 30), ("other", 60))]
    told = [t for _, t, rests in conclude(groups) if rests.startswith("reward of")]
    assert told == ["reward of the last steps: the runs stopped at different steps (30 to 60), so their ends do not compare"]


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
    assert speedup([three, same], three, smooth=1)[1][-1].endswith("not told apart")


def test_the_overview_gives_mean_and_spread(tmp_path):
    logs = [load(write(tmp_path / str(s), rows(40, slope=s, **speed(10 * s)), seed=s)) for s in (1, 2, 3)]
    header, row = overview(group_runs(logs), 1)
    cells = dict(zip(header, row, strict=True))
    assert cells["runs"] == "3" and cells["state"] == "finished" and cells["accuracy, first"] == "-"
    assert cells["reward, last 1 steps"] == "78.000 (39.000 - 117.000)" and cells["tokens/s"] == "20 (10 - 30)"


# ------------------------------------------------------------------------------------------------------ odd logs


def test_a_line_cut_in_the_middle(tmp_path):
    run = write(tmp_path / "a", rows(30))
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-40])
    assert load(run).notes == ["metrics.jsonl line 30: cut off or no record of a step, left out"]
    page = said(tmp_path / "out", run)
    assert "stopped at 29 of 40" in page and "line 30: cut off" in page and "the reward rose" in page


def test_an_empty_run_alone_and_beside_others(tmp_path):
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


def test_runs_of_different_lengths(tmp_path):
    runs = [write(tmp_path / f"{n}", rows(n, **{ACCURACY: n / 100}), seed=n) for n in (25, 30, 60)]
    page = said(tmp_path / "out", *runs)
    assert "| train_sync | 3 | 38 (25 - 60)" in page
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_recorded_twice_counts_once(tmp_path):
    log = load(write(tmp_path / "a", rows(10) + [r | {"critic/score/mean": 9.0} for r in rows(10)[5:]]))
    assert log.steps == 10 and len(log.rows) == 10 and log.points("critic/score/mean")[-1, 1] == 9
    assert log.notes == ["5 steps were recorded twice, as after a restart: the later record counts"]


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


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """<script>onload = () => { document.title = 'ready'; document.body.append(JSON.stringify({
  images: [...document.images].map(i => i.naturalWidth), tables: document.querySelectorAll('table tr').length,
  requests: performance.getEntriesByType('resource').map(e => e.name) })) }</script></body>"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here (apt-get install chromium)")
def test_it_opens_in_a_browser(tmp_path):
    said(tmp_path / "out", full_run(tmp_path / "a", "train_sync", 0))
    html = (tmp_path / "out" / "report.html").read_text()
    (tmp_path / "out" / "probe.html").write_text(html.replace("</body>", PROBE))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    url = (tmp_path / "out" / "probe.html").as_uri()
    done = subprocess.run([CHROMIUM, *flags, url], capture_output=True, text=True, timeout=120, env=os.environ)
    found = json.loads(re.search(r'\{"images".*?\}', done.stdout)[0])
    assert len(found["images"]) == 10 and min(found["images"]) > 300, found
    assert found["tables"] > 3
    assert all(name.startswith(("file:", "data:")) for name in found["requests"]), found
