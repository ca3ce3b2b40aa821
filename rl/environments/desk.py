"""The server that gives episodes to workers (--serve-policy): `python -m rl.environments.desk PARENT_PID`, run by gateway.py.

A worker asks for an episode with the run's secret. It gets the row and the episode's key, with which it calls the model and
ends the episode. This process only reads the head of those requests: it passes each connection, as an open file, to the
episode's process, which answers it (rl/environments/chat.py). An episode's process registers by connecting to a Unix socket,
through which it also receives these files.

Left out: encryption. Put a tunnel or a proxy in front of it if you do not control the network.
"""

import contextlib
import errno
import hmac
import json
import os
import re
import resource
import secrets
import socket
import socketserver
import struct
import sys
import threading
import time
from collections import deque
from types import MappingProxyType
from typing import Any

from rl.environments.chat import ENDED, MODEL
from rl.environments.json_server import Handler, Refused, Server, set_deadline
from rl.rewards import descendants

LARGEST = 1 << 16  # bytes of a message between this process and the rank
POLL = 20.0  # seconds that a worker waits for an episode before it is asked to come again
PATIENCE = 60.0  # seconds without a worker after which the console says so
HEAD = 1 << 16  # bytes of a request's head
HEAD_SECONDS = 10.0  # time limit for receiving the whole head
STRANGERS = 256  # connections that have not shown a valid key: one more closes the oldest
LINGER = (1.0, 5.0)  # seconds to keep answering after the run: minimum; maximum, while a worker with an episode does not know
PORT_SECONDS = 10.0  # time limit for a port to become free
OVER = "the run has ended: there will be no more episodes"
TAKEN, CALLED = b"t", b"c"  # messages to an episode's process; CALLED is sent with a connection


class Episode:
    """An episode that its process has offered to workers."""

    def __init__(self, offer: dict, key: str, channel: socket.socket):
        self.offer, self.key, self.channel = offer, key, channel

    def tell(self, what: bytes, *files: int) -> None:
        """Send its process a message, with open files. Raise OSError if the episode has ended."""
        socket.send_fds(self.channel, [what], files)


class Desk(Server):
    """The server for workers."""

    closes = True

    def __init__(self, settings: dict):
        self.settings, self.key = settings, settings["secret"]
        self.address_family = socket.AF_INET6 if ":" in settings["host"] else socket.AF_INET
        self.changed = threading.Condition()
        self.waiting: deque[Episode] = deque()
        self.alive: dict[str, Episode] = {}
        self.is_over = False
        self.unaware: set[str] = set()  # keys of workers that do not know yet that the run is over
        self.asked = 0.0  # time of the last worker's request for an episode
        self._run, self._count = secrets.token_hex(4), 0
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        self._door = threading.Lock()  # of the strangers
        super().__init__((settings["host"], settings["port"]), DeskHandler)

    def process_request(self, request: socket.socket, client_address: Any) -> None:
        """Start the connection's thread. Connections without a key cannot use up the open files: the oldest is closed."""
        with self._door:
            self._strangers[request] = None
            if len(self._strangers) > STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):  # it has been disconnected
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def is_stranger(self, request: socket.socket) -> bool:
        """Return whether the connection is open and has not shown a valid key."""
        with self._door:
            return request in self._strangers

    def forget(self, request: socket.socket) -> bool:
        """Count the connection as a stranger's no longer. Return False if it has been closed as the oldest."""
        with self._door:
            was_open = request in self._strangers
            self._strangers.pop(request, None)
        return was_open

    def shutdown_request(self, request: socket.socket) -> None:
        """Close only this process's file: the connection may belong to an episode's process now."""
        self.forget(request)
        self.close_request(request)

    def sign(self, name: str) -> str:
        """Return the key of the episode with this name."""
        return f"{name}-{hmac.digest(self.key.encode(), name.encode(), 'sha256').hex()[:32]}"

    def is_signed(self, key: str) -> bool:
        """Return whether the key is an episode's, of this run or of another run with the same secret."""
        return hmac.compare_digest(self.sign(key.rpartition("-")[0]), key)

    def knows(self, key: str) -> bool:
        """Return whether the key is the secret or an episode's."""
        return hmac.compare_digest(key, self.key) or self.is_signed(key)

    def offer(self, offer: dict, channel: socket.socket) -> Episode:
        """Let workers take an episode."""
        with self.changed:
            self._count += 1
            episode = Episode(offer, self.sign(f"{self._run}-{self._count}"), channel)
            self.alive[episode.key] = episode
            self.waiting.append(episode)
            self.changed.notify()
        return episode

    def withdraw(self, episode: Episode) -> None:
        """Remove an episode whose process has ended."""
        with self.changed:
            del self.alive[episode.key]
            if episode in self.waiting:
                self.waiting.remove(episode)

    def give_back(self, episode: Episode) -> None:
        """Offer the episode to the next worker, because this one did not read the answer."""
        with self.changed:
            if episode.key in self.alive:
                self.waiting.appendleft(episode)
            self.changed.notify()

    def take(self, asks: "DeskHandler") -> Episode | None:
        """Return the episode that has waited longest; None if there is none within POLL. Raise Refused if the run has ended."""
        with self.changed:
            self.asked = time.monotonic()
            self.changed.wait_for(lambda: self.waiting or self.is_over, POLL)
            self.asked = time.monotonic()
            if self.is_over:
                raise Refused(410, OVER)
            if self.waiting and asks.is_open():
                return self.waiting.popleft()
            self.changed.notify()
        return None

    def counts(self) -> dict:
        """Return the numbers of waiting and taken episodes, and the seconds since a worker last asked for one."""
        with self.changed:
            waiting, ago = len(self.waiting), time.monotonic() - self.asked if self.asked else None
            return {"waiting": waiting, "taken": len(self.alive) - waiting, "seconds_since_asked": ago}

    def text(self) -> str:
        """Return the counts in words."""
        found = self.counts()
        ago = found["seconds_since_asked"]
        asked = "none has asked" if ago is None else f"the last one asked {ago:.0f} s ago"
        return f"{found['waiting']} wait for workers ({asked} at {self.settings['url']}), {found['taken']} are taken"

    def finish(self) -> None:
        """Refuse all requests of workers from now on, because the run has ended."""
        with self.changed:
            self.is_over = True
            self.unaware = self.alive.keys() - {episode.key for episode in self.waiting}
            self.changed.notify_all()

    def linger(self) -> None:
        """Wait until workers have heard that the run has ended."""
        started, (least, most) = time.monotonic(), LINGER if self.asked else (0.0, 0.0)
        while time.monotonic() < started + (most if self.unaware else least):
            time.sleep(0.05)

    def remind(self) -> None:
        """Print a line whenever episodes wait and no worker asks for them."""
        while True:
            time.sleep(PATIENCE)
            found = self.counts()
            if found["waiting"] and not found["taken"] and (found["seconds_since_asked"] or PATIENCE) >= PATIENCE:
                print(f"waiting for workers: {self.text()}", file=sys.stderr, flush=True)


class DeskHandler(Handler):
    """A worker's connection, for one request."""

    server: Desk
    routes = MappingProxyType({"POST /v1/episodes/next": "next", "GET /v1/episodes": "status"})

    def handle(self) -> None:
        """Hand a connection with an episode's key to the episode's process."""
        key = self._peek()
        if key is None or (self.server.knows(key) and not self.server.forget(self.connection)):
            return
        episode = self.server.alive.get(key)
        if episode and not self.server.is_over:
            with contextlib.suppress(OSError):  # the episode ends at this moment
                episode.tell(CALLED, self.connection.fileno())
                return
        super().handle()

    def _peek(self) -> str | None:
        """Return the request's key without consuming the request; None without a whole head. Raise TimeoutError after
        HEAD_SECONDS."""
        deadline = time.monotonic() + HEAD_SECONDS
        while True:
            set_deadline(self.connection, deadline)
            head = self.connection.recv(HEAD, socket.MSG_PEEK)
            if b"\r\n\r\n" in head:
                break
            if not head or len(head) == HEAD or not self.server.is_stranger(self.connection):
                return None
            time.sleep(0.01)
        self.connection.settimeout(None)
        found = re.search(rb"\r\nAuthorization: *Bearer +([\x21-\x7e]+) *\r\n", head.partition(b"\r\n\r\n")[0] + b"\r\n", re.I)
        return found[1].decode() if found else ""

    def wrong_key(self) -> Refused | None:
        """Check the key as usual, and refuse the key of an ended episode with status 410."""
        if self.given_key.isascii() and self.server.is_signed(self.given_key):
            self.server.unaware.discard(self.given_key)
            return Refused(410, OVER if self.server.is_over else ENDED)
        return super().wrong_key()

    def next(self, _: dict) -> None:
        """Give the worker an episode, or answer 204 if there is none within POLL."""
        episode = self.server.take(self)
        if episode is None:
            self.write(204, "application/json", b"")
            return
        url = self._url()
        more = {"base_url": f"{url}/v1", "api_key": episode.key, "model": MODEL, "timeout": self.server.settings["timeout"]}
        try:
            self.send(200, episode.offer | more)
        except OSError:
            self.server.give_back(episode)
            raise
        with contextlib.suppress(OSError):
            episode.tell(TAKEN)

    def _url(self) -> str:
        """Return the server's address as the worker sees it, through a TLS proxy also."""
        if "Host" not in self.headers:
            return self.server.settings["url"]
        scheme = self.headers.get("X-Forwarded-Proto", "").lower()
        return f"{scheme if scheme in ('http', 'https') else 'http'}://{self.headers['Host']}"

    def status(self, _: dict) -> dict:
        """Return the numbers of episodes."""
        return self.server.counts()


class Offers(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The server for the episodes' processes."""

    daemon_threads, block_on_close, request_queue_size = True, False, 1024

    def __init__(self, name: str, desk: Desk):
        self.desk = desk
        super().__init__(f"\0{name}", OfferHandler)

    def verify_request(self, request: socket.socket, client_address: Any) -> bool:
        """Return whether the request is from a process of this user."""
        _, user, _ = struct.unpack("3i", request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return user == os.getuid()


class OfferHandler(socketserver.StreamRequestHandler):
    """The connection of an episode's process, open for as long as the process lives."""

    def handle(self) -> None:
        line = self.rfile.readline()
        if not line.endswith(b"\n"):
            return
        episode = self.server.desk.offer(json.loads(line), self.connection)
        try:
            with contextlib.suppress(OSError):
                self.connection.recv(1)  # returns when the process ends: it sends nothing more
        finally:
            self.server.desk.withdraw(episode)


def main(parent: int) -> None:
    if not descendants.guard(parent):
        return
    control = socket.socket(fileno=os.dup(0))
    settings = json.loads(control.recv(LARGEST))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one file for each episode, and for each connection
    try:
        desk = listen(settings)
    except OSError as error:
        control.send(json.dumps({"number": settings["number"], "failed": str(error)}).encode())
        return
    offers = Offers(settings["name"], desk)
    for job in (desk.serve_forever, offers.serve_forever, desk.remind):
        threading.Thread(target=job, daemon=True).start()
    control.send(json.dumps({"number": settings["number"]}).encode())
    while data := control.recv(LARGEST):
        message = json.loads(data)
        {"finish": desk.finish, "linger": desk.linger, "status": desk.text}[message["do"]]()
        control.send(json.dumps({"number": message["number"], "status": desk.text()}).encode())


def listen(settings: dict) -> Desk:
    """Return the server once its port is free: a run that has just ended may still use it. Raise OSError if it stays used."""
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        try:
            return Desk(settings)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


if __name__ == "__main__":
    main(int(sys.argv[1]))
