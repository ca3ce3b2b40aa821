"""Connections to the agents' server that show no valid key: they take little memory and keep no agent out."""

import asyncio
import contextlib
import http.client
import json
import queue
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_pool import Args

from rl.environments import endpoint
from rl.environments.agents import Connection
from rl.environments.chat import as_http
from rl.environments.gateway import Gateway
from rl.rewards.descendants import descendants

MOST = 16 << 10  # KiB that the server may grow by
FILES = 8192  # that this process may open
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Hello."}]})
REFUSED = b"HTTP/1.1 401 "


@pytest.fixture(scope="module", autouse=True)
def files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, limits[1]), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Served:
    """The server's process, and an agent that calls it."""

    def __init__(self):
        name = secrets.token_hex(8)
        self.gateway = Gateway(Args(agent="x"), name, 0)
        self.connection = Connection(name, None, queue.SimpleQueue())
        self.address = "127.0.0.1", int(self.connection.variables["OPENAI_BASE_URL"].split(":")[2].removesuffix("/v1"))
        self.key = self.connection.variables["OPENAI_API_KEY"]
        (self.process,) = descendants(self.gateway._process.pid)
        self.call()
        self.before = self.memory("VmRSS")

    def memory(self, what: str = "VmHWM") -> int:
        """KiB that the process has, or has had at most."""
        status = Path(f"/proc/{self.process}/status").read_text()
        return int(status.partition(f"{what}:")[2].split()[0])

    def call(self) -> None:
        """Make an agent's call, over a new connection."""
        client = http.client.HTTPConnection(*self.address, timeout=60)
        client.request("POST", "/v1/chat/completions", BODY, {"Authorization": f"Bearer {self.key}"})
        self.connection.news.get(timeout=60)._send(as_http({"said": "Hi."}))
        assert json.load(client.getresponse()) == {"said": "Hi."}
        client.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.gateway.close()


def once(data: bytes) -> Callable[[socket.socket], None]:
    return lambda client: client.sendall(data)


def slowly(client: socket.socket) -> None:
    for byte in POST:
        client.sendall(bytes([byte]))


def half_open(client: socket.socket) -> None:
    client.sendall(POST)
    client.shutdown(socket.SHUT_WR)


MUCH = b"x" * (4 << 20)
CHUNK = b"%x\r\n%s\r\n" % (len(MUCH), MUCH)
WAYS = {  # name -> connections, what each does
    "nothing": (3000, once(b"")),
    "a head as large as one may be": (1000, once(POST + b"A: " + b"x" * 8100)),
    "a head that is too large": (60, once(POST + b"A: " + MUCH)),
    "many headers": (60, once(POST + b"".join(b"H%d: %s\r\n" % (i, b"x" * 65_000) for i in range(99)))),
    "headers without values": (60, once(POST + b"a:\r\n" * (1 << 20))),
    "headers of wide characters": (300, once(POST + b"A: " + "\U0001f600a".encode() * 1600)),
    "a head byte by byte": (100, slowly),
    "a body": (60, once(POST + b"Content-Length: 99999999\r\n\r\n" + MUCH)),
    "a body with a wrong key": (60, once(POST + b"Authorization: Bearer x\r\nContent-Length: 9999999\r\n\r\n" + MUCH)),
    "chunks": (60, once(POST + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK)),
    "a compressed body": (60, once(POST + b"Content-Encoding: gzip\r\nContent-Length: 9999999\r\n\r\n\x1f\x8b" + MUCH)),
    "requests behind each other": (200, once((POST + b"Content-Length: 0\r\n\r\n") * 2000)),
    "a web socket": (300, once(b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + b"x" * (1 << 16))),
    "HTTP/2": (300, once(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * (1 << 16))),
    "TLS": (300, once(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 500)),
    "rubbish": (300, once(bytes(range(256)) * 400)),
    "half of a connection": (300, half_open),
}


@pytest.mark.parametrize("way", WAYS)
def test_strangers_take_little_memory_and_keep_no_agent_out(served, way):
    number, act = WAYS[way]
    clients: list[socket.socket] = []

    def connect() -> None:
        for _ in range(number):
            clients.append(socket.create_connection(served.address, timeout=60))
            clients[-1].settimeout(1)
            with contextlib.suppress(OSError):  # the server has closed it, or does not read it
                act(clients[-1])

    strangers = threading.Thread(target=connect)
    strangers.start()
    while strangers.is_alive():
        served.call()
        time.sleep(0.05)
    served.call()  # while all are open
    for client in clients:
        client.close()
    assert len(clients) == number and served.memory() - served.before < MOST


@pytest.mark.parametrize(
    "data",
    [
        POST + b"\r\n",
        POST + b"Content-Length: 4000000\r\n\r\n" + b"x" * 4_000_000,
        POST + b"Authorization: Bearer wrong\r\n\r\n",
        POST + b"Authorization: Bearer \xff\xfe\r\n\r\n",
        POST + b"A: " + b"x" * 10_000,
        b"\0" * 10_000,
    ],
    ids=["no key", "a body", "a wrong key", "a key that is no text", "a large head", "rubbish"],
)
def test_a_stranger_reads_why_it_is_refused(served, data):
    with socket.create_connection(served.address, timeout=60) as client:
        client.sendall(data)
        said = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert said.startswith(REFUSED) and json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_api_key"


def test_each_request_needs_a_key(served):
    """Also on a connection that has shown one, as a proxy's is that carries the requests of many."""
    client = http.client.HTTPConnection(*served.address, timeout=60)
    for key, status in ((served.key, 200), ("wrong", 401), (served.key, 200)):
        client.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        reply = client.getresponse()
        assert reply.read() and reply.status == status
    client.close()


def test_a_thousand_agents_connect_before_any_of_them_calls(served):
    """And are answered, and once more on the same connections, while strangers come."""

    async def agents() -> set[bytes]:
        pairs = await asyncio.gather(*(asyncio.open_connection(*served.address) for _ in range(1000)))
        found = set()
        for _ in range(2):
            for _, writer in pairs:
                writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.key}\r\n\r\n".encode())
            found |= {(await reader.readuntil(b"}]}"))[:13] for reader, _ in pairs}
            others = [socket.create_connection(served.address, timeout=60) for _ in range(3000)]
        for client in others:
            client.close()
        for _, writer in pairs:
            writer.close()
        return found

    assert asyncio.run(agents()) == {b"HTTP/1.1 200 "}


# ---------------------------------------------------------------------------------------- with shorter limits


@pytest.fixture
def address(monkeypatch) -> Iterator[tuple[str, int]]:
    """The server in this process: it has room for three connections without a key, for a second."""
    monkeypatch.setattr(endpoint, "SILENCE", 1.0)
    monkeypatch.setattr(endpoint, "ROOM", 3 * endpoint.EMPTY)
    rank, theirs = socket.socketpair()
    processes = socket.socket(socket.AF_UNIX)
    processes.bind(f"\0{secrets.token_hex(8)}")
    agents = socket.create_server(("127.0.0.1", 0))
    known = {"secret": "a secret", "url": "http://here", "timeout": 1.0}
    loop = asyncio.new_event_loop()
    server = loop.create_task(endpoint.serve(known, theirs, processes, agents))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(server)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield agents.getsockname()
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    thread.join(20)
    rank.close()


def is_closed(client: socket.socket, dripping: bytes = b"") -> bool:
    """Whether the server closes the connection, although something is sent again and again."""
    client.settimeout(0.1)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            client.sendall(dripping)
            if client.recv(1 << 16) == b"":
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize("head", [b"", POST, POST + b"Authorization: Bearer wrong\r\n\r\n"])
@pytest.mark.parametrize("dripping", [b"", b"x"])
def test_a_connection_without_a_key_has_a_time_limit(address, head, dripping):
    with socket.create_connection(address) as client:
        client.sendall(head)
        assert is_closed(client, dripping)


def test_the_oldest_connection_without_a_key_makes_room(address, monkeypatch):
    monkeypatch.setattr(endpoint, "SILENCE", 600.0)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        assert all(is_closed(client) for client in clients[:17])
        clients[-1].sendall(b"P" * 2 * endpoint.EMPTY)  # what they have sent counts, too
        assert all(is_closed(client) for client in clients[17:19])
