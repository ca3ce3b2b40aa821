"""Attacks on the sandbox (program_grader/sandbox.py), each a program that runs in it. Prints what became of them, as JSON.

Needs nothing but the standard library, so that any Python and any user can run it: `python tests/programs/attacks.py`.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from processes import descendants

from program_grader import sandbox

# Each of these writes "held" if it comes to nothing.
WALLS = {
    "reading a secret": "open(secret)",
    "reading through /proc/1": "open('/proc/1/root' + secret)",
    "reading the sandbox's memory": "open('/proc/1/mem', 'rb')",
    "reading the sandbox's files": "os.listdir('/proc/1/fd')",
    "reading the users": "open('/etc/passwd')",
    "reading a variable": "os.environ['MY_TOKEN']",
    "a connection": "socket.create_connection(('127.0.0.1', tcp), 1)",
    "a connection to the world": "socket.create_connection(('8.8.8.8', 53), 1)",
    "an abstract socket": "socket.socket(socket.AF_UNIX).connect(chr(0) + name)",
    "a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', udp))",
    "a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    "writing to the root": "open('/x', 'w')",
    "writing to Python": "open(os.path.dirname(os.__file__) + '/x.py', 'w')",
    "writing to /dev": "open('/dev/x', 'w')",
    "another user": "os.setuid(0)",
    "namespaces of its own": "check(libc.unshare(0x10000000))",
    "a mount": "check(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None))",
    "tracing the sandbox": "check(libc.ptrace(16, 1, 0, 0))",
    "a higher limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "a signal to a process outside": "os.kill(parent, 9)",
    "seeing processes": "sum(name.isdigit() for name in os.listdir('/proc')) > 2 or check(-1)",
    "a shell": "open('/bin/sh')",
    "3 GB": "bytearray(3 << 30)",
    "300 processes": "forks(300)",
    "300 threads": "[threading.Thread(target=time.sleep, args=(60,), daemon=True).start() for _ in range(300)]",
    "a full disk": "[open(f'/tmp/{n}', 'wb').write(bytes(30 << 20)) for n in range(9)]",
    "a large file": "os.truncate(os.open('/dev/shm/x', os.O_RDWR | os.O_CREAT), 1 << 30)",
    "a memory file": "os.truncate(os.memfd_create('x'), 1 << 30)",
    "300 open files": "[open('/dev/null') for _ in range(300)]",
    "a small memory file": "os.memfd_create('x')",
    "a secret memory file": "check(libc.syscall(447, 0))",
    "a System V segment": "check(libc.shmget(0, 99, 0o1600))",
    "System V semaphores": "check(libc.semget(0, 99, 0o1600))",
    "a System V queue": "check(libc.msgget(0, 0o1600))",
    "a POSIX queue": "check(libc.mq_open(b'/x', os.O_CREAT | os.O_RDWR, 0o600, None))",
    "a key": "check(libc.syscall({'x86_64': 248, 'aarch64': 217}[os.uname().machine], b'user', b'x', b'y', 1, -4))",
    "a ring of the kernel": "check(libc.syscall(425, 8, bytes(200)))",
    "watches of files": "check(libc.inotify_init1(0))",
    "another family of sockets": "socket.socket(socket.AF_INET)",
    "a socket for datagrams": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "a larger buffer": "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)",
    "pages within a pipe": "check(libc.vmsplice(os.pipe()[1], None, 0, 0))",
    "shared memory without a file": "mmap.mmap(-1, 4096)",
    "shared memory of a device": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096)",
    "a new kind of call": "libc.syscall(9999) < 0 and check(-1)",
    "calls of x32": "libc.syscall(0x40000000 + 39) < 0 and check(-1)",
}
HARMLESS = ["reading a secret", "reading the users", "reading a variable", "a connection", "an abstract socket", "a datagram"]
HARMLESS += ["seeing processes", "a shell", "a memory file", "300 open files"]  # also without a sandbox
HARMLESS += ["a small memory file", "another family of sockets", "a socket for datagrams", "a larger buffer"]
HARMLESS += ["watches of files", "pages within a pipe", "shared memory without a file", "shared memory of a device"]
TRIED = """
import ctypes, json, mmap, os, resource, signal, socket, sys, threading, time
globals().update(json.load(sys.stdin))
libc = ctypes.CDLL(None)

def check(result):
    if result < 0: raise OSError

def forks(count):
    for _ in range(count):
        if not os.fork(): signal.pause()

try:
    {attack}
    print("fallen", flush=True)
except (Exception, MemoryError) as error:
    print("held", flush=True)
os._exit(0)
"""
# Each of these takes more than LIMIT of one kind of memory, a bit more with each `take`, unless it is ended.
LIMIT = 0.125  # GiB
MEMORY = {
    "one process": "kept = []\nfor _ in range(20): kept.append(bytes([1]) * (16 << 20)); say(16)",
    "processes": "for _ in range(8):\n if not os.fork(): x = b'1' * (30 << 20); time.sleep(60)\n say(30); time.sleep(.2)",
    "shared mappings": (
        "for n in range(8):\n if not os.fork():\n  f = os.open(f'/tmp/{n}', os.O_RDWR | os.O_CREAT); os.truncate(f, 30 << 20)\n"
        "  m = mmap.mmap(f, 30 << 20); m.write(b'1' * (30 << 20)); time.sleep(60)\n say(30); time.sleep(.2)"
    ),
    "mappings of which a page is left": (
        "libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\nfor _ in range(20):\n"
        " p = libc.mmap(None, ctypes.c_size_t(16 << 20), 3, 0x21, -1, ctypes.c_size_t(0)); ctypes.memset(p, 1, 16 << 20)\n"
        " libc.munmap(ctypes.c_void_p(p + 4096), ctypes.c_size_t((16 << 20) - 4096)); say(16)"
    ),
    "files": "for n in range(40): open(('/tmp', '/dev/shm')[n % 2] + f'/{n}', 'wb').write(bytes(4 << 20)); say(4)",
    "deleted files": (
        "for n in range(40):\n f = os.open(('/tmp', '/dev/shm')[n % 2] + '/x', os.O_RDWR | os.O_CREAT); os.unlink(os.readlink("
        "f'/proc/self/fd/{f}')); os.write(f, bytes(4 << 20)); say(4)"
    ),
    "names of files": "for n in range(200_000):\n os.mknod(f'/tmp/{n}')\n if not n % 1000: say(1)",
    "sockets": (
        "for _ in range(13):\n if not os.fork():\n  pairs = [socket.socketpair() for _ in range(28)]\n"
        "  for end in sum(pairs, ()):\n"
        "   end.setblocking(False)\n   try:\n    while end.send(bytes(4096)): pass\n   except OSError: pass\n  time.sleep(60)\n"
        " say(11); time.sleep(.2)"
    ),
    "sockets nobody accepts": (
        "a = socket.socket(socket.AF_UNIX); a.bind('x'); a.listen(4000); a.setblocking(False)\n"
        "for n in range(3000):\n b = socket.socket(socket.AF_UNIX); b.setblocking(False); b.connect('x')\n"
        " try:\n  while b.send(bytes(4096)): pass\n except OSError: pass\n b.close()\n if not n % 5: say(1)"
    ),
}
# Each of these is ended, as the word says.
ENDED = {
    "waits": ("import time; time.sleep(600)", "timeout"),
    "stops itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "ignores signals": (
        "import signal, time\nfor n in (1, 2, 3, 10, 12, 13, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "timeout",
    ),
    "floods": ("while True: print('x' * 100_000)", "output"),
    "floods in small parts": ("import os\nwhile True: os.write(1, b'x' * 50_000)", "output"),
    "eats": ("x = [bytes(1 << 20) for _ in range(3000)]", "memory"),
    "bombs": ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", "timeout"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "error"),
    "kills all": ("import os, signal\nif not os.fork(): signal.pause()\nos.kill(-1, 9)\nprint('alive')", "ok"),
    "interrupts the sandbox": ("import os\nfor n in (1, 2, 3, 6, 9, 11, 15): os.kill(1, n)\nprint('alive')", "ok"),
    "closes its output": ("import os, time; os.close(1); time.sleep(600)", "timeout"),
}
# What one program leaves, the next one must not find.
LEFT = {
    "a file": ("open('/tmp/x', 'w')", "import os; print(os.listdir('/tmp'))", "[]"),
    "a mode": ("import os; os.chmod('/tmp', 0)", "import os; print(os.listdir('/tmp'))", "[]"),
    "shared memory": (
        "import ctypes; print(ctypes.CDLL(None).shmget(7, 99, 0o1600) >= 0)",
        "import ctypes; print(ctypes.CDLL(None).shmget(7, 99, 0o600) < 0)",
        "True",
    ),
    "a limit of the sandbox's": (
        "import resource; resource.prlimit(1, resource.RLIMIT_FSIZE, (1, 1))",
        "import os; print(os.write(os.open('/tmp/x', os.O_RDWR | os.O_CREAT), b'xy'))",
        "2",
    ),
    "a slow sandbox": (
        "import os; os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)); os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "import os; print(os.sched_getscheduler(0) != os.SCHED_IDLE and os.getpriority(os.PRIO_PROCESS, 0) < 19)",
        "True",
    ),
    "a daemon": (
        "import os, time\nif not os.fork():\n os.setsid()\n if not os.fork():\n  os.close(1); time.sleep(600)\n os._exit(0)",
        "import os; print(sum(name.isdigit() for name in os.listdir('/proc')))",
        "2",
    ),
}


TAKEN = "import ctypes, mmap, os, socket, time\ndef say(mib): print(mib, flush=True)\n{take}\ntime.sleep(60)"


def taken(take: str) -> tuple[str, int]:
    """How a program that takes memory ended, and the MiB that it said it took."""
    ran = sandbox.run(TAKEN.format(take=take), seconds=60, cpu=30, memory_gb=LIMIT)
    return ran.ended, sum(map(int, ran.output.split()))


def in_sandbox(program: str, stdin: str) -> str:
    return sandbox.run(program, stdin=stdin, seconds=20, cpu=10, errors=True).output.strip()


def bare(program: str, stdin: str) -> str:
    """Without a sandbox, to see that the attacks work."""
    done = subprocess.run([sys.executable, "-c", program], input=stdin, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def walls(run: Callable[[str, str], str], secret: Path, names: Iterable[str]) -> dict[str, str]:
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as local,
    ):
        name = f"attacks-{os.getpid()}"
        udp.bind(("127.0.0.1", 0))
        local.bind(f"\0{name}")
        local.listen()
        known = {"secret": str(secret), "name": name, "parent": os.getpid()}
        known |= {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
        found = {wall: run(TRIED.format(attack=WALLS[wall]), json.dumps(known)) for wall in names}
        if "a datagram" in found:  # a network without others takes it
            udp.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                udp.recv(9)
                found["a datagram"] = "received"
    return found


def main() -> None:
    os.environ["MY_TOKEN"] = "secret"
    try:
        sandbox.Sandbox().close()
    except sandbox.NoSandbox as error:
        print(json.dumps({"refused": str(error)}))
        return
    with tempfile.NamedTemporaryFile(dir=os.getcwd()) as secret:
        os.chmod(secret.name, 0o644)
        found = {"bare": walls(bare, Path(secret.name), HARMLESS), "walls": walls(in_sandbox, Path(secret.name), WALLS)}
    found |= {"ended": {}, "left": {}, "memory": {what: taken(take) for what, take in MEMORY.items()}}
    for what, (program, _) in ENDED.items():
        waits = "sleep" in program or "STOP" in program or what == "bombs"
        ran = sandbox.run(program, seconds=1.0 if waits else 30.0, cpu=1, memory_gb=0.5)
        found["ended"][what] = [ran.ended, len(ran.output) if ran.ended == "output" else ran.output]
    for what, (leaving, looking, _) in LEFT.items():
        sandbox.run(leaving)
        found["left"][what] = sandbox.run(looking).output.strip()
    sandbox._own[0].close()
    until = time.monotonic() + 20
    while descendants(os.getpid()) and time.monotonic() < until:
        time.sleep(0.05)
    found["processes"] = len(descendants(os.getpid()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
