"""Episodes that workers elsewhere take: real processes with the real client; what one does costs its own episode alone."""

import asyncio
import contextlib
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from families import end_tokens, tokenizer_of
from helpers import free_port
from test_pool import Args, answers

from rl.environments import endpoint, gateway
from rl.environments.pool import Environments
from rl.errors import UserError
from rl.rewards.descendants import descendants

SECRET = "a secret of workers".replace(" ", "-")
ROW = {"ground_truth": "6", "prompt": [{"role": "user", "content": "2*3="}]}
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer_of("qwen2_5").save_pretrained(path)
    return str(path)


def serving(model: str, monkeypatch, number: int = 0, **flags) -> Environments:
    monkeypatch.setenv("SERVE_POLICY_KEY", SECRET)
    monkeypatch.setattr(gateway, "LINGER", 2.0)
    flags = {
        "serve_policy": free_port() - number,
        "env_timeout": 30.0,
        "env_memory_limit_gb": 0.0,
        "env_cpu_limit": 20.0,
    } | flags
    pool = Environments(Args(**flags), model, end_tokens("qwen2_5"), 300)
    pool.serve(number)
    return pool


@pytest.fixture
def pool(model, monkeypatch) -> Iterator[Environments]:
    pool = serving(model, monkeypatch)
    yield pool
    pool.close()


def url_of(pool: Environments) -> str:
    return f"{pool._gateway.url}/v1"


def address_of(pool: Environments) -> tuple[str, int]:
    return "127.0.0.1", int(pool._gateway.url.rpartition(":")[2])


def post(pool: Environments, path: str, key: str, body: dict | None = None) -> tuple[int, dict]:
    """Status and answer."""
    data, headers = json.dumps(body or {}).encode(), {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url_of(pool)}/{path}", data, headers), timeout=60) as reply:
            return reply.status, json.loads(reply.read() or "{}")
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def begin(pool: Environments, key: str, split: str = "train") -> None:
    pool.begin(key, ROW | {"name": key}, seed=1, own_seed=len(key), split=split)


def take(pool: Environments) -> dict:
    until = time.monotonic() + 30
    while (found := post(pool, "episodes/next", SECRET))[0] == 204 and time.monotonic() < until:
        time.sleep(0.05)
    assert found[0] == 200
    return found[1]


def says(pool: Environments, key: str, text: str) -> None:
    pool.ask(key, "step", ids=tokenizer_of("qwen2_5")(text + "<|im_end|>", add_special_tokens=False)["input_ids"])


def calls(pool: Environments, episode: dict, body: dict = HELLO) -> list:
    """A call on its way; its answer is the list's first item once the thread, the second, has ended."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(post(pool, "chat/completions", episode["api_key"], body)))
    thread.start()
    return [found, thread]


WITH_OPENAI = """
import json, sys, time, urllib.error, urllib.request
import openai

def post(url, key, body):
    headers = {"Authorization": f"Bearer {key}"}
    return json.loads(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read() or "{}")

url, secret = sys.argv[1:]
while True:
    try:
        episode = post(f"{url}/episodes/next", secret, {})
    except urllib.error.HTTPError as error:
        sys.exit(0 if error.code == 410 else 1)
    if not episode:
        time.sleep(0.5)
        continue
    client = openai.OpenAI(base_url=url, api_key=episode["api_key"], max_retries=0)
    assert [model.id for model in client.models.list()] == [episode["model"]]
    ask = lambda messages: client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages, name = episode["row"]["prompt"], episode["row"]["name"]
    said = ask(messages)
    if name == "forks":
        ask([{"role": "user", "content": "Other."}])
        streamed = client.chat.completions.create(model="policy", messages=[*messages, said, messages[0]], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "Hi."
    if name == "stays":
        time.sleep(1000)
    end = {"no reward": {}, "failed": {"error": "the machine is gone"}}.get(name, {"reward": len(name)})
    assert post(f"{url}/episodes/end", episode["api_key"], end) == {"ended": True}
    client.close()
"""


def test_workers_with_the_openai_client_come_and_go(model, monkeypatch):
    """Two of them; a third is killed in the middle of an episode, and costs that alone. All hear of the end."""
    pytest.importorskip("openai")
    pool = serving(model, monkeypatch, env_timeout=40.0)
    command = [sys.executable, "-c", WITH_OPENAI, url_of(pool), SECRET]
    begin(pool, "stays")
    killed = subprocess.Popen(command)
    assert "prompt" in answers(pool, ["stays"])["stays"]
    workers = [subprocess.Popen(command) for _ in range(2)]
    names = ["scored", "no reward", "failed", "forks"]
    for name in names:
        begin(pool, name)
    found, histories, until = {}, [], time.monotonic() + 60
    while len(found) < len(names) and time.monotonic() < until:
        for name, answer in pool.poll(0.2):
            if "event" in answer or answer.get("done"):
                found[name] = answer
                pool.end(name)
                continue
            histories += [answer["history"]] if "history" in answer else []
            says(pool, name, "Hi.")
    assert histories == [1, 0]
    assert [found[name]["reward"] for name in ("scored", "no reward", "forks")] == [6.0, None, 5.0]
    assert found["failed"]["event"] == "error" and "ended by its worker: the machine is gone" in found["failed"]["message"]
    killed.kill()
    killed.wait()
    says(pool, "stays", "Hi.")
    pool._deadlines["stays"] -= 39
    assert answers(pool, ["stays"])["stays"]["event"] == "timeout"
    pool.close()
    assert [worker.wait(20) for worker in workers] == [0, 0]


def test_an_episode_is_what_a_command_s_is(pool):
    """The row, the seed and the split; and what its first call says is the prompt."""
    begin(pool, "a", split="val")
    episode = take(pool)
    assert (episode["row"], episode["seed"], episode["split"]) == (ROW | {"name": "a"}, 1, "val")
    assert (episode["model"], episode["timeout"]) == ("policy", 30.0)
    call = calls(pool, episode, HELLO | {"max_tokens": 7})
    first = answers(pool, ["a"])["a"]
    expected = tokenizer_of("qwen2_5").apply_chat_template(HELLO["messages"], add_generation_prompt=True, tokenize=False)
    assert tokenizer_of("qwen2_5").decode(first["prompt"]) == expected and first["most"] == 7
    says(pool, "a", "Hi.")
    call[1].join(30)
    assert call[0][0][1]["choices"][0]["message"]["content"] == "Hi."
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
    if os.getuid() == 0:
        assert as_nobody(f"\0{pool._settings['gateway']}") == 0


def as_nobody(name: str) -> int:
    """Offers an episode as another user; 0 if nobody wanted it."""
    pid = os.fork()
    if not pid:
        os.setuid(65534)
        with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
            client.sendall(b"{}\n")
            os._exit(len(client.recv(1)))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_an_episode_ends_once(pool):
    """Bad values are refused and end nothing; after the end all is refused, also when its process has exited."""
    begin(pool, "a")
    key = take(pool)["api_key"]
    call = calls(pool, {"api_key": key})
    answers(pool, ["a"])
    says(pool, "a", "Hi.")
    call[1].join(30)
    rewards = [{"reward": reward} for reward in ("much", float("nan"), 10**400)]
    for wrong in (*rewards, {"rewards": 1}, {"reward": 1, "error": "x"}, {"error": 3}):
        assert post(pool, "episodes/end", key, wrong)[0] == 400
    assert post(pool, "episodes/end", key, {"reward": 1}) == (200, {"ended": True})
    assert answers(pool, ["a"])["a"]["reward"] == 1.0
    for _ in range(2):
        status, said = post(pool, "episodes/end", key, {"reward": 2})
        assert status == 410 and "has ended" in said["error"]["message"]
        assert post(pool, "chat/completions", key, HELLO)[0] == 410
        pool.end("a")
        until = time.monotonic() + 20
        while len(descendants(pool._process.pid)) > 1 and time.monotonic() < until:
            pool.poll(0.05)


@pytest.mark.parametrize(("end", "said"), [({}, "ended before its first call"), ({"error": "no disk"}, "no disk before its")])
def test_an_end_without_a_call_is_not_scored(pool, end, said):
    begin(pool, "a")
    assert post(pool, "episodes/end", take(pool)["api_key"], end)[0] == 200
    answer = answers(pool, ["a"])["a"]
    assert answer["event"] == "error" and said in answer["message"]


def test_a_worker_hears_that_the_budget_is_used_up(pool):
    """It may still say what it has reached."""
    begin(pool, "a")
    episode = take(pool)
    first = calls(pool, episode)
    answers(pool, ["a"])
    says(pool, "a", "Hi.")
    first[1].join(30)
    second = calls(pool, episode)
    answers(pool, ["a"])
    pool.ask("a", "end")
    second[1].join(30)
    assert second[0][0][0] == 400 and second[0][0][1]["error"]["code"] == "context_length_exceeded"
    assert post(pool, "episodes/end", episode["api_key"], {"reward": 0.25})[0] == 200
    assert answers(pool, ["a"])["a"]["reward"] == 0.25


def test_an_episode_waits_for_a_worker_and_no_longer_for_one_that_is_silent(model, monkeypatch, capfd):
    pool = serving(model, monkeypatch, number=3, env_timeout=1.0)
    assert pool._gateway.url == f"http://127.0.0.1:{pool.args.serve_policy + 3}"
    begin(pool, "a")
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert pool.poll(0.2) == []
    key = take(pool)["api_key"]
    answer = answers(pool, ["a"])["a"]
    assert answer["event"] == "timeout" and "no call after 1 s (--env-timeout)" in answer["message"]
    assert post(pool, "chat/completions", key, HELLO)[0] == 410
    pool.close()
    assert f"{url_of(pool)}/episodes/next" in capfd.readouterr().out


def test_the_console_says_that_no_worker_comes(monkeypatch, capsys):
    monkeypatch.setattr(endpoint, "PATIENCE", 0.1)
    server = endpoint.Endpoint({"url": "http://here"})
    server.offers["key"] = server.alive["key"] = {"row": {}}
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(server.remind(), 1))
    said = "episodes waiting for a worker: 1 (none has asked at http://here/v1/episodes/next in the last "
    assert capsys.readouterr().err.startswith(said)


def test_an_episode_that_finds_too_many_files_open_is_served_later(pool):
    assert post(pool, "episodes/next", SECRET)[0] == 204
    (server,) = descendants(pool._gateway._process.pid)
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{server}/fd")), limits[1]))
    begin(pool, "a")
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert pool.poll(0.2) == []
    resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    assert take(pool)["row"]["name"] == "a"


def test_the_end_is_said_to_whoever_asks(model, monkeypatch):
    """To a worker whose call is open, and to one that asks for an episode; then the port is free."""
    pool = serving(model, monkeypatch)
    begin(pool, "a")
    episode = take(pool)
    call = calls(pool, episode)
    answers(pool, ["a"])
    ends = threading.Thread(target=pool.close)
    ends.start()
    call[1].join(10)
    assert call[0][0][0] == 410
    for path, key in (("episodes/next", SECRET), ("chat/completions", episode["api_key"])):
        status, said = post(pool, path, key, HELLO)
        assert status == 410 and "the run has ended" in said["error"]["message"]
    ends.join(10)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(address_of(pool))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the system has no IPv6")
@pytest.mark.parametrize(
    ("host", "addresses"),
    [("localhost", ["127.0.0.1"]), ("0.0.0.0", ["127.0.0.1"]), ("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])],
)
def test_addresses(host, addresses, monkeypatch):
    """And a request without a Host header is answered, too."""
    monkeypatch.setenv("SERVE_POLICY_KEY", SECRET)
    monkeypatch.setattr(gateway, "LINGER", 0.0)
    served = gateway.Gateway(Args(serve_policy=free_port(), serve_host=host), secrets.token_hex(8), 0)
    for address in addresses:
        with socket.create_connection((address, served.url.rpartition(":")[2]), timeout=60) as client:
            client.sendall(f"POST /v1/episodes/next HTTP/1.1\r\nAuthorization: Bearer {SECRET}\r\n\r\n".encode())
            assert b" 204 " in client.recv(1 << 16)
    served.close()


def test_what_cannot_be_served_is_a_message(model, monkeypatch):
    with pytest.raises(UserError, match="--agent and --serve-policy: a response has one environment"):
        Args(agent="python x.py", serve_policy=1).check()
    wrong = {"turn_rewards": True}, {"env_lock_step": "on"}
    for flags, said in zip(wrong, ("--turn-rewards with --serve-policy", "--env-lock-step on with"), strict=True):
        with pytest.raises(UserError, match=said):
            Args(serve_policy=1, **flags).check()
    monkeypatch.delenv("SERVE_POLICY_KEY", raising=False)
    pool = Environments(Args(serve_policy=65_530), model, end_tokens("qwen2_5"), 300)  # a replay and a learner need no secret
    for secret in ("", "short", "with a blank in it, though long"):
        monkeypatch.setenv("SERVE_POLICY_KEY", secret)
        for starts in (pool.check, lambda: pool.serve(0)):
            with pytest.raises(UserError, match="set SERVE_POLICY_KEY"):
                starts()
    monkeypatch.setenv("SERVE_POLICY_KEY", SECRET)
    pool.check()
    with pytest.raises(UserError, match=r"cannot listen at 127\.0\.0\.1:65536: .*port must be 0-65535"):
        pool.serve(6)
    pool.close()
    with pytest.raises(UserError, match=r"cannot listen at 203\.0\.113\.1:"):
        serving(model, monkeypatch, serve_host="203.0.113.1")
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UserError, match="Address already in use"):
        serving(model, monkeypatch, serve_policy=other.getsockname()[1])


def test_a_gateway_that_was_killed_ends_the_run(pool):
    begin(pool, "a")
    take(pool)
    for pid in descendants(pool._gateway._process.pid):
        os.kill(pid, signal.SIGKILL)
    answer = answers(pool, ["a"])["a"]
    assert answer["event"] == "error" and "the process that answers agents has ended" in answer["message"]
    pool._gateway._process.wait(20)
    with pytest.raises(UserError, match="--serve-policy: the process that answers agents has exited"):
        begin(pool, "b")
