"""Processes of environments, real ones: what one does costs nobody else anything, and none is left."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from families import end_tokens, tokenizer_of
from helpers import ROOT, environment, left_over

from rl.environments.args import EnvironmentArgs
from rl.environments.pool import Environments
from rl.environments.worker import LARGEST
from rl.errors import UserError
from rl.rewards.descendants import children, descendants, end, exit_code, start

RUDE = Path(__file__).parent / "rude.py"


@dataclass
class Args(EnvironmentArgs):
    reward_env: tuple[str, ...] = ()
    reward: str | None = None
    scores_environments: bool = False
    max_num_seqs: int = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer_of("qwen2_5").save_pretrained(path)
    return str(path)


def environments(model: str, spec: str = f"{RUDE}:Rude", **flags) -> Environments:
    flags = {"env_timeout": 20.0, "env_memory_limit_gb": 2.0, "env_cpu_limit": 1.0} | flags
    return Environments(Args(env=spec, **flags), model, end_tokens("qwen2_5"), 300)


@pytest.fixture(scope="module")
def rude(model, request) -> Iterator[Environments]:
    os.environ["MY_TOKEN"] = os.environ["RANK"] = "secret"
    try:
        pool = environments(model)
        assert pool.ready["tools"]["schemas"] == [] and not pool.ready["scores_at_end"]
    finally:
        del os.environ["MY_TOKEN"], os.environ["RANK"]
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("qwen2_5")


def answers(pool: Environments, keys) -> dict:
    """The next answer of each key."""
    found, until = {}, time.monotonic() + 60
    while found.keys() < set(keys) and time.monotonic() < until:
        found |= dict(pool.poll(0.2))
    return found


def played(pool: Environments, tokenizer, *whats: str) -> dict[str, dict]:
    """Each environment's answer to a first turn."""
    for what in whats:
        pool.begin(what, {"ground_truth": what, "prompt": []}, seed=5, own_seed=len(what))
    ready = answers(pool, whats)
    for what in whats:
        if "event" not in ready[what]:
            pool.ask(what, "step", ids=tokenizer("hello<|im_end|>", add_special_tokens=False)["input_ids"])
    return ready | answers(pool, [what for what in whats if "event" not in ready[what]])


EVENTS = {
    "raises in reset": "error",
    "raises": "error",
    "burns": "timeout",
    "exits": "died",
    "eats": "error",
    "opens": "error",
    "lies": "bad_value",
    "returns nan": "bad_value",
    "returns none": "bad_value",
    "returns nothing": "bad_value",
    "returns an image": "bad_value",
}


def test_what_an_environment_does_costs_its_own_response(rude, tokenizer):
    """Complaint 16: each is an event of its kind, and a good one next to them answers."""
    found = played(rude, tokenizer, *EVENTS, "good")
    assert {what: answer.get("event") for what, answer in found.items()} == EVENTS | {"good": None}
    assert tokenizer.decode(found["good"]["ids"]).startswith("\n<|im_start|>user\ngood hello<|im_end|>")
    assert "only text" in found["returns an image"]["message"]
    rude.end("good")
    assert not rude._places and not rude._deadlines


def test_an_end_may_be_heard_of_before_its_socket_is_looked_at(rude, monkeypatch):
    rude.begin("exits", {"ground_truth": "exits", "prompt": []}, seed=1, own_seed=1)
    answers(rude, ["exits"])
    rude.ask("exits", "step", ids=[1])
    select, until = rude._selector.select, time.monotonic() + 20
    while len(select(0)) < 2 and time.monotonic() < until:  # its socket's end, and what its parent says of it
        time.sleep(0.05)
    parent_first = lambda wait: sorted(select(wait), key=lambda item: item[0].data is not None)  # noqa: E731
    monkeypatch.setattr(rude._selector, "select", parent_first)
    assert [answer["event"] for _, answer in rude.poll()] == ["died"]


HELPED = """
import subprocess, sys
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)

class Helped:
    def step(self, message):
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        state = open(f"/proc/{helper.pid}/stat").read().rpartition(")")[2].split()[0]
        return [], float(state != "Z"), True
"""


def test_what_an_episode_starts_ends_with_it_and_what_the_file_starts_does_not(model, tokenizer, tmp_path):
    """A server for all episodes may be started when the file is imported."""
    (tmp_path / "helped.py").write_text(HELPED)
    pool = environments(model, f"{tmp_path / 'helped.py'}:Helped")
    for what in ("a", "b", "c"):
        assert played(pool, tokenizer, what)[what]["reward"] == 1.0
        pool.end(what)
        until = time.monotonic() + 20
        while len(descendants(pool._process.pid)) > 2 and time.monotonic() < until:
            pool.poll(0.1)
        assert len(descendants(pool._process.pid)) == 2  # what all are forked from, and the helper
    pool.close()


@pytest.mark.slow
def test_one_that_hangs_costs_its_time_limit(model, tokenizer):
    """Complaint 18; its process does not outlive its episode, even if nobody can speak to it any more."""
    pool = environments(model, env_timeout=2.0)
    found = played(pool, tokenizer, "hangs", "closes its files", "good")
    assert found["hangs"]["event"] == "timeout" and "--env-timeout" in found["hangs"]["message"] and "ids" in found["good"]
    assert found["closes its files"]["event"] == "timeout"
    until = time.monotonic() + 20
    while len(descendants(pool._process.pid)) > 2 and time.monotonic() < until:
        pool.poll(0.1)
    assert len(descendants(pool._process.pid)) == 2  # what all are forked from, and the good one
    pool.close()


@pytest.mark.slow
def test_many_that_begin_at_once_have_time_to_be_forked(model):
    """One after the other, which takes longer than --env-timeout; that is for what the user's code does."""
    pool = environments(model, env_timeout=0.2)
    for key in range(200):
        pool.begin(key, {"ground_truth": "good", "prompt": []}, seed=1, own_seed=key)
    found = answers(pool, range(200))
    pool.close()
    assert len(found) == 200 and not any("event" in answer for answer in found.values())


@pytest.mark.slow
def test_a_long_answer_may_wait_for_a_rank_that_learns(model):
    """It does not fit into a socket, so its process can write the rest only once the rank has read the first part."""
    pool = environments(model, env_timeout=3.0)
    pool.begin("a", {"ground_truth": "says much", "prompt": []}, seed=1, own_seed=1)
    answers(pool, "a")
    pool.ask("a", "step", ids=[1])
    time.sleep(4.0)
    assert len(answers(pool, "a")["a"]["ids"]) > 200_000
    pool.close()


def test_an_answer_that_drips_does_not_avoid_the_time_limit(model, tokenizer):
    pool = environments(model, env_timeout=1.0)
    assert played(pool, tokenizer, "drips")["drips"]["event"] == "timeout"
    pool.close()


def test_many_slow_ones_do_not_hold_up_a_fast_one(rude, tokenizer):
    """Complaint 17: 20 sleep a second each; the fast one's answer is there before any of theirs."""
    slow = [f"sleeps{'' if i == 0 else ' '}{i or ''}" for i in range(20)]
    for i, key in enumerate([*slow, "fast"]):
        rude.begin(key, {"ground_truth": "sleeps" if key != "fast" else "fast", "prompt": []}, seed=1, own_seed=i)
    answers(rude, [*slow, "fast"])
    for key in [*slow, "fast"]:
        rude.ask(key, "step", ids=[1])
    order = []
    while len(order) < 21:
        order += [key for key, _ in rude.poll(5.0)]
    assert order[0] == "fast"
    for key in [*slow, "fast"]:
        rude.end(key)


def test_episodes_share_no_state_and_have_seeds(rude, tokenizer):
    """Complaint 22: a module's variable, and random numbers, are each episode's own; and they can be repeated."""
    texts = []
    for own_seed in (1, 1, 2):
        rude.begin("draws", {"ground_truth": "draws", "prompt": []}, seed=7, own_seed=own_seed)
        answers(rude, ["draws"])
        rude.ask("draws", "step", ids=[1])
        texts.append(tokenizer.decode(answers(rude, ["draws"])["draws"]["ids"]))
        rude.end("draws")
    assert texts[0] == texts[1] != texts[2] and all(" 7 1<|im_end|>" in text for text in texts)


def test_secrets_and_the_job_are_hidden(rude, tokenizer):
    assert "NoneNone" in tokenizer.decode(played(rude, tokenizer, "says secrets")["says secrets"]["ids"])
    rude.end("says secrets")


def test_what_reset_adds_is_in_the_prompt(rude, tokenizer):
    """Complaint 21."""
    row = {"ground_truth": "good", "prompt": [{"role": "user", "content": "Play."}], "says": "I begin."}
    rude.begin("a", row, seed=1, own_seed=1)
    text = tokenizer.decode(answers(rude, "a")["a"]["prompt"])
    assert text.endswith("user\nPlay.<|im_end|>\n<|im_start|>user\nI begin.<|im_end|>\n<|im_start|>assistant\n")
    rude.end("a")


@pytest.mark.slow
def test_one_that_ends_the_process_they_are_forked_from_does_not_end_the_run(model, tokenizer):
    pool = environments(model)
    pool.begin("other", {"ground_truth": "good", "prompt": []}, seed=1, own_seed=1)
    answers(pool, ["other"])
    pool.begin("kills its parent", {"ground_truth": "kills its parent", "prompt": []}, seed=1, own_seed=1)
    answers(pool, ["kills its parent"])
    pool.ask("kills its parent", "step", ids=[1])
    assert {key: answer["event"] for key, answer in answers(pool, ["other", "kills its parent"]).items()} == {
        "other": "died",
        "kills its parent": "died",
    }
    assert "ids" in played(pool, tokenizer, "good")["good"]
    pool.close()


def test_an_episode_s_children_end_with_it(model, tokenizer):
    pool = environments(model)
    assert played(pool, tokenizer, "leaves a child")["leaves a child"]["reward"] == 1.0
    guard = pool._process.pid
    before = len(descendants(guard))
    pool.end("leaves a child")
    until = time.monotonic() + 20
    while len(descendants(guard)) > before - 2 and time.monotonic() < until:
        pool.poll(0.1)
    assert len(descendants(guard)) == before - 2 == 1  # what all are forked from
    pool.close()
    assert not Path(f"/proc/{guard}").exists()


def test_an_async_environment(model):
    pool = environments(model, f"{RUDE}:Waits")
    pool.begin("a", {"ground_truth": "", "prompt": []}, seed=1, own_seed=1)
    answers(pool, "a")
    pool.ask("a", "step", ids=[1])
    assert answers(pool, "a")["a"]["reward"] == 0.5
    pool.close()


@pytest.mark.parametrize(("spec", "said"), [(f"{RUDE}:Missing", "Missing"), (f"{RUDE}:DRAWN", "DRAWN")])
def test_a_file_that_cannot_be_used_is_a_message(model, spec, said):
    with pytest.raises(UserError, match=said):
        assert environments(model, spec).ready


@pytest.mark.slow
def test_nothing_is_left_when_the_rank_is_killed(model):
    """kill -9 while environments are at work."""
    mark = f"environments-{os.getpid()}"
    lines = ["import sys, time", "sys.path[:0] = sys.argv[1].split(':')", "from test_pool import environments"]
    lines += ["pool = environments(sys.argv[2])", "pool.begin('a', {'ground_truth': 'hangs', 'prompt': []}, 1, 1)"]
    lines += ["while not pool.poll(1): pass", "pool.ask('a', 'step', ids=[1])", "pool.poll(1)", "print('begun', flush=True)"]
    lines += ["time.sleep(1000)"]
    paths = f"{Path(__file__).parent}:{ROOT / 'tests' / 'tools'}"
    command = [sys.executable, "-c", "\n".join(lines), paths, model]
    rank = subprocess.Popen(command, env=environment(MARK=mark), stdout=subprocess.PIPE, text=True)
    assert rank.stdout.readline() == "begun\n" and len(left_over(mark)) == 4  # rank, guard, warm process, episode
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    until = time.monotonic() + 30
    while left_over(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left_over(mark)


def test_a_fork_that_fails_costs_its_own_episode(model, tmp_path):
    """No memory or no process is left: those under way live on, and the next may be forked again."""
    lines = ["import errno, os", f"import sys; sys.path.insert(0, {str(RUDE.parent)!r})", "from rude import Rude"]
    lines += ["fork, count = os.fork, iter(range(100))", "def refused():", "    if next(count) == 1:"]
    lines += ["        raise OSError(errno.EAGAIN, 'no process is left')", "    return fork()", "os.fork = refused"]
    file = tmp_path / "scarce.py"
    file.write_text("\n".join(lines))
    pool = environments(model, f"{file}:Rude")
    for key in ("a", "b", "c"):
        pool.begin(key, {"ground_truth": "plays", "prompt": []}, seed=1, own_seed=1)
        found = answers(pool, [key])[key]
        assert ("no process is left" in found["message"] and found["event"] == "died") if key == "b" else "event" not in found
    pool.ask("a", "step", ids=[1])
    assert "event" not in answers(pool, ["a"])["a"]
    pool.close()


def test_a_warm_process_whose_rank_has_ended_says_nothing(model, tmp_path):
    """At a stop: the rank has closed its end when the end of an episode is to be reported, or with an answer unread."""
    for closes in ("before the report", "with a report unread"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with open(tmp_path / "err", "w") as err:
            pool = environments(model)
            settings = pool._settings
            pool.close()
            guard = start("rl.environments.worker", passed=(), stdin=theirs, stdout=subprocess.DEVNULL, stderr=err)
        theirs.close()
        ours.send(json.dumps(settings).encode())
        assert "tools" in json.loads(ours.recv(LARGEST))
        (warm,) = children()[guard.pid]
        episode, its = socket.socketpair()
        socket.send_fds(ours, [json.dumps({"fork": 1}).encode()], [its.fileno()])
        its.close()
        while not (forks := children().get(warm)):
            time.sleep(0.01)
        if closes == "before the report":
            os.kill(warm, signal.SIGSTOP)
        for fork in forks:
            os.kill(fork, signal.SIGKILL)
        if closes == "with a report unread":
            select.select([ours], [], [], 20)
        ours.close()
        episode.close()
        os.kill(warm, signal.SIGCONT)
        exit_code(guard, 20)
        end(guard)
        assert (tmp_path / "err").read_text() == ""
