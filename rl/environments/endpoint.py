"""The server that agents call: `python -m rl.environments.endpoint PARENT_PID`, run by gateway.py.

It passes the requests of an episode's agent to the episode's process (rl/environments/agents.py), one after the other. The
process connects to a Unix socket, and both sides send lines of JSON:

    process: {row, seed, split}, to offer the episode to workers (--serve-policy), or null if it starts a command (--agent)
    server:  {url, key}, once the episode has an agent
    server:  {request, body} for each request; the body is text
    process: {status, kind, text}, the answer

Left out: encryption. Put a tunnel or a proxy in front of it if you do not control the network.
"""

import asyncio
import hmac
import json
import logging
import os
import re
import resource
import secrets
import socket
import struct
import sys
from typing import Any

from aiohttp import web

from rl.environments.chat import CHAT, ENDED, FINISH, MODEL, Refused, as_http
from rl.rewards import descendants

LARGEST = 1 << 26  # bytes of a request with a valid key
HEAD = 1 << 13  # bytes in which a connection must show a valid key
SILENCE = 30.0  # seconds in which it must
ROOM = 1 << 20  # bytes of all connections that have not: beyond it, the oldest is closed
EMPTY = 1 << 9  # bytes that count for one that has sent nothing
PATIENCE = 60.0  # seconds without a worker after which the console says so
OVER = "the run has ended: there will be no more episodes"
NEXT, MODELS = "POST /v1/episodes/next", "GET /v1/models"
NO_KEY = Refused(401, f"the key is not this session's OPENAI_API_KEY, or not in the first {HEAD} bytes", "invalid_api_key")
NO_KEY_HEAD = "HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
KEY = re.compile(r"^authorization: *bearer +(\S+)", re.IGNORECASE | re.MULTILINE)


class Endpoint:
    """The episodes, and the answers to agents and workers."""

    def __init__(self, settings: dict):
        """settings: from rl/environments/gateway.py."""
        self.settings = settings
        self.keys: set[str] = set()  # of all episodes so far
        self.alive: dict[str, EpisodeProcess] = {}  # by key
        self.offers: dict[str, dict] = {}  # for a worker, by key, oldest first
        self.doors: dict[Door, None] = {}  # oldest first
        self.room = ROOM
        self.is_over = False
        self._was_asked = False  # by a worker for an episode, since the last look

    def knows(self, key: str) -> bool:
        """Whether the key is that of an episode, or the secret of the workers."""
        return key in self.keys or hmac.compare_digest(key.encode(errors="replace"), self.settings["secret"].encode())

    async def answer(self, request: web.Request) -> web.Response:
        """Return the answer to a request of an agent or a worker."""
        try:
            found = await self._answer(request, request.headers.get("Authorization", "").partition(" ")[2].strip())
        except Refused as refused:
            found = as_http(refused)
        return web.Response(status=found["status"], content_type=found["kind"], text=found["text"])

    async def _answer(self, request: web.Request, key: str) -> dict:
        if not self.knows(key):
            raise NO_KEY
        if self.is_over:
            raise Refused(410, OVER)
        asked = f"{request.method} {request.path}"
        is_agent = key in self.keys
        if asked not in ((MODELS, CHAT, FINISH) if is_agent else (NEXT,)):
            raise Refused(404, f"there are {', '.join((MODELS, CHAT, FINISH) if is_agent else (NEXT,))} here")
        if asked == NEXT:
            return self._next()
        if asked == MODELS:
            return as_http({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}]})
        if (request.content_length or 0) > LARGEST:
            raise Refused(413, f"a request has at most {LARGEST} bytes")
        body = (await request.read()).decode(errors="replace")
        answer = key in self.alive and await self.alive[key].ask(asked, body)
        if not answer:
            raise Refused(410, OVER if self.is_over else ENDED)
        return answer

    def _next(self) -> dict:
        self._was_asked = True
        if not self.offers:
            return {"status": 204, "kind": "application/json", "text": ""}
        key = next(iter(self.offers))
        self.alive[key].begin()
        return as_http(self.offers.pop(key) | {"api_key": key, "model": MODEL, "timeout": self.settings["timeout"]})

    async def remind(self) -> None:
        """Print a line whenever episodes wait and no worker asks for them."""
        while True:
            await asyncio.sleep(PATIENCE)
            if self.offers and len(self.offers) == len(self.alive) and not self._was_asked:
                where = f"(none has asked at {self.settings['url']}/v1/episodes/next in the last {PATIENCE:.0f} s)"
                print(f"episodes waiting for a worker: {len(self.offers)} {where}", file=sys.stderr, flush=True)
            self._was_asked = False


class EpisodeProcess(asyncio.Protocol):
    """The connection of an episode's process, which answers its agent's requests."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self._key = secrets.token_hex(16)
        self._unread = b""
        self._one_at_a_time = asyncio.Lock()
        self._answer: asyncio.Future | None = None

    def begin(self) -> None:
        """Tell the process that its episode has an agent."""
        self._tell(url=f"{self._endpoint.settings['url']}/v1", key=self._key)

    async def ask(self, request: str, body: str) -> dict | None:
        """Return the process's answer to a request; None if the process has ended."""
        async with self._one_at_a_time:
            if self._transport.is_closing():
                return None
            self._answer = asyncio.get_running_loop().create_future()
            self._tell(request=request, body=body)
            return await self._answer

    def _tell(self, **message: Any) -> None:
        self._transport.write(json.dumps(message).encode() + b"\n")

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        peer = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", peer)[1] != os.getuid():
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if not data.endswith(b"\n"):
            return
        message = json.loads(self._unread)
        self._unread = b""
        if self._answer:
            self._answer.set_result(message)
            return
        self._endpoint.keys.add(self._key)
        self._endpoint.alive[self._key] = self
        if message:
            self._endpoint.offers[self._key] = message
        else:
            self.begin()

    def connection_lost(self, error: Exception | None) -> None:
        self._endpoint.alive.pop(self._key, None)
        self._endpoint.offers.pop(self._key, None)
        if self._answer and not self._answer.done():
            self._answer.set_result(None)


class Door(asyncio.Protocol):
    """A connection that has not shown a valid key. Once it has, aiohttp gets it, with what was read."""

    def __init__(self, endpoint: Endpoint, server: web.Server):
        self._endpoint, self._server = endpoint, server
        self._head: bytes | None = b""  # None once it is refused
        self._size = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(SILENCE, transport.abort)
        self._endpoint.doors[self] = None
        self._grow(EMPTY)

    def _grow(self, size: int) -> None:
        self._size += size
        self._endpoint.room -= size
        while self._endpoint.room < 0:
            oldest = next(iter(self._endpoint.doors))
            oldest._transport.abort()
            oldest.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._endpoint.doors:
            del self._endpoint.doors[self]
            self._endpoint.room += self._size
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._head is None:  # a client that sends its body before it reads would not see the answer if this were closed
            return
        self._head += data
        head, end, _ = self._head[:HEAD].partition(b"\r\n\r\n")
        if end and any(map(self._endpoint.knows, KEY.findall(head.decode("latin-1")))):
            self.connection_lost(None)
            protocol = self._server()
            self._transport.set_protocol(protocol)
            protocol.connection_made(self._transport)
            has_host = b"\r\nhost:" in head.lower()  # aiohttp insists on it; a worker written by hand may leave it out
            protocol.data_received(self._head if has_host else self._head.replace(b"\r\n", b"\r\nHost: policy\r\n", 1))
        elif end or len(self._head) > HEAD:
            self._head = None
            self._transport.write(f"{NO_KEY_HEAD}{as_http(NO_KEY)['text']}".encode())
            self._transport.write_eof()
        else:
            self._grow(len(data))


async def serve(settings: dict, rank: socket.socket, processes: socket.socket, agents: socket.socket) -> None:
    """Serve until the rank ends this process. rank: is shut down when the run is over; the others listen."""
    endpoint = Endpoint(settings)
    application = web.Application(client_max_size=LARGEST)
    application.router.add_route("*", "/{path:.*}", endpoint.answer)
    runner = web.AppRunner(application, access_log=None, auto_decompress=False)
    await runner.setup()
    loop = asyncio.get_running_loop()
    await loop.create_unix_server(lambda: EpisodeProcess(endpoint), sock=processes, backlog=1024)
    await loop.create_server(lambda: Door(endpoint, runner.server), sock=agents, backlog=64)
    agents.listen(1024)  # in the system; 64 are accepted at once, because each takes memory until it is looked at
    reminders = asyncio.create_task(endpoint.remind())
    rank.setblocking(False)
    await loop.sock_recv(rank, 1)
    endpoint.is_over = True
    await reminders


def main(parent: int) -> None:
    if not descendants.guard(parent):
        return
    rank = socket.socket(fileno=os.dup(0))
    settings, files, _, _ = socket.recv_fds(rank, 1 << 16, 2)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one file for each episode, and for each connection
    logging.getLogger("aiohttp.server").disabled = True  # whoever breaks a connection affects nobody else
    asyncio.run(serve(json.loads(settings), rank, *(socket.socket(fileno=file) for file in files)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
