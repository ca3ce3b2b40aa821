"""The server that agents call: `python -m rl.environments.desk PARENT_PID`, run by gateway.py.

It passes the requests of an episode's agent to the episode's process (rl/environments/agents.py), which answers them. The
process connects to a Unix socket, and both sides send lines of JSON:

    process: {row, seed, split}, to offer the episode to workers (--serve-policy), or null if it starts a command (--agent)
    server:  {url, key}, once the episode has an agent
    server:  {number, request, body} for each request; the body is text
    process: {number, status, kind, text}, the answer

Left out: encryption. Put a tunnel or a proxy in front of it if you do not control the network.
"""

import contextlib
import hmac
import itertools
import json
import math
import os
import queue
import resource
import secrets
import socket
import socketserver
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler
from typing import Any

from rl.environments.chat import CHAT, ENDED, FINISH, MODEL, Refused
from rl.rewards import descendants

SETTINGS_BYTES = 1 << 16  # limit of the first message from the rank
LARGEST, LARGEST_OF_STRANGERS = 1 << 26, 1 << 16  # bytes of a request with a valid key, and of one without
SILENCE = 60.0  # seconds after which a silent connection is closed, and any connection that has not shown a valid key
STRANGERS = 1024  # connections that have not shown a valid key: one more closes the oldest. Many agents may call at once
RETRY = 0.1  # seconds after which an episode's process is accepted that could not be
PATIENCE = 60.0  # seconds without a worker after which the console says so
LINGER = 5.0  # seconds after the run in which requests are answered, so that workers hear of its end
OVER = "the run has ended: there will be no more episodes"
NEXT, MODELS = "POST /v1/episodes/next", "GET /v1/models"


class EpisodeProcess:
    """The process of an episode, which answers its agent's requests."""

    def __init__(self, channel: socket.socket, offer: dict | None):
        self.offer = offer
        self.key = secrets.token_hex(16)
        self._channel = channel
        self._one_at_a_time = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, queue.SimpleQueue] = {}  # number -> where the thread of this request waits for its answer
        self._has_ended = False

    def tell(self, **message: Any) -> None:
        """Send the process a message, unless it has ended."""
        with self._one_at_a_time, contextlib.suppress(OSError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def ask(self, request: str, body: str) -> dict | None:
        """Return the process's answer to a request; None if the process ends first."""
        number = next(self._numbers)
        found = queue.SimpleQueue()
        self._open[number] = found
        if self._has_ended:
            return None
        self.tell(number=number, request=request, body=body)
        return found.get()

    def hear(self, lines: Iterable[str]) -> None:
        """Pass answers on until the process ends."""
        with contextlib.suppress(OSError, ValueError):  # the process was killed, perhaps while it was writing
            for answer in map(json.loads, lines):
                self._open.pop(answer["number"]).put(answer)
        self._has_ended = True
        for found in list(self._open.values()):
            found.put(None)


class Desk(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """The server, with a thread for each connection and for each episode's process."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, settings: dict):
        """settings: from rl/environments/gateway.py. Raise OSError if the port is not available."""
        self.settings = settings
        self.secret = settings["secret"]
        self.address_family = socket.AF_INET6 if ":" in settings["host"] else socket.AF_INET
        self.lock = threading.Lock()
        self.waiting: deque[EpisodeProcess] = deque()
        self.alive: dict[str, EpisodeProcess] = {}  # by key
        self.keys: set[str] = set()  # of all episodes so far
        self._strangers: dict[socket.socket, float] = {}  # connections without a valid key so far: when they came, oldest first
        self.is_over = False
        self.asked = -math.inf  # time of the last worker's request for an episode
        self._processes = socket.socket(socket.AF_UNIX)
        self._processes.bind(f"\0{settings['name']}")
        self._processes.listen(1024)
        super().__init__((settings["host"], settings["port"]), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore it: a client that breaks its connection affects nobody else."""

    def verify_request(self, request: socket.socket, client_address: Any) -> bool:
        """Count the new connection as a stranger's."""
        with self.lock:
            self._strangers[request] = time.monotonic()
        return True

    def recognise(self, connection: socket.socket) -> None:
        """Count the connection as a stranger's no longer: it has shown a valid key, or is closed."""
        with self.lock:
            self._strangers.pop(connection, None)

    def service_actions(self) -> None:
        """Close connections that show no valid key in time, and the oldest ones if there are too many."""
        with self.lock:
            for connection, since in list(self._strangers.items()):
                if len(self._strangers) <= STRANGERS and time.monotonic() < since + SILENCE:
                    return
                del self._strangers[connection]
                with contextlib.suppress(OSError):  # the client has closed it
                    connection.shutdown(socket.SHUT_RDWR)

    def close_request(self, request: socket.socket) -> None:
        """Close a connection."""
        self.recognise(request)
        super().close_request(request)

    def accept_processes(self) -> None:
        """Serve the processes of this user that connect."""
        while True:
            try:
                channel, _ = self._processes.accept()
            except OSError:  # too many open files
                time.sleep(RETRY)
                continue
            _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user == os.getuid():
                threading.Thread(target=self._hold, args=(channel,), daemon=True).start()
            else:
                channel.close()

    def _hold(self, channel: socket.socket) -> None:
        """Keep an episode for as long as its process lives."""
        with channel, channel.makefile() as lines:
            first = lines.readline()
            if not first.endswith("\n"):
                return
            episode = EpisodeProcess(channel, json.loads(first))
            with self.lock:
                self.keys.add(episode.key)
                self.alive[episode.key] = episode
                if episode.offer:
                    self.waiting.append(episode)
            if not episode.offer:
                self.begin(episode)
            episode.hear(lines)
            with self.lock:
                del self.alive[episode.key]
                if episode in self.waiting:
                    self.waiting.remove(episode)

    def begin(self, episode: EpisodeProcess) -> None:
        """Tell the process that its episode has an agent."""
        episode.tell(url=f"http://127.0.0.1:{self.server_address[1]}/v1", key=episode.key)

    def take(self) -> EpisodeProcess | None:
        """Return the episode that has waited longest; None if there is none."""
        with self.lock:
            self.asked = time.monotonic()
            return self.waiting.popleft() if self.waiting else None

    def remind(self) -> None:
        """Print a line whenever episodes wait and no worker asks for them."""
        while True:
            time.sleep(PATIENCE)
            with self.lock:
                number = len(self.waiting)
                is_idle = len(self.waiting) == len(self.alive)
            if number and is_idle and time.monotonic() > self.asked + PATIENCE:
                where = f"{self.settings['url']}/v1/episodes/next"
                text = f"episodes waiting for a worker: {number} (none has asked at {where} in the last {PATIENCE:.0f} s)"
                print(text, file=sys.stderr, flush=True)


class Handler(BaseHTTPRequestHandler):
    """The connection of an agent or a worker."""

    protocol_version, server_version = "HTTP/1.1", "policy"
    timeout = SILENCE
    wbufsize = 1 << 16  # without a buffer, the second packet of an answer would wait for the first one's acknowledgement
    server: Desk

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def _respond(self) -> None:
        key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        try:
            self._answer(key, f"{self.command} {self.path.partition('?')[0]}")
        except Refused as refused:
            self.send(refused.status, refused.body)

    def _answer(self, key: str, request: str) -> None:
        is_worker = hmac.compare_digest(key.encode(), self.server.secret.encode())
        is_agent = key in self.server.keys
        if is_worker or is_agent:
            self.server.recognise(self.connection)
        body = self._body(LARGEST if is_worker or is_agent else LARGEST_OF_STRANGERS)
        if not (is_worker or is_agent):
            raise Refused(401, "the key is not this session's OPENAI_API_KEY", "invalid_api_key")
        if self.server.is_over:
            raise Refused(410, OVER)
        if is_worker and request == NEXT:
            self._next()
        elif is_agent and request in (CHAT, FINISH):
            self._pass_on(key, request, body)
        elif is_agent and request == MODELS:
            self.send(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}]})
        else:
            raise Refused(404, f"there are {', '.join((MODELS, CHAT, FINISH) if is_agent else (NEXT,))} here")

    def _body(self, most: int) -> str:
        length = self.headers.get("Content-Length", "0" if self.command == "GET" else "")
        if not length.isdecimal() or int(length) > most:
            self.close_connection = True
            raise Refused(413 if length.isdecimal() else 411, f"Content-Length: must be a number up to {most}")
        return self.rfile.read(int(length)).decode(errors="replace")

    def _next(self) -> None:
        episode = self.server.take()
        if episode is None:
            self.write(204, "application/json", "")
            return
        self.server.begin(episode)
        self.send(200, episode.offer | {"api_key": episode.key, "model": MODEL, "timeout": self.server.settings["timeout"]})

    def _pass_on(self, key: str, request: str, body: str) -> None:
        episode = self.server.alive.get(key)
        answer = episode and episode.ask(request, body)
        if not answer:
            raise Refused(410, OVER if self.server.is_over else ENDED)
        self.write(answer["status"], answer["kind"], answer["text"])

    def send(self, status: int, body: dict) -> None:
        """Answer with a JSON object."""
        self.write(status, "application/json", json.dumps(body))

    def write(self, status: int, kind: str, text: str) -> None:
        """Answer with a text. kind: its content type."""
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Print nothing: an agent's calls are counted as turns."""


def main(parent: int) -> None:
    if not descendants.guard(parent):
        return
    control = socket.socket(fileno=os.dup(0))
    settings = json.loads(control.recv(SETTINGS_BYTES))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one file for each episode, and for each connection
    try:
        desk = Desk(settings)
    except OSError as error:
        control.send(json.dumps({"failed": str(error)}).encode())
        return
    for job in (desk.serve_forever, desk.accept_processes, desk.remind):
        threading.Thread(target=job, daemon=True).start()
    control.send(b"{}")
    control.recv(1)  # returns when the run has ended
    desk.is_over = True
    with contextlib.suppress(OSError):  # the rank was killed
        control.send(b"{}")
    time.sleep(LINGER)


if __name__ == "__main__":
    main(int(sys.argv[1]))
