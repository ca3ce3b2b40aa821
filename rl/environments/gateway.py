"""The rank's side of the server that agents call: its process is rl/environments/desk.py."""

import contextlib
import json
import os
import platform
import secrets
import socket
import subprocess
import time
import weakref

from rl.environments.args import EnvironmentArgs
from rl.environments.desk import LINGER
from rl.errors import UserError
from rl.rewards import descendants

SECRET = "SERVE_POLICY_KEY"  # the environment variable with the secret
SHORTEST_SECRET = 16  # characters
LARGEST_PORT = 65_535
ANSWER_LIMIT = 30.0  # seconds to wait for an answer


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
    """The rank's handle on the server's process."""

    def __init__(self, args: EnvironmentArgs, name: str, number: int):
        """name: of the Unix socket; number: of the engine. Raise UserError if the port is not available."""
        self.flag = args.environment_flag[0]
        self._serves = bool(args.serve_policy)
        if args.serve_policy:
            host = args.serve_host
            port = args.serve_policy + number
            secret = read_secret()
        else:  # for commands: any port
            host = "127.0.0.1"
            port = 0
            secret = secrets.token_hex(16)
        if port > LARGEST_PORT:
            raise UserError(
                f"--serve-policy {args.serve_policy}: engine {number} would listen at port {port}, above {LARGEST_PORT}. "
                "Give a lower port."
            )
        reached = platform.node() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{reached}:{port}"
        known = {"name": name, "host": host, "port": port, "url": self.url, "timeout": args.env_timeout, "secret": secret}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = descendants.start("rl.environments.desk", passed=(), stdin=theirs, stdout=subprocess.DEVNULL)
        theirs.close()
        self._finalizer = weakref.finalize(self, descendants.end, self._process)
        self._control.settimeout(ANSWER_LIMIT)
        self._control.send(json.dumps(known).encode())
        try:
            answer = json.loads(self._control.recv(1 << 16) or '{"failed": "its process has ended"}')
        except OSError:
            answer = {"failed": "its process does not answer"}
        if "failed" in answer:
            raise UserError(f"{self.flag}: cannot listen at {host}:{port}: {answer['failed']}.")
        if self._serves:
            print(f"episodes for workers: {self.url}/v1/episodes/next, with the key in {SECRET} (docs/agents.md)", flush=True)

    def check(self) -> None:
        """Raise UserError if the process has ended."""
        if self._process.poll() is not None:
            raise UserError(f"{self.flag}: the process that answers agents has exited.")

    def finish(self) -> None:
        """Answer all further requests with the message that the run has ended."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
            self._control.recv(1)  # an answer: it knows

    def close(self) -> None:
        """End the process, once workers know that the run has ended."""
        if self._serves:
            time.sleep(LINGER)
        self._finalizer()
        self._control.close()
