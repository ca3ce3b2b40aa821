"""The console: a line's numbers are those of all steps since the last line."""

import re

import pytest

from rl.record import run


def rows(*steps: tuple[float, float, float, float]) -> list[dict[str, float]]:
    """Metrics of steps from (reward, tokens, seconds, share of them that the learners wait)."""
    names = ("critic/score/mean", "perf/total_num_tokens", "perf/time_per_step", "fully_async/trainer/idle_ratio")
    return [dict(zip(names, step, strict=True)) | {"timing_s/step": step[2]} for step in steps]


@pytest.fixture
def shown(monkeypatch, capsys):
    """Return a function that shows steps at given times and returns the lines."""

    def show(steps: list[dict[str, float]], times: list[float], total: int = 100) -> list[str]:
        clock = iter(times)
        monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
        log = run.ConsoleLog(total)
        for step, metrics in enumerate(steps, 1):
            log.show(step, metrics)
        return capsys.readouterr().out.splitlines()

    return show


def test_a_line_is_the_mean_since_the_last_line(shown):
    """The step after a validation waits for 87% of its time; the run does not."""
    validation = {"val-core/x/acc/mean@1": 0.25}
    steps = rows((0.0, 100, 1.0, 0.5), (0.2, 700, 0.1, 0.1), (0.4, 700, 0.1, 0.1), (0.6, 700, 0.8, 0.87))
    steps[3] |= validation
    first, second = shown(steps, [0.0, 0.5, 1.0, 1.5])
    assert first.startswith("step 1/100  reward 0.000  100 tokens/s  learners wait 50%")
    # 2,100 tokens in one second; waits of 0.01, 0.01 and 0.696 seconds
    assert re.match(
        r"step 4/100  reward 0\.400  validation accuracy 0\.250  2,100 tokens/s  learners wait 72%  \d+ s left$", second
    )


def test_every_step_is_in_one_line_only(shown):
    steps = rows(*[(float(i), 10.0 * i, 1.0, 0.0) for i in range(1, 7)])
    lines = shown(steps, [0.0, 1.0, 2.5, 3.0, 4.0, 5.0], total=6)
    assert [line.split("  ")[:2] for line in lines] == [
        ["step 1/6", "reward 1.000"],
        ["step 3/6", "reward 2.500"],
        ["step 6/6", "reward 5.000"],
    ]


def test_what_some_steps_lack_is_the_mean_of_the_others(shown):
    """A generator reports at a publish, not at every step; an unscored step has no reward."""
    steps = rows((0.5, 10, 1.0, 0.0), (float("nan"), 10, 1.0, 0.0), (0.3, 10, 1.0, 0.0))
    steps[1]["fully_async/rollouter/idle_ratio"] = 0.4
    *_, last = shown(steps, [0.0, 1.0, 2.0], total=3)
    assert "reward 0.300" in last and "generators wait 40%" in last


def test_a_validation_before_the_first_step_has_no_reward(shown):
    (line,) = shown([{"val-core/x/acc/mean@1": 0.25, "timing_s/step": 3.0}], [0.0])
    assert line == "step 1/100  validation accuracy 0.250"
