"""The rank's side of the server that gives episodes to workers (--serve-policy): its process is rl/environments/desk.py."""

import json
import os
import platform
import socket
import subprocess
import threading
import weakref

from rl.environments.desk import LARGEST
from rl.errors import UserError
from rl.ranks import watchdog
from rl.rewards import descendants

SECRET = "SERVE_POLICY_KEY"  # the environment variable with the secret
SHORTEST_SECRET = 16  # characters
ANSWER_LIMIT = 30.0  # seconds to wait for an answer
STATUS_LIMIT = 1.0  # seconds to wait for the status: the watchdog's thread asks for it


def read_secret() -> str:
    """Return the secret that workers must have. Raise UserError if it is not set or unsuitable."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < SHORTEST_SECRET or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise UserError(
            f"--serve-policy: set {SECRET}, the secret of its workers, to {SHORTEST_SECRET} ASCII characters or more without "
            f"blanks: export {SECRET}=$(openssl rand -hex 16)"
        )
    return secret


class Gateway:
    """The rank's handle on the gateway's process."""

    def __init__(self, name: str, host: str, port: int, timeout: float):
        """name: of the Unix socket; timeout: --env-timeout, in seconds. Raise UserError if the port is not available."""
        secret = read_secret()
        self._one_at_a_time, self._asked = threading.Lock(), 0  # the watchdog's thread also asks
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        nowhere = subprocess.DEVNULL
        self._process = descendants.start("rl.environments.desk", passed=(), stdin=theirs, stdout=nowhere)
        theirs.close()
        self._finalizer = weakref.finalize(self, descendants.end, self._process)
        reached = platform.node() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{reached}:{port}"
        known = {"name": name, "host": host, "port": port, "url": self.url, "timeout": timeout, "secret": secret}
        answer = self._ask(known)
        if "failed" in answer:
            raise UserError(f"--serve-policy: cannot listen at {host}:{port}: {answer['failed']}.")
        print(f"episodes for workers: {self.url}/v1/episodes/next, with the key in {SECRET} (docs/agents.md)", flush=True)
        watchdog.show("episodes for workers", self.status)

    def _ask(self, message: dict, limit: float = ANSWER_LIMIT) -> dict:
        """Return the answer, or {"failed": why}. limit: seconds for the question before it, and for its own answer."""
        silent = {"failed": "its process does not answer"}
        if not self._one_at_a_time.acquire(timeout=limit):
            return silent
        try:
            self._asked += 1
            self._control.settimeout(limit)
            self._control.send(json.dumps(message | {"number": self._asked}).encode())
            while data := self._control.recv(LARGEST):
                answer = json.loads(data)
                if answer["number"] == self._asked:  # the others are late
                    return answer
            return {"failed": "its process has ended"}
        except OSError:
            return silent
        finally:
            self._one_at_a_time.release()

    def status(self) -> str:
        """Return the numbers of episodes that wait for a worker and that are taken, in words."""
        answer = self._ask({"do": "status"}, STATUS_LIMIT)
        return answer.get("status") or answer["failed"]

    def check(self) -> None:
        """Raise UserError if the process has ended."""
        if self._process.poll() is not None:
            raise UserError(f"--serve-policy: the process that serves {self.url} has exited.")

    def finish(self) -> None:
        """Answer all further requests of workers with the message that the run has ended."""
        self._ask({"do": "finish"})

    def close(self) -> None:
        """End the process once workers know that the run has ended."""
        self._ask({"do": "linger"})
        self._finalizer()
