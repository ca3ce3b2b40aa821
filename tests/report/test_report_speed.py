"""The report on speed and waiting, for two runs or more: ratios and intervals are checked by hand and against known truths."""

import re
from pathlib import Path

import numpy as np
import pytest

from tools.report import speed
from tools.report.conclusions import conclude, overview
from tools.report.logs import Log, RunGroup

RATIO = re.compile(r"\w+ makes (?P<x>[\d.]+)x the tokens/s of \w+ \((?P<low>[\d.]+)-(?P<high>[\d.]+) over steps\)")


def run(name: str, seconds, tokens, ranks: int = 2, config: dict | None = None, **more) -> Log:
    """A run whose steps take `seconds` [n] for `tokens` [n]."""
    rows, clock = [], 1000.0
    for step, (took, of) in enumerate(zip(seconds, tokens, strict=True), 1):
        clock += took
        row = {"step": step, "time": clock, "timing_s/step": took, "perf/time_per_step": took}
        rows.append(row | {"perf/total_num_tokens": of, "perf/throughput": of / took / ranks, "critic/score/mean": 0.5} | more)
    return Log(Path(name), config or {}, rows)


def group(name: str, *runs) -> RunGroup:
    return RunGroup(name, [run(name, *of) if isinstance(of, tuple) else of for of in runs])


def said(ours: RunGroup, base: RunGroup, of: str) -> str:
    (text,) = [text for _, text, rests in conclude([base, ours]) if rests.startswith(of)]
    return text


def noisy(random, steps: int, mean: float, spread: float = 0.1) -> np.ndarray:
    return mean * random.lognormal(0, spread, steps)


@pytest.mark.parametrize("steps", [20, 58])
def test_two_runs_of_twenty_steps_say_how_much_faster_one_is(steps):
    """Exactly: 330 tokens per second against 100, whatever the first step took."""
    slow, fast = ([300.0] + [1.0] * (steps - 1), [100.0] * steps), ([9.0] + [2.0] * (steps - 1), [660.0] * steps)
    text = said(group("fast", fast), group("slow", slow), "tokens/s")
    assert text == "fast makes 3.3x the tokens/s of slow (3.3-3.3 over steps)"
    back = said(group("slow", slow), group("fast", fast), "tokens/s")
    assert back == "slow makes 0.30x the tokens/s of fast (0.30-0.30 over steps)"
    text = said(group("fast", fast), group("slow", slow), "seconds a step")
    assert text == "a step of fast takes 2.0x the seconds of one of slow (2.0-2.0 over steps), with 6.6x the tokens"


def test_a_validation_before_the_first_step_is_no_step():
    """The step after it is the run's first and includes the start-up."""
    log = run("a", [0.5, 300.0] + [2.0] * 20, [100.0] * 22)
    before = {"step": 0, "time": 1000.5, "timing_s/step": 0.5, "val-core/demo/acc/mean@1": 0.4}
    log = Log(Path("a"), {"flags": {}}, [before, *({**row, "step": row["step"] - 1} for row in log.rows[1:])])
    assert log.starts == {0, 1} and len(speed.STEP.steps(log)) == 20 and speed.STEP.recorded(log) == 21
    assert speed.STEP.median(log) == speed.STEP.value(log) == 2 and log.seconds == 340.5


def test_the_interval_is_printed_around_the_ratio():
    random = np.random.default_rng(2)
    slow, fast = noisy(random, 40, 3.3), noisy(random, 40, 1.0)
    found = RATIO.match(said(group("fast", (fast, [100.0] * 40)), group("slow", (slow, [100.0] * 40)), "tokens/s"))
    assert found["x"] == f"{slow[1:].mean() / fast[1:].mean():.1f}"  # without the first steps
    assert float(found["low"]) < float(found["x"]) < float(found["high"])


def test_the_interval_is_that_of_a_plain_bootstrap_where_steps_are_independent():
    """Written with a loop over resamples, a step at a time."""
    random = np.random.default_rng(1)
    slow, fast = noisy(random, 400, 3.0, 0.3), noisy(random, 300, 1.0, 0.3)
    ratios = []
    for _ in range(1000):
        a, b = random.choice(slow, len(slow)), random.choice(fast, len(fast))
        ratios.append((len(b) / b.sum()) / (len(a) / a.sum()))
    steps = [np.stack([np.ones(len(of)), of], 1) for of in (fast, slow)]
    found = speed.interval([(steps[0], 1)], [(steps[1], 1)])
    assert found == pytest.approx(np.quantile(ratios, (0.025, 0.975)), rel=0.02)


def test_steps_that_wait_for_a_whole_period_are_not_passed_over():
    """The first of four steps waits 9 s, and the others take samples that arrived with it: 4 steps in 12 s. The median step
    takes 1 s, and would make the run four times as fast as one with steps of 3 s."""
    flags = {"flags": {"publish_every": 4}}
    uneven = run("uneven", [9.0, 1.0, 1.0, 1.0] * 10, [300.0] * 40, config=flags)
    even = run("even", [3.0] * 40, [300.0] * 40)
    text = said(group("uneven", uneven), group("even", even), "tokens/s")
    steady = (39 * 300 / (9 * 9 + 30)) / 100  # without the first step
    assert text.startswith("tokens/s of all ranks: no difference is shown") and f"{steady:.2f}x" in text


def test_what_lies_within_the_noise_of_the_steps_is_no_difference():
    random = np.random.default_rng(3)
    a, b = (noisy(random, 30, 1.0, 0.5) for _ in range(2))
    text = said(group("a", (a, [100.0] * 30)), group("b", (b, [100.0] * 30)), "tokens/s")
    assert text.startswith("tokens/s of all ranks: no difference is shown beyond that of the steps; ")


def test_several_runs_have_to_agree():
    """However narrow the interval over steps is, runs that overlap show no difference."""
    of = lambda *speeds: [([1.0] * 40, [s] * 40) for s in speeds]  # noqa: E731
    text = said(group("b", *of(200.0, 202.0, 204.0)), group("a", *of(100.0, 101.0, 250.0)), "tokens/s")
    assert text.startswith("tokens/s of all ranks: the runs overlap, no difference is shown")
    text = said(group("b", *of(200.0, 204.0)), group("a", *of(100.0, 102.0)), "tokens/s")
    assert text == "b makes 2.0x the tokens/s of a (2.0-2.0 over steps), in every run"


def test_a_rank_s_tokens_are_compared_where_nothing_else_was_recorded():
    """For example a TensorBoard directory that holds only verl's perf/throughput."""
    a, b = (run(name, [2.0] * 30, [tokens] * 30) for name, tokens in (("a", 100.0), ("b", 330.0)))
    for row in [*a.rows, *b.rows]:
        del row["perf/total_num_tokens"], row["tokens/s"]
    groups = [group("a", a), group("b", b)]
    assert "a rank of b makes 3.3x the tokens/s of one of a (3.3-3.3 over steps)" in [text for _, text, _ in conclude(groups)]
    header, *table = overview(groups, 10)
    cells = [dict(zip(header, row, strict=True)) for row in table]
    assert [row["tokens/s a rank, median step"] for row in cells] == ["25", "82"]
    assert [row["tokens/s of all ranks, median step"] for row in cells] == ["-", "-"]


def test_mfu_in_the_table_and_in_a_sentence():
    a, b = (run(name, [1.0] * 30, [100.0] * 30, **{"perf/mfu/actor": mfu}) for name, mfu in (("a", 0.012), ("b", 0.053)))
    header, first, second = overview([group("a", a), group("b", b)], 10)
    assert (first[header.index("MFU")], second[header.index("MFU")]) == ("1.2%", "5.3%")
    text = said(group("b", b), group("a", a), "MFU")
    assert text == "the update of b has 4.4x the MFU of that of a (4.4-4.4 over steps)"
    unknown = run("c", [1.0] * 30, [100.0] * 30, **{"perf/mfu/actor": 0.0})  # verl's word for a device that it does not know
    assert "MFU" not in overview([group("c", unknown)], 10)[0]


def test_columns_of_waiting_are_there_where_somebody_waited():
    waits = {"fully_async/trainer/idle_ratio": 0.36, "fully_async/rollouter/idle_ratio": 0.48}
    waits |= {"fully_async/rollouter/held_ratio": 0.4, "fully_async/count/max_required_samples": 307}
    waits |= {"staleness/mean": 0.7, "staleness/max": 2}
    split, sync = run("split", [1.0] * 30, [9.0] * 30, **waits), run("sync", [1.0] * 30, [9.0] * 30)
    header, *table = overview([group("sync", sync), group("split", split)], 10)
    cells = [dict(zip(header, row, strict=True)) for row in table]
    names = ["seconds a step, median", "learners wait", "generators wait", "held by the staleness bound"]
    names += ["age of tokens, versions", "oldest", "staleness bound, samples"]
    assert [[row[name] for name in names] for row in cells] == [
        ["1", "-", "-", "-", "-", "-", "-"],
        ["1", "36%", "48%", "40%", "0.70", "2", "307"],
    ]
    assert not {"learners wait", "oldest", "staleness bound, samples"} & {*overview([group("sync", sync)], 10)[0]}


def test_why_generators_waited():
    def texts(**more) -> list[str]:
        waits = {"fully_async/trainer/idle_ratio": 0.0, "fully_async/rollouter/idle_ratio": 0.48}
        log = run("a", [1.0] * 30, [9.0] * 30, config={"flags": {"staleness_threshold": 0.2}}, **waits, **more)
        return [text for _, text, _ in conclude([group("a", log)])]

    held = {"fully_async/rollouter/held_ratio": 0.4, "fully_async/count/max_required_samples": 307}
    bound = "the staleness bound of 307 samples held the generators for 40% of the time; for 8% they waited for another reason"
    assert f"{bound}. A --staleness-threshold above 0.2 holds them less, and samples get older" in texts(**held)
    none = "the staleness bound of 307 samples held the generators for 0% of the time; for 48% they waited for another reason"
    assert none in texts(**held | {"fully_async/rollouter/held_ratio": 0.0})
    assert "why the generators waited was not recorded" in texts()


def test_generators_that_wait_for_graders():
    def about_scores(share: float, steps: int = 30, rank: str = "generator_0") -> list[str]:
        waits = {"fully_async/trainer/idle_ratio": 0.9, "fully_async/rollouter/idle_ratio": 0.0}
        ledgers = {f"ledger/{rank}/score": share, "ledger/learner_1/score": 0.0}
        log = run("a", [1.0] * steps, [9.0] * steps, **waits, **ledgers)
        return [text for _, text, _ in conclude([group("a", log)]) if "on scores" in text]

    remedy = "try more --reward-workers, or faster tools with --env, before another split"
    said_then = f"learners 90%: generators spent 70% of the time on scores; {remedy}"
    assert about_scores(0.7) == [f"generators waited 0% of the time, {said_then}"]
    assert about_scores(0.05) == about_scores(0.7, steps=5) == about_scores(0.7, rank="rank_0") == []


def test_the_age_of_samples():
    ages = {"staleness/mean": 0.7, "staleness/max": 2}
    texts = [text for _, text, _ in conclude([group("a", run("a", [1.0] * 30, [9.0] * 30, **ages))])]
    assert "a trained token was 0.70 versions of the weights old on average, the oldest 2" in texts
    fresh = conclude([group("a", run("a", [1.0] * 30, [9.0] * 30, **{"staleness/mean": 0.0, "staleness/max": 0}))])
    assert not any("old on average" in text for _, text, _ in fresh)
