"""The scoring pool, tested with reward functions that do everything a reward function should not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from rl.errors import UserError
from rl.ranges import check
from rl.rewards.pool import RewardArgs, ScoringPool, check_sources
from rl.rewards.score import as_score, overlong_penalty
from rl.rewards.verifiers import BUILT_IN

pytestmark = pytest.mark.timeout(200)


def test_overlong_penalty():
    # L_max 100, buffer 20, penalty 0.5: nothing up to 80, half of it at 90, all of it at 100
    assert [overlong_penalty(n, 100, 20, 0.5) for n in (1, 80, 90, 100)] == [0, 0, -0.25, -0.5]
    assert overlong_penalty(100, 100, 0, 0.5) == 0


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        10**400,
        1e39,
        -1e300,
        {"score": 1e300},
        "1",
        "x" * 10**6,
        None,
        [1],
        {"acc": 1},
        {"score": "x"},
    ],
)
def test_bad_values(value):
    score = as_score(value)
    assert score.event == "bad_value" and score.score is None and "finite number" in score.message
    assert len(score.message) < 300


@pytest.mark.parametrize("score", [3e38, -3e38, -1e9, 1e-300])
def test_a_score_is_finite_to_the_learner_too(score):
    taken = as_score(score).score
    assert taken == score and torch.tensor([taken], dtype=torch.float32).isfinite().all()


def test_good_values():
    assert as_score(True).score == 1 and as_score({"score": 0.5, "acc": 1, "note": "x"}).extra == {"acc": 1.0}


REWARD = """
import ctypes, fcntl, os, signal, subprocess, sys, time
print("printing at import must not disturb the answers")

def answers_fd():
    return next(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")
                and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
                and fcntl.fcntl(int(fd), fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY)

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
    if do == "fork twice": os.fork()  # both come back with a score; only one may answer
    if do == "int beyond floats": return 10**400
    if do == "junk":
        for fd in range(3, 9):
            try: os.write(fd, b"junk\\n")
            except OSError: pass
    if do == "second answer": os.write(answers_fd(), b'{"value": 9}\\n')
    if do == "allocate":
        hold = []
        while True: hold.append(bytearray(1 << 26))
    if do == "exit": os._exit(3)
    if do == "sys.exit": sys.exit(0)
    if do == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if do == "fork":
        with open(__file__ + ".forked", "w") as file: file.write(f"{subprocess.Popen(['sleep', '1000']).pid} ")
        time.sleep(1000)
    return {"score": float(ground_truth), "length": len(do), "seen": extra_info["n"]}
"""
EXPECTED = {
    "raise": "error",
    "nan": "bad_value",
    "string": "bad_value",
    "object": "bad_value",
    "int beyond floats": "bad_value",
    "junk": "error",
    "allocate": "error",
    "exit": "died",
    "sys.exit": "error",
    "kill": "died",
}
FOREVER = 600.0  # a reward_timeout that no good response on a loaded machine reaches


def drain(pool, seconds=120):
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
    args = RewardArgs(reward=bad_reward, reward_timeout=FOREVER, reward_workers=2, reward_memory_limit_gb=0.5)
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
        assert pool.events == {"error": 4, "bad_value": 4, "died": 2}
        assert "ValueError: no way" in results[("bad", "raise")].message and "mine.py:" in results[("bad", "raise")].message
        assert "was killed by SIGKILL" in results[("bad", "kill")].message
        assert "exited with code 3" in results[("bad", "exit")].message
        assert pool.last_message.keys() == pool.events.keys()


def test_a_reward_that_hangs_costs_its_own_response_only(bad_reward):
    """Each good response is its process's first, and may take its time on a loaded machine."""
    with ScoringPool(RewardArgs(reward=bad_reward, reward_timeout=0.5)) as pool:
        pool.first_calls.append(FOREVER)
        for number, text in enumerate(["fine", "hang", "fine", "hang hard", "fine"]):
            pool.submit(number, "any", text, str(number), {"n": 0})
        results = drain(pool)
    assert {number: score.score for number, score in results.items() if not score.event} == {0: 0, 2: 2, 4: 4}
    assert {results[n].error for n in (1, 3)} == {"timeout: no score after 0.5 s (--reward-timeout)"}
    assert pool.events == {"timeout": 2}


def test_a_process_that_is_too_slow_goes_with_what_it_has_forked(bad_reward):
    with ScoringPool(RewardArgs(reward=bad_reward, reward_timeout=FOREVER)) as pool:
        pool.submit(0, "any", "fine", "1", {"n": 0})
        results = drain(pool)
        pool.submit(1, "any", "fork", "1", {"n": 0})
        child = int(word_in(Path(bad_reward.removesuffix(":score") + ".forked")))
        os.kill(child, 0)
        pool.args.reward_timeout = 0.1
        results |= drain(pool)
        assert (results[0].event, results[1].event) == (None, "timeout")
        wait_until_gone(child)


def test_cpu_time_is_limited_response_by_response(tmp_path):
    """Two spinning threads use one second of CPU time in about half a second. The time of earlier responses does not count."""
    (tmp_path / "mine.py").write_text("""
import hashlib, threading
def spin(times):
    data = bytes(1 << 20)
    for _ in range(times): hashlib.sha256(data)  # without Python's lock
def score(data_source, solution_str, ground_truth, extra_info):
    threads = [threading.Thread(target=spin, args=(int(solution_str),)) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return 1.0
""")
    with ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score", reward_timeout=60, reward_cpu_limit=1)) as pool:
        for number in range(8):
            pool.submit(number, "any", "50", "1", None)  # 2 x 50 MB, some 0.3 s of CPU time
        pool.submit("bad", "any", "1000000", "1", None)
        results = drain(pool)
        assert results.pop("bad").message == "no score within the CPU time of --reward-cpu-limit"
        assert all(score.score == 1 for score in results.values()) and pool.events == {"timeout": 1}


def test_a_first_call_may_import_and_the_next_process_has_the_time_for_it_too(tmp_path):
    """Without this time, one process after the other would begin the import in the function forever."""
    (tmp_path / "mine.py").write_text("""
import os, time
imported = False
def score(data_source, solution_str, ground_truth, extra_info):
    global imported
    if not imported: time.sleep(0.8)
    imported = True
    if solution_str == "hang": time.sleep(1000)
    return 1.0
""")
    with ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score", reward_timeout=0.5)) as pool:
        pool.submit(0, "any", "fine", "1", None)
        results = drain(pool)
        assert max(pool.first_calls) >= 0.8
        pool.first_calls.append(FOREVER)  # as if it had taken so long: the machine may be slower later
        for number, text in enumerate(["hang", "fine", "hang", "fine"], 1):
            pool.submit(number, "any", text, "1", None)
        results |= drain(pool)
    assert {number: score.event for number, score in results.items() if score.event} == {1: "timeout", 3: "timeout"}
    assert [results[n].score for n in (0, 2, 4)] == [1, 1, 1]


def test_a_function_that_only_ends_its_processes_ends_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("import os\ndef score(**_): os._exit(3)\n")
    with ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score")) as pool:
        for number in range(100):
            pool.submit(number, "any", "x", "1", None)
        with pytest.raises(UserError, match=r"16 scoring processes were lost before anything was scored.*exited with code 3"):
            drain(pool)


def test_a_function_that_never_returns_costs_its_first_call_the_time_of_an_import_only_once(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.rewards.lane.FIRST_CALL", 1)
    (tmp_path / "mine.py").write_text("import time\ndef score(**_): time.sleep(1000)\n")
    with ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score", reward_timeout=0.1)) as pool:
        for number in range(3):
            pool.submit(number, "any", "x", "1", None)
        assert {score.error for score in drain(pool).values()} == {"timeout: no score after 0.1 s (--reward-timeout)"}
        assert pool.first_calls == [0.0] * 3


def test_a_second_answer_ends_the_process_not_the_run(bad_reward):
    with ScoringPool(RewardArgs(reward=bad_reward)) as pool:
        pool.submit("bad", "any", "second answer", "1", {"n": 0})
        results = drain(pool)
        pool.submit("good", "any", "fine", "0.25", {"n": 0})
        results |= drain(pool)
        assert results["good"].score == 0.25 and pool.events == {"error": 1}


def test_a_function_that_forks_and_returns_twice_answers_once(bad_reward):
    """A second answer would count for the next response."""
    with ScoringPool(RewardArgs(reward=bad_reward)) as pool:
        for number in range(20):
            pool.submit(number, "any", "fork twice", str(number), {"n": number})
        assert {key: score.score for key, score in drain(pool).items()} == {n: float(n) for n in range(20)}
        assert not pool.events


def test_a_queued_response_does_not_wait_behind_a_hanging_one(bad_reward):
    with ScoringPool(RewardArgs(reward=bad_reward, reward_timeout=60, reward_workers=2)) as pool:
        pool.submit("bad", "any", "hang", "1", {"n": 0})
        pool.submit("good", "any", "fine", "1", {"n": 0})
        assert [key for key, _ in pool.wait(30)] == ["good"]


def test_workers_are_light():
    code = "import sys, rl.rewards.worker; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.strip() == "[]"


CTRL_C = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
os.kill(os.getpid(), signal.SIGINT)
time.sleep(1000)
"""
ENDS = {"returns": ("", 0), "Ctrl-C": (CTRL_C, -signal.SIGINT)}


@pytest.mark.parametrize("end", ENDS)
def test_workers_and_their_children_go_when_the_rank_ends(end, tmp_path):
    """It ends without close(), with a response under way that takes for ever; a fork of it has ended before, harming nobody."""
    how, code = ENDS[end]
    (tmp_path / "mine.py").write_text("""
import subprocess, time
def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang": time.sleep(1000)
    return {"score": 1, "pid": subprocess.Popen(["sleep", "1000"]).pid}
""")
    program = f"""
import os, signal, sys, time
from rl.rewards.pool import RewardArgs, ScoringPool
pool = ScoringPool(RewardArgs(reward={str(tmp_path / "mine.py") + ":score"!r}, reward_timeout={FOREVER}))
if (fork := os.fork()) == 0:
    sys.exit()
assert os.waitpid(fork, 0)[1] == 0
pool.submit(0, "any", "x", "1", None)
print(int(pool.wait(120)[0][1].extra["pid"]), flush=True)
pool.submit(1, "any", "hang", "1", None)
{how}
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    wait_until_gone(int(done.stdout))


def test_workers_die_with_a_killed_rank(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, time\ndef score(solution_str, **_):\n    "
        "open(solution_str, 'w').write(f'{os.getpid()} '); time.sleep(1000)\n"
    )
    code = f"""
import time
from rl.rewards.pool import RewardArgs, ScoringPool
pool = ScoringPool(RewardArgs(reward={str(tmp_path / "mine.py") + ":score"!r}))
pool.submit(0, "any", {str(tmp_path / "pid")!r}, "1", None)
time.sleep(1000)
"""
    rank = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    worker = int(word_in(tmp_path / "pid"))
    os.kill(worker, 0)
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    wait_until_gone(worker)


def word_in(file: Path) -> str:
    """Wait until the file has a word and the character that ends it."""
    deadline = time.monotonic() + 120
    while not file.exists() or not (text := file.read_text()).endswith(" "):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return text


def wait_until_gone(pid, seconds=60):
    deadline = time.monotonic() + seconds
    while state(pid) != "Z":
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.05)


def state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_math_goes_through_the_pool_and_numpy_through_json():
    import numpy as np

    with ScoringPool(RewardArgs()) as pool:
        pool.submit("a", "math", r"\boxed{\frac{1}{2}}", "0.5", {"array": np.arange(3), "n": np.int64(4)})
        pool.submit("b", "demo", "46", "46", None)
        results = drain(pool)
    assert results["a"].score == results["b"].score == 1.0


def test_submit_and_poll_never_block(bad_reward):
    """The first one hangs until its time is up, at which poll would return it: all have been submitted before."""
    with ScoringPool(RewardArgs(reward=bad_reward, reward_timeout=60)) as pool:
        for number in range(200):
            pool.submit(number, "any", "hang", "1", {"text": "x" * 10_000})
            assert pool.poll() == []
        assert pool.pending == 200


UNLOADABLE = {
    "absent": ("mine.py:score", None, r"there is no file .*mine\.py"),
    "no function": ("mine.py:scor", "def score(): pass", "has no function 'scor'"),
    "import raises": ("mine.py:score", "import nothing_of_that_name", r"No module named 'nothing_of_that_name'.*mine\.py:1"),
    "syntax": ("mine.py:score", "def score(:", "SyntaxError"),
    "no colon": ("mine.py", "def score(): pass", r"file\.py:function"),
    "signature": (
        "mine.py:score",
        "def score(text): return 1.0",
        r"score\(text\) cannot be called with data_source, solution_str",
    ),
    "one argument too many": ("mine.py:score", "def score(n, **_): return 1.0", r"missing a required argument: 'n'"),
    "dies": ("mine.py:score", "import os; os._exit(1)", "--reward .*does not work: the scoring process exited with code 1"),
    "import over the memory limit": ("mine.py:score", "x = bytearray(1 << 34)", "--reward .*MemoryError.*mine.py:1"),
}


@pytest.mark.parametrize("case", UNLOADABLE)
def test_a_reward_that_cannot_be_loaded(case, tmp_path):
    spec, text, message = UNLOADABLE[case]
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    args = RewardArgs(reward=str(tmp_path / spec))
    with pytest.raises(UserError, match=message):
        check(args)
        ScoringPool(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"reward_workers": 0}, "--reward-workers must be from 1"),
        ({"reward_timeout": 0.0}, "--reward-timeout must be above 0"),
        ({"reward_cpu_limit": -1.0}, "--reward-cpu-limit must be from 0"),
        ({"reward_memory_limit_gb": -1.0}, "--reward-memory-limit-gb must be from 0"),
        ({"overlong_buffer_len": -1}, "--overlong-buffer-len must be at least 0"),
    ],
)
def test_impossible_settings(flags, message):
    with pytest.raises(UserError, match=message):
        check(RewardArgs(**flags))


def test_an_unknown_source_is_named():
    with pytest.raises(UserError, match=r"a\.parquet row 7.*'my/data'.*--reward.*openai/gsm8k"):
        check_sources({"demo": "a.parquet row 0", "my/data": "a.parquet row 7"}, RewardArgs())
    check_sources(dict.fromkeys([*BUILT_IN, "aime24", "aime_2025"], "x"), RewardArgs())
    check_sources({"my/data": "x"}, RewardArgs(reward="mine.py:score"))
    with ScoringPool(RewardArgs()) as pool, pytest.raises(UserError, match="'my/data'"):
        pool.submit(0, "my/data", "x", "1", None)
