"""A process of the rank's that runs the user's code: reward functions (user_processes/scoring.py), or environments and agents
(user_processes/worker.py). It forks the processes of user_processes/child.py, and ends them when the rank closes or ends.

Both send each other lines of JSON over a socket; nothing is pickled. What the user's code prints goes to stderr, up to a limit.
"""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from rl.errors import UserError

START_LIMIT = 120  # seconds to import what all children share
PATIENCE = 10  # seconds that the process may take to end all that it has started
PRINTED = 1 << 24  # bytes that each kind of the user's code may print in a run
LAST_WORDS = 5  # seconds to pass on what was printed: if the process was killed, one that is left may hold the pipe open

SECRETS = re.compile(  # in a name, or at its end
    r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|JWT|CERT|WEBHOOK|(^|_)(PAT|AK|SK|DSN)$|_PWD$", re.IGNORECASE
)
SERVICES = ("AWS_", "AZURE_", "GOOGLE_", "GCP_", "HF_", "HUGGING_FACE_", "WANDB_", "MLFLOW_", "COMET_", "NEPTUNE_", "SWANLAB_")
SERVICES += ("OPENAI_", "ANTHROPIC_", "GITHUB_", "GITLAB_", "DATABRICKS_", "CLEARML_", "VAULT_")
JOB = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")
JOB_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
HARMLESS = {"HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_MODULES_CACHE"}
PASSWORD_IN_URL = re.compile(r"://[^\s@]+@|AccountKey=")


class Server:
    """The process, seen from the rank."""

    def __init__(self, module: str, settings: dict, environment: dict[str, str], flag: str, whose: str):
        """Start `python -m MODULE`, and set `ready` to its answer to the settings. flag: for the UserError if it has failed;
        whose: for what is printed."""
        self._flag = flag
        self._socket, theirs = socket.socketpair()
        environment = environment | {"PYTHONPATH": python_path(str(Path(__file__).resolve().parents[1]))}
        pipes = {"stdin": theirs, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, "-m", module], env=environment, start_new_session=True, **pipes)
        theirs.close()
        self.pid = self._process.pid
        self._printer = threading.Thread(target=_pass_on, args=(self._process.stderr, whose), daemon=True)
        self._printer.start()
        self._unwritten: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=_write, args=(self._socket, self._unwritten), daemon=True).start()
        self._unread = b""
        self.ready = self.ask(settings)

    def send(self, line: str) -> None:
        """Send a line. This never blocks."""
        self._unwritten.put(line.encode() + b"\n")

    def receive(self, wait: float = 0.0) -> list[dict]:
        """Return the messages that have arrived; wait up to `wait` seconds for one. Raise EOFError if the process ended."""
        arrives = select.poll()
        arrives.register(self._socket, select.POLLIN)
        arrives.poll(1000 * wait)
        found = []
        try:
            while data := self._socket.recv(1 << 20, socket.MSG_DONTWAIT):
                *lines, self._unread = (self._unread + data).split(b"\n")
                found += map(json.loads, lines)
        except BlockingIOError:
            return found
        except ConnectionError:
            pass
        if not found:
            raise EOFError
        return found

    def ask(self, message: dict) -> dict:
        """Return the next message, which answers this one. Raise UserError if it says that something failed."""
        self.send(as_json(message))
        until = time.monotonic() + START_LIMIT
        answers = []
        try:
            while not answers and (left := until - time.monotonic()) > 0:
                answers = self.receive(left)  # nothing if only a part has arrived
        except EOFError:
            answers = [{"failed": "its process ended"}]
        answer = answers[0] if answers else {"failed": f"no answer after {START_LIMIT} s"}
        if "failed" in answer:
            self.close()
            raise UserError(f"{self._flag}: {answer['failed']}")
        return answer

    def close(self) -> None:
        """End the process, which ends all that it has started, and show what was printed. A second call does nothing."""
        if self._process.returncode is not None:
            return
        self._unwritten.put(None)
        self._socket.shutdown(socket.SHUT_RDWR)  # a thread may be sending
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)  # not reaped, so no other group can have its number
            self._process.wait()
        self._socket.close()
        self._printer.join(LAST_WORDS)


def _pass_on(pipe: BinaryIO, whose: str) -> None:
    """Print what arrives in the pipe, up to this rank's share of PRINTED bytes, until its other end is closed; then close it.
    whose: the code, for the line that says what is left out."""
    left = max(1 << 20, PRINTED // int(os.environ.get("WORLD_SIZE", 1)))
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            shown = data[: max(0, left)]
            with contextlib.suppress(OSError):  # a full disk, or a console that was closed
                os.write(2, shown)
                if left >= 0 and len(data) > left:
                    os.write(2, f"\nwarning: what {whose} prints is left out from here on.\n".encode())
            left -= len(data)


def _write(connection: socket.socket, unwritten: SimpleQueue) -> None:
    """Send lines, in a thread: there may be no room for one until the process has read others."""
    try:
        while line := unwritten.get():
            connection.sendall(line)
    except OSError:  # the process has ended: `receive` notices
        pass


def as_json(message: dict) -> str:
    return json.dumps(message, default=plain)


def plain(value: Any) -> Any:
    """Return a numpy scalar or array, bytes or a date of a parquet row as plain Python, for JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def python_path(first: str) -> str:
    """Return PYTHONPATH with one more directory in front of the user's, which may be needed: CANN's set_env.sh sets it."""
    return os.pathsep.join(filter(None, [first, os.environ.get("PYTHONPATH")]))


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of the training job."""
    return {name: value for name, value in environment.items() if not (name.startswith(JOB) or name in JOB_NAMES)}


def without_secrets(environment: Mapping[str, str], passed: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables without secrets and without those of the training job. passed: names or patterns such as MY_* of
    those that stay, from RL_PASS_ENV."""
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, pattern) for pattern in passed) or (without_job({name: value}) and not _is_secret(name, value))
    }


def _is_secret(name: str, value: str) -> bool:
    if name in HARMLESS:
        return False
    return name.upper().startswith(SERVICES) or bool(SECRETS.search(name) or PASSWORD_IN_URL.search(value))
