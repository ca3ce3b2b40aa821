"""Text that the user's code prints, on its way to the console: a guard (descendants.py) passes it on, up to limits.

Environments, tools, agents, reward functions and judges run below guards, so this is the one place where their prints are
limited: to EPISODE_BYTES for an episode, and to RUN_BYTES for a run. One line says what is left out. A program that prints more
does not notice.
"""

import contextlib
import functools
import os
import selectors
import socket

EPISODE_BYTES = 1 << 16
RUN_BYTES = 1 << 24
VARIABLE = "RL_PRINTS"  # of a guard: the file whose offset counts the rank's printed bytes, and the rank's limit

OF_EPISODE = f"an episode has printed more than {EPISODE_BYTES >> 10} KiB. The rest of it is left out, as with all others"
OF_RUN = "what environments, tools, agents and reward functions print is left out from here on: the limit of a run is {:,} KiB"

_to_guard: socket.socket | None = None  # takes the reading ends of episodes' pipes


@functools.cache
def counter() -> int:
    """Return this rank's file whose offset is the number of bytes printed: all guards share it and advance it atomically."""
    return os.memfd_create("printed")


def limit() -> str:
    """Return VARIABLE's value: each rank has its share of RUN_BYTES."""
    return f"{counter()} {max(1 << 20, RUN_BYTES // int(os.environ.get('WORLD_SIZE', 1)))}"


class Prints:
    """A guard's side: made before it forks. The process calls `take_over`, and the guard `carry` in a thread."""

    def __init__(self):
        self._counter, self._limit = map(int, os.environ.pop(VARIABLE).split())
        self._from, self._to = os.pipe()
        self._news, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._said: set[str] = set()

    def take_over(self) -> None:
        """Print to the guard from now on."""
        global _to_guard
        os.dup2(self._to, 2)
        for file in (self._from, self._to, self._counter):
            os.close(file)
        self._news.close()
        _to_guard = self._theirs

    def carry(self) -> None:
        """Pass on what is printed, until nobody is left who could print."""
        os.close(self._to)
        self._theirs.close()
        files = selectors.DefaultSelector()
        files.register(self._news, selectors.EVENT_READ)
        files.register(self._from, selectors.EVENT_READ, {})
        while files.get_map():
            for key, _ in files.select():
                if key.fileobj is self._news:
                    data, its, _, _ = socket.recv_fds(self._news, 1, 1)
                    for file in its:
                        files.register(file, selectors.EVENT_READ, {"left": EPISODE_BYTES})
                elif data := os.read(key.fd, 1 << 16):
                    self._pass_on(data, key.data)
                else:
                    os.close(key.fd)
                if not data:
                    files.unregister(key.fileobj)

    def _pass_on(self, data: bytes, episode: dict[str, int]) -> None:
        """Print the data within the limits. episode: the bytes that it may still print; empty for all other code."""
        shown = data[: episode.get("left")]
        if episode:
            episode["left"] -= len(shown)
        left = self._limit + len(shown) - os.lseek(self._counter, len(shown), os.SEEK_CUR)
        _write(shown[: max(0, left)])
        if len(shown) < len(data) and left > 0:
            self._say(OF_EPISODE)
        if 0 <= left < len(shown):  # here it was exceeded, and in no other guard
            self._say(OF_RUN.format(self._limit >> 10))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _write(f"\nwarning: {text}.\n".encode())


def episode_pipe() -> int:
    """Return a new pipe to the console, whose text counts as an episode's."""
    reading, writing = os.pipe()
    socket.send_fds(_to_guard, [b"."], [reading])
    os.close(reading)
    return writing


def begin_episode() -> None:
    """Print to a pipe of this process's own, whose text counts as an episode's."""
    pipe = episode_pipe()
    for file in (1, 2):
        os.dup2(pipe, file)
    os.close(pipe)
    _to_guard.close()


def _write(data: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a console that has gone
        while data:
            data = data[os.write(2, data) :]
