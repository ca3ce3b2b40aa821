"""Episodes that workers elsewhere take: real processes with the real client; what one does costs its own episode alone."""

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from families import end_tokens, tokenizer_of
from helpers import eventually, free_port
from processes import descendants
from test_pool import answers, ids_of

import train_sync
from rl.environments import pool as pools
from rl.environments.args import EnvironmentArgs
from rl.environments.pool import Environments
from rl.errors import UserError

SECRET = "a-secret-of-workers"
ROW = {"ground_truth": "6", "prompt": [{"role": "user", "content": "2*3="}]}
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}]}


def serving(model: str, monkeypatch, number: int = 0, host: str = "", **flags) -> Environments:
    monkeypatch.setenv("SERVE_POLICY_KEY", SECRET)
    monkeypatch.setattr(pools, "LINGER", 2.0)
    flags = {"serve_policy": f"{host}{free_port() - number}", "env_timeout": 30.0} | flags
    pool = Environments(EnvironmentArgs(**flags), model, end_tokens("qwen2_5"))
    pool.serve(number)
    return pool


@pytest.fixture(scope="module")
def of_all_tests(model) -> Iterator[Environments]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        pool = serving(model, monkeypatch)
        yield pool
        pool.close()


@pytest.fixture
def pool(of_all_tests) -> Iterator[Environments]:
    yield of_all_tests
    for key in [*of_all_tests._numbers]:
        of_all_tests.end(key)


def post(pool: Environments, path: str, key: str, body: dict | None = None) -> tuple[int, dict]:
    """Status and answer."""
    data, headers = json.dumps(body or {}).encode(), {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{pool.url}/{path}", data, headers), timeout=60) as reply:
            return reply.status, json.loads(reply.read() or "{}")
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def begin(pool: Environments, key: str, split: str = "train") -> None:
    pool.begin(key, ROW | {"name": key}, seed=1, own_seed=len(key), split=split)


def take(pool: Environments) -> dict:
    found = []
    assert eventually(lambda: found.append(post(pool, "episodes/next", SECRET)) or found[-1][0] != 204, 30)
    assert found[-1][0] == 200
    return found[-1][1]


def says(pool: Environments, key: str, text: str) -> None:
    pool.ask(key, "step", ids=ids_of(f"{text}<|im_end|>"))


THREADS = ThreadPoolExecutor()


def calling(pool: Environments, key: str, body: dict = HELLO) -> Future:
    """A call on its way, whose result is its status and answer."""
    return THREADS.submit(post, pool, "chat/completions", key, body)


@pytest.mark.slow
def test_an_episode_is_what_a_command_s_is(pool):
    """The row, the seed and the split; and what its first call says is the prompt."""
    begin(pool, "a", split="val")
    episode = take(pool)
    assert (episode["row"], episode["seed"], episode["split"]) == (ROW | {"name": "a"}, 1, "val")
    assert (episode["model"], episode["timeout"]) == ("policy", 30.0)
    call = calling(pool, episode["api_key"], HELLO | {"max_tokens": 7})
    first = answers(pool, ["a"])["a"]
    expected = tokenizer_of("qwen2_5").apply_chat_template(HELLO["messages"], add_generation_prompt=True, tokenize=False)
    assert tokenizer_of("qwen2_5").decode(first["prompt"]) == expected and first["most"] == 7
    says(pool, "a", "Hi.")
    assert call.result(30)[1]["choices"][0]["message"]["content"] == "Hi."
    assert post(pool, "episodes/end", episode["api_key"], {"reward": 0.5})[0] == 200
    assert answers(pool, ["a"])["a"]["reward"] == 0.5


def test_a_key_opens_its_own_door_alone(pool):
    begin(pool, "a")
    for key in ("", "wrong", SECRET + "x", "ü", "0-1-" + "0" * 32):
        assert post(pool, "episodes/next", key.encode().decode("latin1"))[0] == 401
        assert post(pool, "chat/completions", key.encode().decode("latin1"), HELLO)[0] == 401
    assert post(pool, "chat/completions", SECRET, HELLO)[0] == 404
    own = take(pool)["api_key"]
    assert post(pool, "episodes/next", own)[0] == 404 and post(pool, "episodes/end", own[:-1], {})[0] == 401
    assert SECRET not in own


def test_an_episode_ends_once(pool):
    """Bad values are refused and end nothing; after the end all is refused, also when the rank has closed the episode."""
    begin(pool, "a")
    key = take(pool)["api_key"]
    call = calling(pool, key)
    answers(pool, ["a"])
    says(pool, "a", "Hi.")
    call.result(30)
    rewards = [{"reward": reward} for reward in ("much", float("nan"), 10**400)]
    for wrong in (*rewards, {"rewards": 1}, {"reward": 1, "error": "x"}, {"error": 3}):
        assert post(pool, "episodes/end", key, wrong)[0] == 400
    assert post(pool, "episodes/end", key, {"reward": 1}) == (200, {"ended": True})
    assert answers(pool, ["a"])["a"]["reward"] == 1.0
    status, said = post(pool, "episodes/end", key, {"reward": 2})
    assert status == 410 and "has ended" in said["error"]["message"] and post(pool, "chat/completions", key, HELLO)[0] == 410
    pool.end("a")
    assert eventually(lambda: post(pool, "chat/completions", key, HELLO)[0] == 401, 20)


@pytest.mark.parametrize(("end", "said"), [({}, "ended before its first call"), ({"error": "no disk"}, "no disk before its")])
def test_an_end_without_a_call_is_not_scored(pool, end, said):
    begin(pool, "a")
    assert post(pool, "episodes/end", take(pool)["api_key"], end)[0] == 200
    answer = answers(pool, ["a"])["a"]
    assert answer["event"] == "error" and said in answer["message"]


@pytest.mark.slow
def test_an_episode_waits_for_a_worker_and_no_longer_for_one_that_is_silent(model, monkeypatch, capfd):
    pool = serving(model, monkeypatch, number=3, env_timeout=1.0)
    assert pool.url == f"http://127.0.0.1:{int(pool.args.serve_policy) + 3}/v1"
    begin(pool, "a")
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert pool.poll(0.2) == []
    key = take(pool)["api_key"]
    answer = answers(pool, ["a"])["a"]
    assert answer["event"] == "timeout" and "no answer after 1 s (--env-timeout)" in answer["message"]
    assert post(pool, "chat/completions", key, HELLO)[0] == 401
    begin(pool, "gives up")
    pool.poll(0.5)
    pool.end("gives up")
    assert eventually(lambda: not pool.poll(0.1) and post(pool, "episodes/next", SECRET)[0] == 204, 20)
    pool.close()
    assert f"{pool.url}/episodes/next" in capfd.readouterr().out


@pytest.mark.slow
def test_the_end_is_said_to_whoever_asks(model, monkeypatch):
    """To a worker whose call is open, and to one that asks for an episode; then the port is free."""
    pool = serving(model, monkeypatch)
    begin(pool, "a")
    key = take(pool)["api_key"]
    call = calling(pool, key)
    answers(pool, ["a"])
    ends = THREADS.submit(pool.close)
    assert call.result(30)[0] == 410
    for path, its in (("episodes/next", SECRET), ("chat/completions", key)):
        status, said = post(pool, path, its, HELLO)
        assert status == 410 and "the run has ended" in said["error"]["message"]
    ends.result(10)
    with socket.create_server(("127.0.0.1", int(pool.args.serve_policy))):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("host", "address"), [("0.0.0.0:", "127.0.0.1"), ("[::1]:", "[::1]")])
def test_addresses(model, host, address, monkeypatch):
    if "::" in host and not socket.has_dualstack_ipv6():
        pytest.skip("the system has no IPv6")
    pool = serving(model, monkeypatch, host=host)
    pool.url = f"http://{address}:{pool.url.rpartition(':')[2]}"
    assert post(pool, "episodes/next", SECRET)[0] == 204
    pool.close()


@pytest.mark.slow
def test_what_cannot_be_served_is_a_message(model, monkeypatch):
    for flags, said in (
        ({"agent": "python x.py"}, "--agent and --serve-policy: a response has one environment"),
        ({"serve_policy": "0"}, "give a port, or an address and a port"),
        ({"serve_policy": "here"}, "give a port, or an address and a port"),
    ):
        with pytest.raises(UserError, match=said):
            EnvironmentArgs(**{"serve_policy": "1"} | flags).check(train_sync.Args())
    monkeypatch.delenv("SERVE_POLICY_KEY", raising=False)
    own = EnvironmentArgs(serve_policy="65530")
    pool = Environments(own, model, end_tokens("qwen2_5"))  # a replay and a learner need no secret
    for secret in ("", "short"):
        monkeypatch.setenv("SERVE_POLICY_KEY", secret)
        for starts in (pool.check, lambda: pool.serve(0)):
            with pytest.raises(UserError, match="set SERVE_POLICY_KEY"):
                starts()
    monkeypatch.setenv("SERVE_POLICY_KEY", SECRET)
    pool.check()
    with pytest.raises(UserError, match=r"--serve-policy 65530: cannot listen at 127\.0\.0\.1:65536: .*port must be 0-65535"):
        pool.serve(6)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UserError, match="address already in use"):
        serving(model, monkeypatch, serve_policy=str(other.getsockname()[1]))


@pytest.mark.slow
def test_a_server_that_was_killed_costs_its_episodes_and_serves_again(pool):
    begin(pool, "a")
    key = take(pool)["api_key"]
    for pid in (pool._server.pid, *descendants(pool._server.pid)):
        os.kill(pid, signal.SIGKILL)
    assert answers(pool, ["a"])["a"]["event"] == "died"
    assert post(pool, "chat/completions", key, HELLO)[0] == 401
    begin(pool, "b")
    assert take(pool)["row"]["name"] == "b"
