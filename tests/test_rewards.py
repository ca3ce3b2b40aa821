"""Verifiers by hand-made examples; the pool by reward functions that do everything a reward function should not."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from rl.errors import UserError
from rl.rewards import (
    BUILT_IN,
    RewardArgs,
    ScoringPool,
    as_score,
    check_sources,
    exact,
    geo3k,
    gsm8k,
    gsm8k_flexible,
    math_dapo,
    math_verify,
    overlong_penalty,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("so it is\n#### 72", "72", 1, 1),
        ("#### 71 no, wait\n#### 72", "72", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### -5", "-5", 1, 1),
        ("####72", "72", 0, 1),  # the format asks for the blank
        ("the answer is 72.", "72", 0, 1),
        ("#### 72" + "x" * 300, "72", 0, 1),  # only the last 300 characters count
        ("#### 7", "72", 0, 0),
        ("", "72", 0, 0),
    ],
)
def test_gsm8k(text, truth, strict, flexible):
    assert gsm8k("", text, truth) == strict
    assert gsm8k_flexible("", text, truth) == flexible


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        (r"thus \boxed{\frac{1}{2}}", "0.5", 1),
        (r"thus \boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{3}", "4", 0),
        ("Answer: 42", "42", 1),
        ("Answer: $42$", "42", 1),
        ("42", "42", 0),
        ("", "42", 0),
    ],
)
def test_math(text, truth, right):
    assert math_verify("", text, truth) == right
    assert math_dapo("", text, truth) == {"score": 2 * right - 1, "acc": right}


def test_geo3k_demo_and_overlong():
    assert geo3k("", r"<think>a</think> so \boxed{5}.", "5")["score"] == pytest.approx(1.0)
    assert geo3k("", r"so \boxed{5}.", "5")["score"] == pytest.approx(0.9)
    assert geo3k("", r"<think>a</think> so \boxed{6}.", "5")["score"] == pytest.approx(0.1)
    assert geo3k("", "5", "5")["score"] == 0
    assert exact("demo", " 46 ", "46") == 1 and exact("demo", "4 6", "46") == 0
    # L_max 100, buffer 20, penalty 0.5: nothing up to 80, half of it at 90, all of it at 100
    assert [overlong_penalty(n, 100, 20, 0.5) for n in (1, 80, 90, 100)] == [0, 0, -0.25, -0.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, [1], {"acc": 1}, {"score": "x"}])
def test_bad_values(value):
    score = as_score(value)
    assert score.event == "bad_value" and score.score == 0 and "not a finite number" in score.message


def test_good_values():
    assert as_score(True).score == 1 and as_score({"score": 0.5, "acc": 1, "note": "x"}).extra == {"acc": 1.0}


REWARD = """
import ctypes, os, signal, subprocess, sys, time
print("printing at import must not disturb the answers")

def score(data_source, solution_str, ground_truth, extra_info):
    print("nor printing here")
    do = solution_str
    if do == "hang": time.sleep(1000)
    if do == "hang hard":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL})
        ctypes.CDLL(None).sleep(1000)
    if do == "raise": raise ValueError("no\\nway")
    if do == "nan": return float("nan")
    if do == "string": return "good"
    if do == "object": return {"score": object()}
    if do == "allocate":
        hold = []
        while True: hold.append(bytearray(1 << 26))
    if do == "exit": os._exit(3)
    if do == "sys.exit": sys.exit(0)
    if do == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if do == "fork twice": os.fork()  # both come back with a score; only one may answer
    if do == "fork":
        subprocess.Popen(["sleep", "12345.6"])
        time.sleep(1000)
    return {"score": float(ground_truth), "length": len(do), "seen": extra_info["n"]}
"""
EXPECTED = {
    "hang": "timeout",
    "hang hard": "timeout",
    "raise": "error",
    "nan": "bad_value",
    "string": "bad_value",
    "object": "bad_value",
    "allocate": "error",
    "exit": "died",
    "sys.exit": "error",
    "kill": "died",
    "fork": "timeout",
}


def drain(pool, seconds=60):
    results, deadline = {}, time.monotonic() + seconds
    while pool.pending and time.monotonic() < deadline:
        results.update(pool.wait(1.0))
    assert not pool.pending
    return results


@pytest.fixture
def bad_reward(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(REWARD)
    return f"{path}:score"


def test_a_bad_reward_costs_its_own_response_only(bad_reward):
    args = RewardArgs(reward=bad_reward, reward_timeout=1.5, reward_workers=2, reward_memory_limit_gb=1)
    check_sources({"anything": "here"}, args)
    with ScoringPool(args) as pool:
        for number, text in enumerate(EXPECTED):
            pool.submit(("good", number), "any", "fine", "0.25", {"n": number})
            pool.submit(("bad", text), "any", text, "1", {"n": 0})
        results = drain(pool)
        assert {key[1]: s.event for key, s in results.items() if key[0] == "bad"} == EXPECTED
        for number in range(len(EXPECTED)):
            score = results[("good", number)]
            assert (score.score, score.extra, score.event) == (0.25, {"length": 4.0, "seen": float(number)}, None)
        assert pool.events == {"timeout": 3, "error": 3, "bad_value": 3, "died": 2}
        assert "ValueError: no way" in results[("bad", "raise")].message and "mine.py:" in results[("bad", "raise")].message
    assert not subprocess.run(["pgrep", "-f", "sleep 12345.6"], capture_output=True).stdout, "a forked child lives on"


def test_a_function_that_forks_and_returns_twice_answers_once(bad_reward):
    """A second answer would be taken for the next response's."""
    with ScoringPool(RewardArgs(reward=bad_reward)) as pool:
        for number in range(6):
            pool.submit(number, "any", "fork twice", str(number), {"n": number})
        results = drain(pool)
    assert {number: score.score for number, score in results.items()} == {number: float(number) for number in range(6)}


def test_workers_die_with_a_killed_rank(bad_reward):
    code = f"""
import time
from rl.rewards import RewardArgs, ScoringPool
pool = ScoringPool(RewardArgs(reward={bad_reward!r}))
pool.submit(0, "any", "hang", "1", None)
while not (pool._workers and pool._workers[0].item): pool.poll(); time.sleep(0.01)
print(pool._workers[0].process.pid, flush=True)
time.sleep(1000)
"""
    rank = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    worker = int(rank.stdout.readline())
    os.kill(worker, 0)
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and os.path.exists(f"/proc/{worker}") and state(worker) != "Z":
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker}") or state(worker) == "Z"


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_math_goes_through_the_pool_and_numpy_through_json():
    import numpy as np

    with ScoringPool(RewardArgs()) as pool:
        pool.submit("a", "math", r"\boxed{\frac{2}{4}}", "0.5", {"array": np.arange(3), "n": np.int64(4)})
        pool.submit("b", "demo", "46", "46", None)
        results = drain(pool)
    assert results["a"].score == results["b"].score == 1.0


def test_submit_and_poll_never_block(bad_reward):
    with ScoringPool(RewardArgs(reward=bad_reward, reward_timeout=60)) as pool:
        started = time.monotonic()
        for number in range(200):
            pool.submit(number, "any", "hang", "1", {"text": "x" * 10_000})
            assert pool.poll() == []
        assert time.monotonic() - started < 30 and pool.pending == 200


UNLOADABLE = {
    "absent": ("mine.py:score", None, r"there is no file .*mine\.py"),
    "no function": ("mine.py:scor", "def score(): pass", "has no function 'scor'"),
    "import raises": ("mine.py:score", "import nothing_of_that_name", r"No module named 'nothing_of_that_name'.*mine\.py:1"),
    "syntax": ("mine.py:score", "def score(:", "SyntaxError"),
    "no colon": ("mine.py", "def score(): pass", r"file\.py:function"),
    "dies": ("mine.py:score", "import os; os._exit(1)", "ended the process"),
}


@pytest.mark.parametrize("case", UNLOADABLE)
def test_a_reward_that_cannot_be_loaded(case, tmp_path):
    spec, text, message = UNLOADABLE[case]
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=message):
        check_sources({}, RewardArgs(reward=str(tmp_path / spec)))


def test_an_unknown_source_is_named():
    with pytest.raises(UserError, match=r"a\.parquet row 7.*'my/data'.*--reward.*openai/gsm8k"):
        check_sources({"demo": "a.parquet row 0", "my/data": "a.parquet row 7"}, RewardArgs())
    check_sources(dict.fromkeys(BUILT_IN, "x"), RewardArgs())
