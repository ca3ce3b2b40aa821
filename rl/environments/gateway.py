"""The rank's side of the server that agents call: its process is rl/environments/endpoint.py."""

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
from rl.errors import UserError
from rl.rewards import descendants

SECRET = "SERVE_POLICY_KEY"  # the environment variable with the secret
SHORTEST_SECRET = 16  # characters
LINGER = 5.0  # seconds after the run in which workers hear of its end


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
        """name: of the Unix socket for episodes' processes; number: of the engine. Raise UserError if the port is not
        available."""
        self.flag = args.environment_flag[0]
        self._serves = bool(args.serve_policy)
        host, port = (args.serve_host, args.serve_policy + number) if args.serve_policy else ("127.0.0.1", 0)
        secret = read_secret() if args.serve_policy else secrets.token_hex(16)
        is_v6 = ":" in host
        kind = {"family": socket.AF_INET6, "dualstack_ipv6": socket.has_dualstack_ipv6()} if is_v6 else {}
        try:
            agents = socket.create_server((host, port), **kind)
        except (OSError, OverflowError) as error:
            raise UserError(f"{self.flag}: cannot listen at {host}:{port}: {error}. Give another port or address.") from None
        reached = platform.node() if host in ("0.0.0.0", "::") else f"[{host}]" if is_v6 else host
        self.url = f"http://{reached}:{agents.getsockname()[1]}"
        processes = socket.socket(socket.AF_UNIX)
        processes.bind(f"\0{name}")
        processes.listen(1024)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with agents, processes, theirs:
            self._process = descendants.start("rl.environments.endpoint", passed=(), stdin=theirs, stdout=subprocess.DEVNULL)
            self._finalizer = weakref.finalize(self, descendants.end, self._process)
            known = {"secret": secret, "url": self.url, "timeout": args.env_timeout}
            socket.send_fds(self._control, [json.dumps(known).encode()], [processes.fileno(), agents.fileno()])
        if self._serves:
            print(f"episodes for workers: {self.url}/v1/episodes/next, with the key in {SECRET} (docs/agents.md)", flush=True)

    def check(self) -> None:
        """Raise UserError if the process has ended."""
        if self._process.poll() is not None:
            raise UserError(f"{self.flag}: the process that answers agents has exited.")

    def finish(self) -> None:
        """Answer all further requests with the message that the run has ended."""
        with contextlib.suppress(OSError):  # the process has ended
            self._control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the process, once workers know that the run has ended."""
        if self._serves:
            time.sleep(LINGER)
        self._finalizer()
        self._control.close()
