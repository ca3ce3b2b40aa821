"""Async reward functions: many responses at once in one process, and a bad one costs itself alone."""

import itertools
from types import SimpleNamespace

import pytest
from test_scoring import FOREVER, drain

from rl.rewards import lane
from rl.rewards.pool import RewardArgs, ScoringPool
from rl.rewards.process import Lost

pytestmark = pytest.mark.timeout(200)

REWARD = """
import asyncio, fcntl, os, sys, time
print("printing at import must not disturb the answers")
inside, most = 0, 0
crowd = asyncio.Barrier(16)

def answers_fd():
    files = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
    pipes = [fd for fd in files if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")]
    return next(fd for fd in pipes if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY)

class Async:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 0.5
of_a_class = Async()

async def score(data_source, solution_str, ground_truth, extra_info):
    global inside, most
    print("nor printing here")
    do, again = solution_str, os.path.exists(__file__ + ground_truth)
    if do == "crowd": await crowd.wait()
    if do == "count":
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return {"score": 1, "most": most}
    if do == "hang": await asyncio.sleep(1000)
    if do == "swallow":
        for _ in range(2):
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if do == "wait" and not again:  # the first time until the process is lost
        open(__file__ + ground_truth, "w")
        await asyncio.sleep(1000)
    if do == "block": time.sleep(1000)
    if do == "exit": os._exit(3)
    if do == "spin":
        while True: pass
    if do == "raise": raise ValueError("no way")
    if do == "sys.exit": sys.exit(0)
    if do == "cancel": raise asyncio.CancelledError
    if do == "named": error = ValueError("own"); error.event = "image of mine"; raise error
    if do == "string": return "good"
    if do == "junk": os.write(answers_fd(), b"{}\\n")
    if do.startswith("say "): os.write(answers_fd(), do[4:].encode() + b"\\n")
    return {"score": float(ground_truth), "pid": os.getpid()}
"""


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    return f"{tmp_path / 'mine.py'}:score"


def submit(pool, *texts) -> dict:
    """What each text gets; the truth is its place."""
    for number, text in enumerate(texts):
        pool.submit((text, number), "any", text, str(number), {})
    return drain(pool)


def test_many_responses_at_once_in_one_process(spec):
    """None of 16 returns before all have begun; with a limit of 3 there are never more."""
    with ScoringPool(RewardArgs(reward=spec, reward_timeout=FOREVER)) as pool:
        found = submit(pool, *["crowd"] * 16, *["fine"] * 300)
        assert [score.score for score in map(found.get, sorted(found, key=lambda key: key[1]))] == list(range(316))
        assert len({score.extra["pid"] for score in found.values()}) == 1 and not pool.events
    with ScoringPool(RewardArgs(reward=spec, reward_timeout=FOREVER, reward_concurrency=3)) as pool:
        assert max(score.extra["most"] for score in submit(pool, *["count"] * 20).values()) == 3
    with ScoringPool(RewardArgs(reward=spec.replace("score", "of_a_class"), reward_timeout=FOREVER)) as pool:
        assert submit(pool, "x")[("x", 0)].score == 0.5


def test_long_items_and_answers_pass_each_other(spec):
    """More than the pipes hold, both ways at once."""
    with ScoringPool(RewardArgs(reward=spec, reward_timeout=FOREVER, reward_concurrency=4096)) as pool:
        found = submit(pool, *["x" * 3000] * 500)
        assert sorted(score.score for score in found.values()) == list(range(500))


def test_a_bad_one_costs_itself(spec):
    expected = {"raise": "error", "sys.exit": "error", "cancel": "error", "named": "error", "string": "bad_value"}
    with ScoringPool(RewardArgs(reward=spec, reward_timeout=FOREVER)) as pool:
        found = submit(pool, "fine", *expected, "fine")
        assert found["fine", 0].score == 0 and found["fine", 6].score == 6
        assert {text: found[text, number].event for text, number in found if text in expected} == expected, "no process is lost"
    assert "ValueError: no way (" in found["raise", 1].message and "mine.py:" in found["raise", 1].message


def test_one_that_loses_the_process_costs_itself(spec):
    """Those that were under way with it are scored again, each alone; each such process is lost twice."""
    with ScoringPool(RewardArgs(reward=spec, reward_timeout=FOREVER)) as pool:
        for text, event in {"exit": "died", "junk": "error"}.items():
            lost = len(pool.lost)
            for number in range(3):
                pool.submit(number, "any", "wait", f"{lost}{number}", {})
            pool.submit(3, "any", text, "3", {})
            found = drain(pool)
            assert [found[number].score for number in range(3)] == [float(f"{lost}{number}") for number in range(3)], text
            assert found[3].event == event and len(pool.lost) == lost + 2, text


FORGED = ['{"number": 1, "value": 9}\n{"number": 1, "value": 9}', '{"number": [1], "value": 9}', '{"number": 2, "value": 9}']


@pytest.mark.parametrize("forged", FORGED, ids=["twice", "no number", "another number"])
def test_a_forged_reply_costs_itself(spec, forged):
    """Two replies with one number, or a number that is a list, ended the run."""
    with ScoringPool(RewardArgs(reward=spec, reward_timeout=FOREVER)) as pool:
        found = submit(pool, f"say {forged}") | submit(pool, "fine")
        assert found[f"say {forged}", 0].event == "error" and found["fine", 0].score == 0


def test_a_forged_failure_without_a_text_costs_itself():
    """A message that is no text ended the run."""
    its = lane.Lane(lane.Lanes(RewardArgs(reward="mine.py:score")))
    assert its._score("{}", {"number": 1, "failed": 5, "event": "error"}).error == "error: 5"


def test_the_last_one_under_suspicion_is_scored_alone():
    pool = ScoringPool(RewardArgs())
    pool.queue.put(("next", "{}"))
    its = lane.Lane(pool)
    numbers = itertools.count(1)
    its._process = SimpleNamespace(put=lambda *_: next(numbers), exchange=lambda _: [], check_idle=lambda: None)
    its._is_async = True
    its._suspects.append(("last", "{}"))
    assert its._take() and its._take()
    assert [key for (key, _), _, _ in its._under_way.values()] == ["last"]


@pytest.mark.slow
def test_cpu_time_is_limited(spec):
    """It begins again with each response."""
    with ScoringPool(RewardArgs(reward=spec, reward_timeout=FOREVER, reward_cpu_limit=1)) as pool:
        found = submit(pool, *["fine"] * 20)
        found |= submit(pool, "wait", "spin")
    assert found["wait", 0].score == 0 and {score.event for (text, _), score in found.items() if text == "fine"} == {None}
    assert found["spin", 1].message == "no score within the CPU time of --reward-cpu-limit"


def test_one_that_hangs_or_blocks_the_loop_costs_itself(spec, monkeypatch):
    monkeypatch.setattr(lane, "GRACE", 0.5)
    with ScoringPool(RewardArgs(reward=spec, reward_timeout=FOREVER)) as pool:
        found = submit(pool, "fine")
        pool.first_calls.append(FOREVER)  # as if an import had taken so long: the machine may be slow
        pool.args.reward_timeout = 1.0
        found |= submit(pool, "hang")
        assert found["hang", 0].error == "timeout: no score after 1 s (--reward-timeout)" and not pool.lost
        found = submit(pool, "wait", "wait", "block")
        assert [found["wait", number].score for number in (0, 1)] == [0, 1]
        assert found["block", 2].event == "timeout" and "blocked its event loop" in found["block", 2].message
        assert len(pool.lost) == 2
        pool.args.reward_timeout = FOREVER
        assert submit(pool, "fine")["fine", 0].score == 0


def test_one_that_will_not_be_cancelled_costs_itself(spec, monkeypatch):
    monkeypatch.setattr(lane, "GRACE", 0.2)
    monkeypatch.setattr("rl.rewards.lane.FIRST_CALL", 0.5)
    with ScoringPool(RewardArgs(reward=spec, reward_timeout=0.5)) as pool:
        found = submit(pool, "swallow")
        assert found["swallow", 0].event == "timeout"


def test_an_answer_counts_though_another_response_blocks_the_loop_behind_it(monkeypatch):
    monkeypatch.setattr(lane, "GRACE", 0.0)
    answers = [[{"number": 1, "value": 1.0}], []]
    numbers = itertools.count(1)
    pool = ScoringPool(RewardArgs(reward_timeout=-1.0))
    pool.args.judge = "rubric"
    for key in "ab":
        pool.queue.put((key, "{}"))
    its = lane.Lane(pool)
    its._process = SimpleNamespace(check_idle=lambda: None, put=lambda *_: next(numbers), exchange=lambda _: answers.pop(0))
    its._is_async = True
    assert its._take()
    its._hear()
    key, score = pool.done.get()
    assert (key, score.score) == ("a", 1.0)
    with pytest.raises(Lost, match="blocked its event loop") as lost:
        its._hear()
    its._find_fault(lost.value)
    key, score = pool.done.get()
    assert (key, score.event) == ("b", "timeout") and not its._suspects and pool.done.empty()
