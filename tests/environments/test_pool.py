"""Processes of environments, real ones: what one does costs nobody else anything, none is left, prints are limited,
and secrets are hidden."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from families import end_tokens, tokenizer_of
from helpers import ROOT, environment, eventually, left_over
from processes import descendants

from rl.environments.args import EnvironmentArgs
from rl.environments.pool import Environments
from rl.errors import UserError
from user_processes import server
from user_processes.server import without_secrets

RUDE = Path(__file__).parent / "rude.py"


def environments(model: str, spec: str = f"{RUDE}:Rude", reward: str = "", **flags) -> Environments:
    args = EnvironmentArgs(env=spec, **{"env_timeout": 20.0} | flags)
    return Environments(args, model, end_tokens("qwen2_5"), reward=reward)


@pytest.fixture(scope="module")
def rude(model) -> Iterator[Environments]:
    os.environ["MY_TOKEN"] = os.environ["RANK"] = "secret"
    try:
        pool = environments(model)
    finally:
        del os.environ["MY_TOKEN"], os.environ["RANK"]
    assert pool.tools[""].schemas == [] and not pool.scores_at_end[""]
    yield pool
    pool.close()


def ids_of(text: str) -> list[int]:
    return tokenizer_of("qwen2_5")(text, add_special_tokens=False)["input_ids"]


def answers(pool: Environments, keys) -> dict:
    """The next answer of each key."""
    found, until = {}, time.monotonic() + 60
    while found.keys() < set(keys) and time.monotonic() < until:
        found |= dict(pool.poll(0.2))
    return found


def begin(pool: Environments, key, what: str, own_seed: int = 1, **row) -> dict:
    """The answer to an episode's reset."""
    pool.begin(key, {"ground_truth": what, "prompt": []} | row, seed=7, own_seed=own_seed)
    return answers(pool, [key])[key]


def played(pool: Environments, *whats: str) -> dict[str, dict]:
    """Each environment's answer to a first turn."""
    ready = {what: begin(pool, what, what) for what in whats}
    begun = [what for what in whats if "event" not in ready[what]]
    for what in begun:
        pool.ask(what, "step", ids=ids_of("hello<|im_end|>"))
    return ready | answers(pool, begun)


def wait_for(pool: Environments, processes: int) -> None:
    """Until this many are left of the episodes' process and what it has started."""
    assert eventually(lambda: (pool.poll(), 1 + len(descendants(pool._server.pid)))[1] == processes, 20)


EVENTS = {
    "raises in reset": "error",
    "raises": "error",
    "exits": "died",
    "is killed": "died",
    "returns nan": "bad_value",
    "returns none": "bad_value",
    "returns nothing": "bad_value",
    "returns an image": "bad_value",
}


@pytest.mark.slow
def test_what_an_environment_does_costs_its_own_response(rude, tokenizer):
    """Complaint 16: each is an event of its kind, and a good one next to them answers."""
    found = played(rude, *EVENTS, "good")
    assert {what: answer.get("event") for what, answer in found.items()} == EVENTS | {"good": None}
    assert tokenizer.decode(found["good"]["ids"]).startswith("\n<|im_start|>user\ngood hello<|im_end|>")
    assert "give a PIL image" in found["returns an image"]["message"] and "exited with code 3" in found["exits"]["message"]
    assert "was killed by SIGKILL" in found["is killed"]["message"] and "RuntimeError: no (" in found["raises"]["message"]
    rude.end("good")
    assert not rude._numbers and not rude._keys


def test_what_an_episode_starts_ends_with_it_and_what_the_file_starts_does_not(rude):
    for _ in range(2):
        assert played(rude, "leaves children")["leaves children"]["reward"] == 1.0
        rude.end("leaves children")
        wait_for(rude, 2)  # the process in which they are played, and the file's own


@pytest.mark.slow
def test_one_that_hangs_costs_its_time_limit(make_pool):
    """Complaint 18; its process does not outlive its episode, even if nobody can speak to it any more."""
    pool = make_pool(env_timeout=5.0)
    found = played(pool, "hangs", "closes its files", "good")
    for what in ("hangs", "closes its files"):
        assert found[what]["event"] == "timeout" and "--env-timeout" in found[what]["message"]
    assert "ids" in found["good"]
    wait_for(pool, 3)
    pool.close()
    assert not Path(f"/proc/{pool._server.pid}").exists()


@pytest.mark.slow
def test_a_rank_that_learns_costs_nobody_time(make_pool):
    """Many begin at once, and a long answer does not fit into the socket, while the rank reads nothing."""
    pool = make_pool(env_timeout=10.0)
    begin(pool, "long", "says much")
    pool.ask("long", "step", ids=[1])
    for key in range(20):
        pool.begin(key, {"ground_truth": "good", "prompt": []}, seed=1, own_seed=key)
    time.sleep(11.0)
    found = answers(pool, ["long", *range(20)])
    assert len(found["long"]["ids"]) > 200_000 and not any("event" in answer for answer in found.values())


def test_many_slow_ones_do_not_hold_up_a_fast_one(rude):
    """Complaint 17: 20 sleep a second each; the fast one's answer is there before any of theirs."""
    keys = {f"slow {i}": "sleeps" for i in range(20)} | {"fast": "fast"}
    for key, what in keys.items():
        begin(rude, key, what)
    for key in keys:
        rude.ask(key, "step", ids=[1])
    order = []
    while len(order) < len(keys):
        order += [key for key, _ in rude.poll(5.0)]
    assert order[0] == "fast"
    for key in keys:
        rude.end(key)


def test_episodes_share_no_state_and_have_seeds(rude, tokenizer):
    """Complaint 22: a module's variable, and random numbers, are each episode's own; and they can be repeated."""
    texts = []
    for own_seed in (1, 1, 2):
        begin(rude, "draws", "draws", own_seed)
        rude.ask("draws", "step", ids=[1])
        texts.append(tokenizer.decode(answers(rude, ["draws"])["draws"]["ids"]))
        rude.end("draws")
    assert texts[0] == texts[1] != texts[2] and all(" 7 1<|im_end|>" in text for text in texts)


def test_secrets_and_the_job_are_hidden_and_the_system_ends_environments_first(rude, tokenizer):
    found = played(rude, "says what it sees")["says what it sees"]
    assert "[None, None] 1000" in tokenizer.decode(found["ids"])
    rude.end("says what it sees")


def test_the_answer_of_an_episode_that_was_ended_is_nobody_s(rude):
    begin(rude, "a", "sleeps")
    rude.ask("a", "step", ids=[1])
    rude.end("a")
    assert "reward" not in begin(rude, "a", "good") and rude.poll(1.5) == []
    rude.end("a")


@pytest.mark.slow
def test_one_that_ends_the_process_they_are_forked_from_does_not_end_the_run(make_pool):
    pool = make_pool()
    begin(pool, "other", "good")
    begin(pool, "kills its parent", "kills its parent")
    pool.ask("kills its parent", "step", ids=[1])
    found = answers(pool, ["other", "kills its parent"])
    assert {answer["event"] for answer in found.values()} == {"died"} and len(found) == 2
    assert "ids" in played(pool, "good")["good"]


@pytest.mark.parametrize(("spec", "said"), [(f"{RUDE}:Missing", "Missing"), (f"{RUDE}:DRAWN", "DRAWN")])
def test_a_file_that_cannot_be_used_is_a_message(make_pool, spec, said):
    with pytest.raises(UserError, match=f"--env .* has no '{said}' that could be called"):
        make_pool(spec)


LOUD = ("prints much", "writes to its files", "has a child print")
SLACK = 1 << 10  # the lines that say so


@pytest.mark.parametrize(("written", "left_out"), [(1 << 20, False), ((1 << 20) + 1, True), (3 << 20, True)])
def test_the_first_bytes_are_passed_on(written, left_out, capfd, monkeypatch):
    monkeypatch.setattr(server, "PRINTED", 1 << 20)
    reading, writing = os.pipe()
    passing = threading.Thread(target=server._pass_on, args=(os.fdopen(reading, "rb"), "it"))
    passing.start()
    with open(writing, "wb") as pipe:
        pipe.write(b"x" * written)
    passing.join(60)
    said = capfd.readouterr().err
    assert said.count("x") == min(written, 1 << 20) and said.count("warning: what it prints is left out") == left_out


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_episodes_show_a_little_however_they_print(make_pool, capfd, monkeypatch):
    monkeypatch.setattr(server, "PRINTED", 1 << 20)
    pool = make_pool()
    assert {what: answer.get("reward") for what, answer in played(pool, *LOUD).items()} == dict.fromkeys(LOUD, 1.0)
    pool.close()
    text = capfd.readouterr()
    assert not text.out and (1 << 20) - SLACK < len(text.err) < (1 << 20) + SLACK
    assert text.err.count("is left out from here on") == 1


@pytest.mark.slow
def test_nothing_is_left_when_the_rank_is_killed(model):
    """kill -9 while environments are at work."""
    mark = f"environments-{os.getpid()}"
    lines = ["import sys, time", "sys.path[:0] = sys.argv[1].split(':')", "from test_pool import begin, environments"]
    lines += ["pool = environments(sys.argv[2])", "begin(pool, 'a', 'hangs')", "pool.ask('a', 'step', ids=[1])"]
    lines += ["pool.poll(1)", "print('begun', flush=True)", "time.sleep(1000)"]
    paths = f"{Path(__file__).parent}:{ROOT / 'tests' / 'tools'}"
    command = [sys.executable, "-c", "\n".join(lines), paths, model]
    rank = subprocess.Popen(command, env=environment(MARK=mark), stdout=subprocess.PIPE, text=True)
    assert rank.stdout.readline() == "begun\n" and len(left_over(mark)) == 4  # rank, its process, the helper, episode
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    assert eventually(lambda: not left_over(mark), 30)


@pytest.mark.slow
def test_a_fork_that_fails_costs_its_own_episode(make_pool, tmp_path):
    """No memory or no process is left: those under way live on, and the next may be forked again."""
    lines = ["import errno, os", f"import sys; sys.path.insert(0, {str(RUDE.parent)!r})", "from rude import Rude"]
    lines += ["fork, count = os.fork, iter(range(100))", "def refused():", "    if next(count) == 1:"]
    lines += ["        raise OSError(errno.EAGAIN, 'no process is left')", "    return fork()", "os.fork = refused"]
    (tmp_path / "scarce.py").write_text("\n".join(lines))
    pool = make_pool(f"{tmp_path / 'scarce.py'}:Rude")
    found = {key: begin(pool, key, "plays") for key in ("a", "b", "c")}
    assert {key: answer.get("event") for key, answer in found.items()} == {"a": None, "b": "died", "c": None}
    assert "no process is left" in found["b"]["message"]
    pool.ask("a", "step", ids=[1])
    assert "event" not in answers(pool, ["a"])["a"]


# ------------------------------------------------------------------------------------------------ environment variables


SECRETS = """
HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_PROFILE MY_PASSWORD db_passwd SERVICE_CREDENTIALS OPENAI_API_KEY
SSH_AUTH_SOCK github_token GOOGLE_APPLICATION_CREDENTIALS AZURE_CLIENT_ID Some_Secret_Thing DB_PASS SSHPASS MYSQL_PWD
GH_PAT HUAWEICLOUD_SDK_AK OBS_SK SENTRY_DSN SLACK_WEBHOOK_URL SMTP_PASSWORD
"""
OF_THE_JOB = "MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE TORCHELASTIC_RUN_ID GROUP_RANK"
KEPT = "PATH HOME LANG PWD OLDPWD LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES PYTHONPATH OMP_NUM_THREADS HF_HOME MY_SETTING"


def test_secrets_and_the_job_are_kept_back_by_name():
    environment = dict.fromkeys(f"{SECRETS} {OF_THE_JOB} {KEPT}".split(), "value")
    assert without_secrets(environment).keys() == {*KEPT.split()}
    named = {"HF_TOKEN", "AWS_PROFILE", "AWS_SECRET_ACCESS_KEY"}
    assert without_secrets(environment, ["HF_TOKEN", "AWS_*"]).keys() == {*KEPT.split(), *named}
    assert without_secrets(environment, ["*"]) == environment


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("https_proxy", "http://me:word@proxy:1"),
        ("STORE", "postgres://u:p@host/db"),
        ("STORE", "postgres://me:a/b@host/db"),
        ("STORE", "DefaultEndpointsProtocol=https;AccountKey=abc"),
        ("PIP_EXTRA_INDEX_URL", "https://ghp_x@host/simple"),
    ],
)
def test_a_value_with_a_password_is_kept_back(name, value):
    plain = {"http_proxy": "http://proxy:1", "X": "a:b@c", "PAGE": "https://host/a"}
    assert without_secrets({name: value, **plain}) == plain
