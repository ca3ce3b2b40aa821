"""The scoring pool, tested with reward functions that do everything a reward function should not. Text from a model or a
user's function reaches no terminal with control characters."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, cpu_limit, eventually, train

from rl import printable
from rl.errors import UserError
from rl.ranges import check
from rl.rewards import scorers
from rl.rewards.args import CODE
from rl.rewards.pool import RewardArgs, ScoringPool, check_sources
from rl.rewards.score import BUILT_IN, Score, as_score, overlong_penalty, verifier
from user_processes import scoring

pytestmark = pytest.mark.timeout(200)
FOREVER = 600.0  # a reward_timeout that no good response on a loaded machine reaches

REWARD = """
import asyncio, ctypes, multiprocessing, os, pathlib, signal, subprocess, sys, time
print("printing at import must not disturb the answers")
here = pathlib.Path(__file__).parent

def later(act):
    while not (here / "open").exists(): time.sleep(0.01)
    act()

def do_it(do):
    print("nor printing here")
    if do == "raise": raise ValueError("no\\nway")
    if do == "nan": return float("nan")
    if do == "string": return "good"
    if do == "object": return {"score": object()}
    if do == "int beyond floats": return 10**400
    if do == "allocate":
        hold = []
        while True: hold.append(bytearray(1 << 26))
    if do == "exit": os._exit(3)
    if do == "sys.exit": sys.exit(0)
    if do == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if do == "realtime": os.kill(os.getpid(), signal.SIGRTMIN + 1)
    if do == "base": raise BaseException
    if do == "named": error = ValueError("own"); error.event = "image of mine"; raise error

def score(data_source, solution_str, ground_truth, extra_info):
    do = solution_str
    if (bad := do_it(do)) is not None: return bad
    if do == "wait": later(lambda: None)
    if do == "touch": (here / "touched").touch()
    if do == "hang": time.sleep(1000)
    if do == "hang hard":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL})
        ctypes.CDLL(None).sleep(1000)
    if do == "processes":
        with multiprocessing.get_context("fork").Pool(2) as pool: return sum(pool.map(int, "123"))
    if do == "fork":
        (here / "forked").write_text(f"{subprocess.Popen(['sleep', '1000']).pid} ")
        time.sleep(1000)
    return {"score": float(ground_truth), "length": len(do), "pid": os.getpid()}

async def in_a_loop(data_source, solution_str, ground_truth, extra_info):
    do = solution_str
    if (bad := do_it(do)) is not None: return bad
    if do == "hang": await asyncio.sleep(1000)
    if do == "swallow":
        for _ in range(2):
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if do == "cancel": raise asyncio.CancelledError
    if do == "block": time.sleep(1000)
    return {"score": float(ground_truth), "length": len(do), "pid": os.getpid()}
"""
EVENTS = {
    **dict.fromkeys(("raise", "allocate", "sys.exit", "base", "named"), "error"),
    **dict.fromkeys(("nan", "string", "object", "int beyond floats"), "bad_value"),
    **dict.fromkeys(("exit", "kill", "realtime"), "died"),
}


@pytest.fixture
def mine(tmp_path) -> str:
    """The start of --reward for a function of REWARD."""
    (tmp_path / "mine.py").write_text(REWARD)
    return f"{tmp_path / 'mine.py'}:"


def make_pool(spec: str, timeout: float = FOREVER, workers: int = 1) -> ScoringPool:
    return ScoringPool(RewardArgs(reward=spec, reward_timeout=timeout, reward_workers=workers))


def submit(pool: ScoringPool, *texts: str) -> None:
    """The key and the truth of each text are its place."""
    for number, text in enumerate(texts):
        pool.submit(number, "any", text, str(number), None)


def drain(pool: ScoringPool, left: int = 0) -> dict:
    """Score until this many responses are pending. Each key arrives once."""
    results, deadline = [], time.monotonic() + 120
    while pool.pending > left and time.monotonic() < deadline:
        results += pool.wait(1.0)
    assert pool.pending == left and len(dict(results)) == len(results)
    return dict(results)


def is_gone(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may end between the opening and the reading
        return True


# ------------------------------------------------------------------------------------------------------------- values


def test_overlong_penalty():
    # L_max 100, buffer 20, penalty 0.5: nothing up to 80, half of it at 90, all of it at 100
    assert [overlong_penalty(n, 100, 20, 0.5) for n in (1, 80, 90, 100)] == [0, 0, -0.25, -0.5]
    assert overlong_penalty(100, 100, 0, 0.5) == 0


def test_what_is_a_score():
    for value in (float("nan"), float("inf"), 10**400, 1e39, -1e300, {"score": 1e300}, "1", "x" * 10**6, None, [1], {"acc": 1}):
        score = as_score(value)
        assert score.event == "bad_value" and score.score is None and "finite number" in score.message
        assert len(score.message) < 300
    for value in (3e38, -3e38, -1e9, 1e-300):
        assert as_score(value).score == value and torch.tensor([value], dtype=torch.float32).isfinite().all()
    assert as_score(True).score == 1 and as_score({"score": 0.5, "acc": 1, "note": "x"}).extra == {"acc": 1.0}


# ------------------------------------------------------------------------------- a function that fails costs its response


@pytest.mark.parametrize("name", ["score", "in_a_loop"])
def test_a_bad_response_costs_itself(mine, name, monkeypatch):
    monkeypatch.setattr(scorers, "MEMORY", 1 << 29)
    texts = [text for bad in EVENTS for text in ("fine", bad)]
    with make_pool(mine + name, workers=2) as pool:
        submit(pool, *texts)
        results = drain(pool)
    assert {texts[n]: score.event for n, score in results.items() if texts[n] != "fine"} == EVENTS
    for number in range(0, len(texts), 2):
        its = results[number]
        assert (its.score, its.extra["length"], its.event) == (number, 4, None)
    assert pool.events == {"error": 5, "bad_value": 4, "died": 3} and pool.last_message.keys() == pool.events.keys()
    message = {text: results[number].message for number, text in enumerate(texts)}
    assert message["raise"].startswith("ValueError: no way (") and "mine.py:" in message["raise"]
    assert message["exit"] == "its process exited with code 3" and "was killed by SIGKILL" in message["kill"]
    assert message["realtime"] == f"its process was killed by signal {signal.SIGRTMIN + 1}"


@pytest.mark.slow
def test_a_response_that_hangs_costs_itself(mine):
    with make_pool(f"{mine}score", timeout=1.0) as pool:
        submit(pool, "fine", "hang", "fine", "hang hard", "fine")
        results = drain(pool)
    assert {number: score.score for number, score in results.items() if not score.event} == {0: 0, 2: 2, 4: 4}
    assert {results[n].error for n in (1, 3)} == {"timeout: no score after 1 s (--reward-timeout)"}
    assert pool.events == {"timeout": 2}


@pytest.mark.slow
def test_an_async_response_that_hangs_is_cancelled_and_one_that_blocks_the_loop_costs_itself(mine):
    with make_pool(f"{mine}in_a_loop", timeout=2.0) as pool:
        submit(pool, "fine")
        first = drain(pool)[0].extra["pid"]
        submit(pool, "hang", "swallow", "cancel", "fine")
        results = drain(pool)
        assert {n: score.event for n, score in results.items() if score.event} == {0: "timeout", 1: "timeout", 2: "error"}
        assert results[0].error == "timeout: no score after 2 s (--reward-timeout)" and results[3].extra["pid"] == first
        submit(pool, "fine", "block", "fine")
        results = drain(pool)
    assert {n: score.event for n, score in results.items()} == {0: None, 1: "timeout", 2: None}
    assert results[1].message == scoring.BLOCKED


CROWD = """
import asyncio
crowd, inside, most = asyncio.Barrier(16), 0, 0
class Async:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 0.5
of_a_class = Async()
async def score(data_source, solution_str, ground_truth, extra_info):
    global inside, most
    if solution_str == "crowd": await crowd.wait()
    inside += 1
    most = max(most, inside)
    await asyncio.sleep(0.01)
    inside -= 1
    return {"score": float(ground_truth), "most": most}
"""


def test_an_async_function_works_on_many_responses_at_once(tmp_path):
    """None of 16 returns before all have begun; and there are never more than AT_ONCE. Long ones pass through the pipes."""
    (tmp_path / "mine.py").write_text(CROWD)
    with make_pool(f"{tmp_path / 'mine.py'}:score") as pool:
        submit(pool, *["crowd"] * 16, *["x" * 3000] * 500)
        results = drain(pool)
    assert [results[number].score for number in range(516)] == list(range(516)) and not pool.events
    assert 16 <= max(score.extra["most"] for score in results.values()) <= scoring.AT_ONCE
    with make_pool(f"{tmp_path / 'mine.py'}:of_a_class") as pool:
        submit(pool, "x")
        assert drain(pool)[0].score == 0.5


def test_a_queued_response_does_not_wait_behind_a_slow_one(mine, tmp_path):
    with make_pool(f"{mine}score", workers=2) as pool:
        submit(pool, "wait", *["fine"] * 40)
        assert drain(pool, left=1).keys() == set(range(1, 41))
        (tmp_path / "open").touch()
        assert drain(pool)[0].score == 0 and not pool.events


def test_scoring_continues_while_the_rank_does_not_look(mine, tmp_path):
    """An engine step may be long. `submit` and `poll` never block; an item may be longer than a pipe."""
    with make_pool(f"{mine}score") as pool:
        pool.submit(0, "any", "fine", "0", {"text": "x" * 4_000_000})
        for number in range(1, 200):
            pool.submit(number, "any", "fine" if number < 199 else "touch", str(number), {"text": "x" * 10_000})
        square = torch.eye(300)  # the rank computes meanwhile
        assert eventually(lambda: (square @ square).any() and (tmp_path / "touched").exists(), 120)
        assert {key: score.score for key, score in drain(pool).items()} == {number: number for number in range(200)}
        for number in range(200):
            pool.submit(number, "any", "hang", "1", {"text": "x" * 10_000})
            assert pool.wait() == []


def test_a_function_may_start_processes(mine):
    with make_pool(f"{mine}score") as pool:
        submit(pool, "processes")
        assert drain(pool)[0].score == 6


SEVERAL = """
import asyncio

def right(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "acc": float(solution_str == ground_truth)}

async def short(solution_str, prompt, step, split, **_):
    await asyncio.sleep(0.01)
    return -len(solution_str) * len(prompt) * step * (split == "train")

def nothing(**_):
    return None
"""


def test_several_functions_are_added_up_and_each_is_a_metric(tmp_path):
    (tmp_path / "several.py").write_text(SEVERAL)
    spec = f"{tmp_path / 'several.py'}:right,short"
    for weights, score in (((), 1 - 4), ((2.0, 0.5), 2 - 2)):
        with ScoringPool(RewardArgs(reward=spec, reward_weights=weights)) as pool:
            pool.submit(0, "any", "12", "12", None, prompt=[{"role": "user", "content": "?"}], step=2, split="train")
            assert drain(pool)[0] == Score(float(score), {"right": 1.0, "acc": 1.0, "short": -4.0})
            pool.submit(1, "any", "12", "12", None, prompt="?", step=2, split="val")
            assert drain(pool)[1].extra["short"] == 0
    with make_pool(f"{tmp_path / 'several.py'}:right,nothing") as pool:
        submit(pool, "x")
        assert drain(pool)[0].error == "bad_value: nothing returned None, not a number"
    with ScoringPool(RewardArgs(reward=f"{tmp_path / 'several.py'}:right", reward_weights=(3.0,))) as pool:
        pool.submit(0, "any", "12", "12", None)
        assert drain(pool)[0].score == 3
    with pytest.raises(UserError, match="--reward-weights has 1 weights, and --reward names 2 functions"):
        RewardArgs(reward=spec, reward_weights=(1.0,)).check(None)


@pytest.mark.runs
def test_a_reward_function_gets_the_step_and_the_split(tmp_path):
    """The step of the weights that sampled."""
    (tmp_path / "mine.py").write_text(
        "def at(step, split, **_): return 100 * (split == 'val') + step\n\ndef one(**_): return 1\n"
    )
    flags = ["--total-training-steps", 2, "--test-freq", 1, "--reward", f"{tmp_path}/mine.py:at,one"]
    metrics, _, _ = train("train_sync.py", *flags, "--reward-weights", 1, 10, out=tmp_path / "runs")
    assert [metrics[step]["critic/score/mean"] for step in (1, 2)] == [10, 11]
    assert [metrics[step]["reward/extra/at/mean"] for step in (1, 2)] == [0, 1]
    assert [metrics[step]["val-core/demo/acc/mean@1"] for step in (0, 1, 2)] == [110, 111, 112]
    assert metrics[2]["val-aux/demo/one/mean@1"] == 1


# -------------------------------------------------------------------------------------------------- the start and the end

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
    "dies": ("mine.py:score", "import os; os._exit(1)", "--reward .*does not work: its process exited with code 1"),
    "over the memory limit": ("mine.py:score", "x = bytearray(1 << 36)", r"--reward .*MemoryError.*mine.py:1"),
    "escapes": ("mine.py:score", r"raise ImportError('\x1b]0;title\x07')", r"ImportError: \\x1b\]0;title\\x07 \("),
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


def test_the_end_of_the_parent_process_is_an_error(mine):
    with make_pool(f"{mine}score") as pool:
        os.kill(pool._scorers._server.pid, signal.SIGKILL)
        submit(pool, "fine")
        with pytest.raises(UserError, match="the process that starts the scoring processes has ended"):
            drain(pool)


def test_an_unknown_source_is_named():
    with pytest.raises(UserError, match=r"a\.parquet row 7.*'my/data'.*--reward.*openai/gsm8k"):
        check_sources({"demo": "a.parquet row 0", "my/data": "a.parquet row 7"}, RewardArgs())
    check_sources(dict.fromkeys([source for source in BUILT_IN if BUILT_IN[source] != CODE] + ["aime_2025"], "x"), RewardArgs())
    check_sources({"my/data": "x"}, RewardArgs(reward="mine.py:score"))
    with ScoringPool(RewardArgs()) as pool, pytest.raises(UserError, match="'my/data'"):
        pool.submit(0, "my/data", "x", "1", None)


ENDS = {
    "close": ("pool.close()", 0),
    "returns": ("", 0),
    "Ctrl-C": ("signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_processes_and_what_they_start_end_with_the_rank(end, mine, tmp_path):
    """A response is under way that takes for ever. A fork of the rank has ended before, harming nobody."""
    how, expected = ENDS[end]
    program = f"""
import os, signal, sys, time
from pathlib import Path
from rl.rewards.pool import RewardArgs, ScoringPool
pool = ScoringPool(RewardArgs(reward={mine + "score"!r}, reward_timeout={FOREVER}))
if (fork := os.fork()) == 0:
    sys.exit()
assert os.waitpid(fork, 0)[1] == 0
pool.submit(0, "any", "fine", "1", None)
print(int(pool.wait(120)[0][1].extra["pid"]), flush=True)
pool.submit(1, "any", "fork", "1", None)
while not Path({str(tmp_path / "forked")!r}).exists(): time.sleep(0.01)
{how}
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == expected, done.stderr
    assert eventually(lambda: is_gone(int(done.stdout)))
    forked = tmp_path / "forked"
    assert eventually(lambda: forked.exists() and forked.read_text().endswith(" "))
    assert eventually(lambda: is_gone(int(forked.read_text())))


# --------------------------------------------------------------------------------------- what a function sees and prints


def test_the_job_s_variables_are_kept_from_the_function(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("""
import os
def score(solution_str, **_): return {"score": 1.0, **{name: float(name in os.environ) for name in solution_str.split()}}
""")
    job = ["MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"]
    for name in (*job, "MY_KEY"):
        monkeypatch.setenv(name, "1")
    with make_pool(f"{tmp_path / 'mine.py'}:score") as pool:
        submit(pool, " ".join([*job, "MY_KEY"]))
        assert {name for name, seen in drain(pool)[0].extra.items() if seen} == {"MY_KEY"}


RAW = "bad \x1b]0;title\x07\x1b[2J \r\x08\x7f\x9b31m\u202e end\nof it"


def test_control_characters_are_written_out():
    text = printable.one_line(RAW)
    assert text == r"bad \x1b]0;title\x07\x1b[2J  \x08\x7f\x9b31m\u202e end of it"
    assert printable.printable("a\tb\nc\x1b") == "a\tb\nc\\x1b" and printable.printable("für 10 € ✓ 数") == "für 10 € ✓ 数"


def test_the_console_and_error_messages_write_control_characters_out(capsys, monkeypatch):
    from rl.ranks import process, stops
    from rl.record.run import ConsoleLog

    ConsoleLog(10).say(RAW)
    said = capsys.readouterr().out
    monkeypatch.setattr(process.os, "_exit", lambda code: None)
    monkeypatch.setattr(stops, "record", lambda _: (True, True))
    process.fail(UserError(RAW))
    for text in (said, capsys.readouterr().err):
        assert "title" in text and text.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "act", ["raise ValueError(text)", "return text", "return {'score': text}", "sys.exit(text)", "raise E(text)"]
)
def test_what_a_function_says_reaches_no_terminal_raw(act, tmp_path):
    (tmp_path / "mine.py").write_text(
        f"import sys\nclass E(Exception): pass\ndef score(solution_str, **_):\n    text = solution_str\n    {act}\n"
    )
    with make_pool(f"{tmp_path / 'mine.py'}:score") as pool:
        submit(pool, RAW)
        score = drain(pool)[0]
        assert score.event and score.message.isprintable() and "title" in score.message
        assert all(text.isprintable() for text in pool.last_message.values())


# ------------------------------------------------------------------------------------------------------ built-in graders


@pytest.mark.parametrize(("source", "worst"), [("lighteval/MATH", 0.0), ("math_dapo", -1.0), ("aime", -1.0), ("geo3k", 0.0)])
def test_an_answer_that_a_built_in_grader_cannot_finish_is_wrong(source, worst):
    """A policy that learns to hang the grader would be let off with a masked response."""
    item = {"data_source": source, "solution_str": "hang", "ground_truth": "5", "extra_info": None}
    for event in ("timeout", "error"):
        assert scorers.score_of({"message": "", "event": event}, item, RewardArgs()).score == worst
    assert scorers.score_of({"message": "x", "event": "died"}, item, RewardArgs()).error == "died: x"


def test_no_answer_has_the_lowest_score_of_every_built_in_grader():
    for source in BUILT_IN:
        grader = verifier(source)
        value = grader(source, "", "5")
        if BUILT_IN[source] == CODE:  # an answer that it tests wants a sandbox
            assert value["score"] == 0
            continue
        wrong = grader(source, "#### 4 \\boxed{4} Answer: 4", "5")
        assert (value["score"], wrong["score"]) == (wrong["score"],) * 2 if isinstance(value, dict) else value == wrong == 0


def test_mathematics_goes_through_the_pool_and_numpy_through_json():
    with cpu_limit(20), ScoringPool(RewardArgs(reward_timeout=FOREVER)) as pool:
        for number, unit in enumerate(["(", "½", "|", "x=", r"\sqrt", "9^{"]):
            pool.submit(number, "math_dapo", rf"so \boxed{{{unit * 1000}}}", "5")
        assert {score.score for score in drain(pool).values()} == {-1.0} and not pool.events
        pool.submit("a", "math", r"\boxed{\frac{1}{2}}", "0.5", {"array": np.arange(3), "n": np.int64(4)})
        pool.submit("b", "demo", "46", "46", None)
        results = drain(pool)
    assert results["a"].score == results["b"].score == 1.0
