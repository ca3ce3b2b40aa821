"""Quick scoring processes have several responses at once: none is lost, none counts twice, none waits behind a slow one."""

import json
import time
from pathlib import Path

import pytest

from rl.scoring import RewardArgs, ScoringPool
from rl.scoring_process import AT_ONCE

pytestmark = pytest.mark.timeout(300)
FOREVER = 600.0  # a reward_timeout that no good response on a loaded machine reaches

REWARD = """
import os, pathlib, signal, time
here = pathlib.Path(__file__).parent

def score(data_source, solution_str, ground_truth, extra_info):
    with open(here / "calls", "a") as file: file.write(ground_truth + "\\n")
    if solution_str == "wait":
        while not (here / "open").exists(): time.sleep(0.01)
    if solution_str == "slow": time.sleep(0.2)
    if solution_str == "raise": raise ValueError
    if solution_str == "exit": os._exit(3)
    if solution_str == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "junk":
        for fd in range(3, 9):
            try: os.write(fd, b"junk\\n")
            except OSError: pass
    return float(ground_truth)
"""


@pytest.fixture
def here(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def make_pool(here: Path, workers: int = 1) -> ScoringPool:
    return ScoringPool(RewardArgs(reward=f"{here / 'mine.py'}:score", reward_timeout=FOREVER, reward_workers=workers))


def submit(pool: ScoringPool, number: int, text: str = "fine", extra_info: dict | None = None) -> None:
    pool.submit(number, "any", text, str(number), extra_info)


def drain(pool: ScoringPool, left: int = 0) -> dict:
    """Scores until so many are pending; each key comes once."""
    results, deadline = [], time.monotonic() + 120
    while pool.pending > left and time.monotonic() < deadline:
        results += pool.wait(1.0)
    assert pool.pending == left and len(dict(results)) == len(results)
    return dict(results)


def make_quick(pool: ScoringPool) -> None:
    """Has all processes of the pool started, past their first response, and ready for several at once."""
    deadline = time.monotonic() + 120
    while len(pool._workers) < pool.args.reward_workers or not all(worker._given for worker in pool._workers):
        assert time.monotonic() < deadline
        for _ in range(4):
            submit(pool, -1)
        while pool.pending:
            pool.wait(1.0)
    for worker in pool._workers:
        worker.quick = AT_ONCE


def wait_until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def item(number: int, text: str) -> str:
    return json.dumps({"data_source": "any", "solution_str": text, "ground_truth": str(number), "extra_info": None})


def calls(here: Path) -> list[int]:
    return [number for number in map(int, (here / "calls").read_text().split()) if number >= 0]


def test_a_rank_that_looks_seldom_gets_more_than_one_score_a_look(here):
    """It looks between two engine steps: responses that end together may not take a step each to be scored."""
    with make_pool(here) as pool:
        make_quick(pool)
        for number in range(40):
            submit(pool, number)
        looks, scores = 0, {}
        while len(scores) < 40:
            time.sleep(0.5)
            done = pool.poll()
            looks, scores = looks + bool(done), scores | {key: score.score for key, score in done}
        assert scores == {number: float(number) for number in range(40)} and looks <= 20


@pytest.mark.parametrize("workers", [1, 2])
def test_what_stands_behind_a_bad_response_is_scored(here, workers):
    """It is the one under way that costs a process its life, or a timeout."""
    bad = {10: ("exit", "died"), 20: ("kill", "died"), 30: ("wait", "timeout"), 31: ("raise", "error"), 40: ("junk", "error")}
    with make_pool(here, workers) as pool:
        make_quick(pool)
        for number in range(50):
            submit(pool, number, bad[number][0] if number in bad else "fine")
        results = drain(pool, left=20 if workers == 1 else 1)  # one process has all others behind it
        assert not pool.events["timeout"] and 30 not in results
        pool.args.reward_timeout = 0.1
        while not pool.events["timeout"]:
            results |= dict(pool.wait(1.0))
        pool.args.reward_timeout = FOREVER
        results |= drain(pool)
        assert {k: s.event for k, s in results.items() if s.event} == {key: event for key, (_, event) in bad.items()}
        assert {k: s.score for k, s in results.items() if not s.event} == {n: float(n) for n in range(50) if n not in bad}


def test_what_stands_behind_a_slow_response_goes_to_another_process_and_to_that_one_only(here):
    with make_pool(here, workers=2) as pool:
        make_quick(pool)
        submit(pool, 0, "wait")
        for number in range(1, 60):
            submit(pool, number)
        assert drain(pool, left=1).keys() == set(range(1, 60))
        (here / "open").touch()
        assert drain(pool)[0].score == 0 and not pool.events
        wait_until(lambda: not pool.poll() and all(worker.has_room for worker in pool._workers))  # and go on
    assert sorted(calls(here)) == list(range(60))


def test_slow_responses_are_called_once_each_by_processes_that_were_quick(here):
    with make_pool(here, workers=2) as pool:
        make_quick(pool)
        pool._workers[0].quick = 0  # one has all, the other none: it gets them one by one
        for number in range(20):
            submit(pool, number, "slow")
        assert {key: score.score for key, score in drain(pool).items()} == {n: float(n) for n in range(20)}
    assert len(calls(here)) <= 22  # each process may have begun one when it is told that another has got it


def test_a_response_begun_before_it_was_taken_back_counts_once(here):
    with make_pool(here) as pool:
        make_quick(pool)
        (worker,) = pool._workers
        for number in range(10):
            worker.give(number, item(number, "fine"))
        wait_until(lambda: len(calls(here)) == 10)  # the rank has not looked
        pool._queue.extend(worker.take_back())
        assert {key: score.score for key, score in drain(pool).items()} == {n: float(n) for n in range(10)}
    assert len(calls(here)) == 10


def test_a_process_that_hangs_in_what_another_has_got_since_costs_no_further_response(here):
    with make_pool(here, workers=2) as pool:
        make_quick(pool)
        idle, busy = pool._workers
        busy.give(0, item(0, "fine"))
        busy.give(1, item(1, "wait"))
        wait_until(lambda: 1 in calls(here))
        pool._queue.extend(busy.take_back())
        results = drain(pool, left=1)
        wait_until(lambda: not pool.poll() and idle.items)
        pool.args.reward_timeout = 0.1
        while not pool.events:
            results |= dict(pool.wait(1.0))
        pool.args.reward_timeout = FOREVER
        for number in range(2, 22):
            submit(pool, number)
        results |= drain(pool)
        assert len(results) == 22 and pool.events == {"timeout": 1} and results[1].event == "timeout"
        assert not {idle, busy} & set(pool._workers)


def test_the_time_of_a_long_item_begins_when_it_has_arrived(here):
    with make_pool(here) as pool:
        make_quick(pool)
        submit(pool, 0, extra_info={"text": "x" * 4_000_000})  # more than the pipe takes at once
        (worker,) = pool._workers
        given = worker.started
        time.sleep(1.5)  # the rank is busy elsewhere
        wait_until(lambda: worker.write() or not worker._unwritten)
        assert worker.started > given + 1.5 and drain(pool)[0].score == 0
