"""Scoring in separate processes: it continues while the rank is busy, and no response waits behind a slow one."""

import time
from pathlib import Path

import pytest
import torch
from test_scoring import state

from rl.errors import UserError
from rl.rewards import lane
from rl.rewards.pool import RewardArgs, ScoringPool

pytestmark = pytest.mark.timeout(300)
FOREVER = 600.0  # a reward_timeout that no good response on a loaded machine reaches

REWARD = """
import os, pathlib, signal, threading, time
here = pathlib.Path(__file__).parent
if (here / "broken").exists(): raise ImportError("it is gone")
if (here / "ends").exists() and (left := int((here / "ends").read_text())):
    (here / "ends").write_text(str(left - 1))
    os.kill(os.getpid(), signal.SIGKILL)

def wait():
    while not (here / "open").exists(): time.sleep(0.01)

def junk(text="junk"):
    for fd in range(3, 9):
        try: os.write(fd, f"{text}\\n".encode())
        except OSError: pass

def later(act):
    wait()
    act()
    (here / "acted").touch()

def score(data_source, solution_str, ground_truth, extra_info):
    with open(here / "calls", "a") as file: file.write(ground_truth + "\\n")
    if solution_str == "wait": wait()
    if solution_str == "raise": raise ValueError
    if solution_str == "exit": os._exit(3)
    if solution_str == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "junk": junk()
    if solution_str.startswith("say "): junk(solution_str[4:])
    if solution_str == "exit later": threading.Thread(target=later, args=(lambda: os._exit(3),)).start()
    if solution_str.startswith("later "): threading.Thread(target=later, args=(lambda: junk(solution_str[6:]),)).start()
    return {"score": float(ground_truth), "pid": os.getpid()}
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
    """Score until this many responses are pending. Each key arrives once."""
    results, deadline = [], time.monotonic() + 120
    while pool.pending > left and time.monotonic() < deadline:
        results += pool.wait(1.0)
    assert pool.pending == left and len(dict(results)) == len(results)
    return dict(results)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def calls(here: Path) -> list[int]:
    return [int(number) for number in (here / "calls").read_text().split()] if (here / "calls").exists() else []


@pytest.mark.parametrize("busy", [False, True], ids=["asleep", "in torch"])
def test_scoring_continues_while_the_rank_does_not_look(here, busy):
    """An engine step may be long. All responses that ended in the step before are scored meanwhile."""
    square = torch.eye(300)
    with make_pool(here) as pool:
        for number in range(40):
            submit(pool, number)
        wait_until(lambda: (busy and square @ square is None) or len(calls(here)) == 40)
        assert {key: score.score for key, score in drain(pool).items()} == {n: float(n) for n in range(40)}


@pytest.mark.parametrize("workers", [1, 2])
def test_what_stands_behind_a_bad_response_is_scored(here, workers):
    bad = {5: ("exit", "died"), 10: ("kill", "died"), 16: ("raise", "error"), 20: ("junk", "error")}
    with make_pool(here, workers) as pool:
        for number in range(25):
            submit(pool, number, bad[number][0] if number in bad else "fine")
        results = drain(pool)
    assert {k: s.event for k, s in results.items() if s.event} == {key: event for key, (_, event) in bad.items()}
    assert {k: s.score for k, s in results.items() if not s.event} == {n: float(n) for n in range(25) if n not in bad}
    assert sorted(calls(here)) == list(range(25))


FORGED = ['{"number": 1, "value": 9}', '{"number": 3, "value": 9}', '{"number": 1, "failed": "x"}', '{"ready": true}']
FORGED += ['{"failed": "x"}', '{"number": "2", "value": 9}']


def test_an_answer_to_another_question_is_no_score(here):
    """The function imitates the worker's messages: for the question before, for the next one, and for none."""
    texts = [text for forged in FORGED for text in ("fine", f"say {forged}")] + ["fine"]  # each the second of its process
    with make_pool(here) as pool:
        for number, text in enumerate(texts):
            submit(pool, number, text)
        results = drain(pool)
    assert {key: score.score for key, score in results.items() if key % 2 == 0} == {n: n for n in range(0, len(texts), 2)}
    for number in range(1, len(texts), 2):
        assert results[number].event == "error" and "wrote to the scoring process" in results[number].message, texts[number]


def test_a_slow_response_holds_up_nobody_else(here):
    with make_pool(here, workers=2) as pool:
        submit(pool, 0, "wait")
        for number in range(1, 60):
            submit(pool, number)
        assert drain(pool, left=1).keys() == set(range(1, 60))
        (here / "open").touch()
        assert drain(pool)[0].score == 0 and not pool.events
    assert sorted(calls(here)) == list(range(60))


def test_a_long_item_goes_through_the_pipe_in_pieces(here):
    with make_pool(here) as pool:
        submit(pool, 0, extra_info={"text": "x" * 4_000_000})
        submit(pool, 1)
        assert {key: score.score for key, score in drain(pool).items()} == {0: 0, 1: 1}


@pytest.mark.parametrize("what", ["exit later", "later junk", 'later {"number": 2, "value": 9}'])
def test_a_process_that_breaks_between_two_responses_costs_none(here, what):
    """A reply that it writes then is not the next response's score."""
    with make_pool(here) as pool:
        submit(pool, 0, what)
        first = drain(pool)[0].extra["pid"]
        (here / "open").touch()
        wait_until(lambda: state(int(first)) == "Z" if what == "exit later" else (here / "acted").exists())
        for number in range(1, 4):
            submit(pool, number)
        results = drain(pool)
        assert [results[n].score for n in range(1, 4)] == [1, 2, 3] and not pool.events
        assert {results[n].extra["pid"] for n in range(1, 4)} != {first}


@pytest.mark.parametrize("times", [1, lane.BAD_STARTS, lane.BAD_STARTS + 1])
def test_a_process_that_is_killed_while_it_starts_is_replaced(here, times):
    """As by a system that runs out of memory: only a function that never starts, or one that no longer does, ends the run."""
    (here / "ends").write_text("1")
    with pytest.raises(UserError, match=r"importing it does not work: .* was killed by SIGKILL"):
        make_pool(here)
    with make_pool(here) as pool:
        (here / "ends").write_text(str(times))
        submit(pool, 0, "kill")
        submit(pool, 1)
        if times > lane.BAD_STARTS:
            with pytest.raises(UserError, match=r"importing it does not work: .* was killed by SIGKILL"):
                drain(pool)
        else:
            results = drain(pool)
            assert (results[0].event, results[1].score) == ("died", 1)


def test_what_a_thread_fails_with_is_the_rank_s_next_error_and_the_one_after(here):
    with make_pool(here) as pool:
        (here / "broken").touch()
        submit(pool, 0, "exit")
        submit(pool, 1)
        with pytest.raises(UserError, match=r"--reward .*mine.py:score: ImportError: it is gone .*mine\.py:4"):
            drain(pool)
        for call in (pool.poll, lambda: pool.wait(FOREVER), lambda: submit(pool, 2)):
            with pytest.raises(UserError, match="it is gone"):
                call()
