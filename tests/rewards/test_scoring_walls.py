"""A reward function cannot keep processes alive, read the job's secrets by accident, write to the terminal, or end the run
when it crashes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, cpu_limit
from test_scoring import FOREVER, drain, wait_until_gone, word_in

from rl import printable
from rl.errors import UserError
from rl.rewards.environment import reward_environment
from rl.rewards.pool import RewardArgs, ScoringPool
from rl.rewards.process import Lost, ScoringProcess
from rl.rewards.verifiers import BUILT_IN, code

pytestmark = pytest.mark.timeout(300)

ESCAPES = """
import os, subprocess, sys, time
def score(data_source, solution_str, ground_truth, extra_info):
    how, file = solution_str.split(" ", 1)
    if how == "session":
        pid = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
    if how == "ignoring":
        command = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"
        child = subprocess.Popen([sys.executable, "-c", command], start_new_session=True, stdout=subprocess.PIPE)
        child.stdout.read(1)
        pid = child.pid
    if how == "daemon":
        if os.fork() == 0:
            os.setsid()
            daemon = os.fork()
            if daemon:
                os._exit(0)
            with open(file, "w") as out: out.write(f"{os.getpid()} ")
            time.sleep(1000)
        os.wait()
        while not os.path.exists(file) or not open(file).read(): time.sleep(0.01)  # before it may be killed
    else:
        with open(file, "w") as out: out.write(f"{pid} ")
    if ground_truth == "hang": time.sleep(1000)
    if ground_truth == "die": os._exit(3)
    if ground_truth == "kill": os.kill(os.getpid(), 9)
    return 1.0
"""
HOW = ["session", "ignoring", "daemon"]


@pytest.fixture
def escaping(tmp_path):
    (tmp_path / "mine.py").write_text(ESCAPES)
    return f"{tmp_path / 'mine.py'}:score"


@pytest.mark.parametrize("end", ["hang", "die", "kill", "close"])
@pytest.mark.parametrize("how", HOW)
def test_what_a_function_starts_ends_with_its_process(how, end, escaping, tmp_path):
    file = tmp_path / "pid"
    with ScoringPool(RewardArgs(reward=escaping, reward_timeout=FOREVER)) as pool:
        pool.submit(0, "any", f"{how} {file}", end, None)
        child = int(word_in(file))
        if end == "hang":
            os.kill(child, 0)
            pool.first_calls.append(0.0)
            pool.args.reward_timeout = 0.1
        event = drain(pool)[0].event
        assert event == {"hang": "timeout", "die": "died", "kill": "died", "close": None}[end]
        if end != "close":
            wait_until_gone(child)
    wait_until_gone(child)


def test_what_a_function_starts_ends_though_its_guard_was_killed(tmp_path):
    """The system may kill the guard, for example when memory is short."""
    (tmp_path / "mine.py").write_text("""
import os, subprocess, time
def score(solution_str, **_):
    child = subprocess.Popen(["sleep", "1000"])
    open(solution_str, "w").write(f"{child.pid} ")
    os.kill(os.getppid(), 9)
    time.sleep(1000)
""")
    with ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score", reward_timeout=FOREVER)) as pool:
        pool.submit(0, "any", str(tmp_path / "pid"), "1", None)
        child = int(word_in(tmp_path / "pid"))
        score = drain(pool)[0]
        assert score.event == "died" and "was killed by SIGKILL" in score.message
        wait_until_gone(child)


@pytest.mark.parametrize("how", HOW)
def test_what_a_function_starts_ends_with_a_killed_rank(how, escaping, tmp_path):
    code = f"""
import time
from rl.rewards.pool import RewardArgs, ScoringPool
pool = ScoringPool(RewardArgs(reward={escaping!r}))
pool.submit(0, "any", {f"{how} {tmp_path / 'pid'}"!r}, "hang", None)
time.sleep(1000)
"""
    rank = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    child = int(word_in(tmp_path / "pid"))
    os.kill(child, 0)
    rank.kill()
    rank.wait()
    wait_until_gone(child)


def test_processes_that_fork_while_they_are_killed_all_end(tmp_path):
    (tmp_path / "mine.py").write_text("""
import os, time
def breed(depth):
    while True:
        if os.fork() == 0:
            os.setsid()
            if depth < 3: breed(depth + 1)
            time.sleep(1000)
        time.sleep(0.02)
        if len(os.listdir("/proc")) > 2000: time.sleep(1000)
def score(data_source, solution_str, ground_truth, extra_info):
    if os.fork() == 0: breed(0)
    time.sleep(0.5)
    open(solution_str, "w").write(f"{os.getpid()} ")
    time.sleep(1000)
""")
    with ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score", reward_timeout=FOREVER)) as pool:
        pool.submit(0, "any", str(tmp_path / "pid"), "1", None)
        word_in(tmp_path / "pid")
    marks = [file for file in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _bytes(file)]
    assert not marks


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    "number", [*range(signal.SIGRTMIN, signal.SIGRTMAX + 1, 7), signal.SIGRTMAX, signal.SIGSEGV, signal.SIGTERM]
)
def test_a_process_that_any_signal_ends_is_an_event(number, tmp_path):
    """Python has no names for real-time signals: they ended the run."""
    (tmp_path / "mine.py").write_text("import os\ndef score(solution_str, **_): os.kill(os.getpid(), int(solution_str))\n")
    with ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score", reward_timeout=FOREVER)) as pool:
        pool.submit(0, "any", str(int(number)), "1", None)
        score = drain(pool)[0]
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    assert score.event == "died" and f"was killed by {name}" in score.message


@pytest.mark.parametrize("code", [1, 100, 255])
def test_an_exit_code_is_no_signal(code, tmp_path):
    """exit(-1) of a native library is 255."""
    (tmp_path / "mine.py").write_text("import os\ndef score(solution_str, **_): os._exit(int(solution_str))\n")
    with ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score", reward_timeout=FOREVER)) as pool:
        pool.submit(0, "any", str(code), "1", None)
        score = drain(pool)[0]
    assert score.event == "died" and f"exited with code {code}" in score.message


# ------------------------------------------------------------------------------------------------ the environment

SECRETS = [
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_PROFILE",
    "MY_PASSWORD",
    "db_passwd",
    "SERVICE_CREDENTIALS",
]
SECRETS += [
    "OPENAI_API_KEY",
    "SSH_AUTH_SOCK",
    "github_token",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "AZURE_CLIENT_ID",
    "Some_Secret_Thing",
]
OF_THE_JOB = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "GROUP_RANK",
]
KEPT = [
    "PATH",
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "MY_SETTING",
]


def test_secrets_and_the_job_are_kept_back_by_name():
    environment = dict.fromkeys([*SECRETS, *OF_THE_JOB, *KEPT], "value")
    assert reward_environment(environment).keys() == set(KEPT)
    assert reward_environment(environment, ["HF_TOKEN", "AWS_*"]).keys() == {
        *KEPT,
        "HF_TOKEN",
        "AWS_PROFILE",
        "AWS_SECRET_ACCESS_KEY",
    }
    assert reward_environment(environment, ["*"]) == environment


def test_a_url_with_a_password_is_kept_back():
    environment = {
        "https_proxy": "http://me:word@proxy:1",
        "STORE": "postgres://u:p@host/db",
        "http_proxy": "http://proxy:1",
        "X": "a:b@c",
    }
    assert reward_environment(environment).keys() == {"http_proxy", "X"}


def test_a_function_sees_only_what_it_is_given(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("""
import os
def score(solution_str, **_): return {"score": 1.0, **{name: float(name in os.environ) for name in solution_str.split()}}
""")
    for name in [*SECRETS, *OF_THE_JOB, "MY_SETTING"]:
        monkeypatch.setenv(name, "1")
    names = " ".join([*SECRETS, *OF_THE_JOB, "MY_SETTING"])
    for passed in ((), ("MY_PASSWORD", "MASTER_*")):
        with ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score", reward_env=passed)) as pool:
            pool.submit(0, "any", names, "1", None)
            extra = drain(pool)[0].extra
        seen = {name for name in names.split() if extra[name]}
        assert seen == ({"MY_SETTING"} if not passed else {"MY_SETTING", "MY_PASSWORD", "MASTER_ADDR", "MASTER_PORT"})


def test_a_variable_that_is_not_there_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("def score(**_): return 1.0\n")
    with pytest.raises(UserError, match="--reward-env NOT_SET_ANYWHERE: the environment has no variable"):
        ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score", reward_env=("NOT_SET_ANYWHERE",)))


# ------------------------------------------------------------------------------------------- what a terminal obeys

RAW = "bad \x1b]0;title\x07\x1b[2J \r\x08\x7f\x9b31m\u202e end\nof it"


def test_control_characters_are_written_out():
    text = printable.one_line(RAW)
    assert text == r"bad \x1b]0;title\x07\x1b[2J  \x08\x7f\x9b31m\u202e end of it"
    assert printable.printable("a\tb\nc\x1b") == "a\tb\nc\\x1b" and printable.printable("für 10 € ✓ 数") == "für 10 € ✓ 数"


@pytest.mark.parametrize(
    "act", ["raise ValueError(text)", "return text", "return {'score': text}", "sys.exit(text)", "raise E(text)"]
)
def test_what_a_function_says_reaches_no_terminal_raw(act, tmp_path):
    (tmp_path / "mine.py").write_text(
        f"import sys\nclass E(Exception): pass\ndef score(solution_str, **_):\n    text = solution_str\n    {act}\n"
    )
    with ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score", reward_timeout=FOREVER)) as pool:
        pool.submit(0, "any", RAW, "1", None)
        score = drain(pool)[0]
        assert score.event and score.message.isprintable() and "title" in score.message
        assert all(text.isprintable() for text in pool.last_message.values())


def test_a_file_that_cannot_be_imported_says_so_without_control_characters(tmp_path):
    (tmp_path / "mine.py").write_text(f"raise ImportError({RAW!r})")
    with pytest.raises(UserError) as error:
        ScoringPool(RewardArgs(reward=f"{tmp_path / 'mine.py'}:score"))
    assert str(error.value).isprintable() and "title" in str(error.value)


def test_lost_processes_are_described_without_control_characters():
    assert str(Lost("died", RAW)).isprintable()


# ------------------------------------------------------------------------------------------------ built-in graders


@pytest.mark.parametrize(("source", "worst"), [("lighteval/MATH", 0.0), ("math_dapo", -1.0), ("aime24", -1.0), ("geo3k", 0.0)])
def test_an_answer_that_keeps_a_built_in_grader_busy_is_wrong(source, worst, monkeypatch):
    """A policy that learns to hang the grader would be let off with a masked response."""

    def answers(item):
        if "spin" in item:
            raise Lost("timeout", "no score within the CPU time")
        return []

    replace_answers(monkeypatch, answers)
    with ScoringPool(RewardArgs(reward_timeout=0.1)) as pool:
        pool.first_calls.append(0.0)
        pool.submit("hang", source, "hang", "5")
        pool.submit("spin", source, "spin", "5")
        scores = drain(pool)
        assert {score.score for score in scores.values()} == {worst} and not pool.events
        assert all(score.event is None for score in scores.values())
        assert len(pool.lost) == 2


def replace_answers(monkeypatch, answers) -> None:
    """Replaces what a scoring process answers. answers: item -> replies."""
    items, exchange = {}, ScoringProcess.exchange

    def put(process, item, seconds):
        items[process] = item
        return 1

    monkeypatch.setattr(ScoringProcess, "put", put)
    monkeypatch.setattr(
        ScoringProcess, "exchange", lambda its, seconds: answers(items[its]) if its in items else exchange(its, seconds)
    )


def test_an_error_in_a_built_in_grader_is_a_wrong_answer(monkeypatch):
    replace_answers(monkeypatch, lambda item: [{"number": 1, "failed": "RecursionError", "event": "error"}])
    with ScoringPool(RewardArgs()) as pool:
        pool.submit(0, "math_dapo", "Answer: 5", "5")
        assert drain(pool)[0].score == -1


def test_no_answer_has_the_lowest_score_of_every_built_in_grader():
    for source, grader in BUILT_IN.items():
        value = grader(source, "", "5")
        if grader is code:  # an answer that it tests wants a sandbox
            assert value["score"] == 0
            continue
        wrong = grader(source, "#### 4 \\boxed{4} Answer: 4", "5")
        assert (value["score"], wrong["score"]) == (wrong["score"],) * 2 if isinstance(value, dict) else value == wrong == 0


def test_degenerate_answers_are_scored_wrong_by_the_pool():
    with cpu_limit(20), ScoringPool(RewardArgs(reward_timeout=FOREVER)) as pool:
        for number, unit in enumerate(["(", "½", "|", "x=", r"\sqrt", "9^{"]):
            pool.submit(number, "math_dapo", rf"so \boxed{{{unit * 1000}}}", "5")
        assert {score.score for score in drain(pool).values()} == {-1.0} and not pool.events


def test_the_console_and_error_messages_write_control_characters_out(capsys, monkeypatch):
    from rl.ranks import process, stops
    from rl.record.console import ConsoleLog

    ConsoleLog(10).say(RAW)
    said = capsys.readouterr().out
    monkeypatch.setattr(process.os, "_exit", lambda code: None)
    monkeypatch.setattr(stops, "record", lambda _: (True, True))
    process.fail(UserError(RAW))
    for text in (said, capsys.readouterr().err):
        assert "title" in text and text.replace("\n", "").isprintable()


def test_a_traceback_writes_control_characters_out(capsys, monkeypatch):
    from rl.ranks import process, stops

    monkeypatch.setattr(stops, "record", lambda _: (True, True))
    monkeypatch.setattr(stops, "cause", lambda wait: "")
    process._explain("learner 0", ValueError(RAW))
    text = capsys.readouterr().err
    assert "ValueError" in text and "title" in text and text.replace("\n", "").isprintable()


def test_torchruns_summary_has_no_control_characters(tmp_path, monkeypatch):
    from rl.ranks import stops

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    (tmp_path / "0").mkdir()
    stops.record(RAW)
    assert "\\\\x1b]0;title" in (tmp_path / "0" / "error.json").read_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "x") for name in ("DB_PASS", "SSHPASS", "MYSQL_PWD", "GH_PAT", "HUAWEICLOUD_SDK_AK", "OBS_SK", "SENTRY_DSN")),
        *((name, "x") for name in ("SLACK_WEBHOOK_URL", "SMTP_PASSWORD")),
        ("PIP_EXTRA_INDEX_URL", "https://ghp_x@host/simple"),
        ("STORE", "postgres://me:a/b@host/db"),
        ("STORE", "DefaultEndpointsProtocol=https;AccountKey=abc"),
    ],
)
def test_further_secrets_are_kept_back(name, value):
    plain = {"PWD": "/here", "OLDPWD": "/there", "PATH": "/bin", "LANG": "C", "PAGE": "https://host/a"}
    assert reward_environment({name: value, **plain}) == plain
