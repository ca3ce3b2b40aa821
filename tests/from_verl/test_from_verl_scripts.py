"""tools.from_verl finds verl's command in real shell scripts: behind guards, on clusters, in containers, output redirected."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from rl.errors import UserError
from tools.from_verl.command import read_script

KEYS = "data.train_batch_size=8 actor_rollout_ref.rollout.n=4"
VERL = f"python3 -m verl.trainer.main_ppo {KEYS}"


def rows(name: str) -> list[list]:
    return list(map(json.loads, (ROOT / "tests" / "fixtures" / "verl" / f"{name}.jsonl").read_text().splitlines()))


WAYS = {way: text.replace("<VERL>", VERL) for way, text in rows("ways")}
WAYS["with the line ends of Windows"] = VERL.replace(" data", " \\\r\n  data") + "\r\n"


@pytest.mark.parametrize("way", WAYS)
def test_the_way_verl_is_started_changes_no_key(way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = read_script(WAYS[way])
    assert command.module == "verl.trainer.main_ppo"
    assert command.values == {"data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 4}
    assert not any(tmp_path.iterdir()), "reading a script writes nothing"


# A line each would end or stop process PID, or damage FILE, if anything of it were run.
HARM = (ROOT / "tests" / "fixtures" / "verl" / "harm.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("spelling", HARM)
def test_nothing_is_run_however_it_is_spelt(spelling, sleeper, tmp_path, monkeypatch):
    """Our own process survives, no file changes, and verl's command is still found after the line."""
    victim = tmp_path / "file"
    victim.write_text("here")
    (tmp_path / "kills.sh").write_text(f"command kill -9 {sleeper.pid}\n/bin/kill -9 {sleeper.pid}\n")
    monkeypatch.chdir(tmp_path)
    harm = spelling.replace("PID", str(sleeper.pid)).replace("FILE", str(victim)).replace("DIR", str(tmp_path))
    command = read_script(f"{harm}\n{VERL}")
    assert command.values["data.train_batch_size"] == 8
    assert sleeper.poll() is None and Path(f"/proc/{sleeper.pid}/status").read_text().split("State:\t")[1][0] in "SR"
    assert victim.read_text() == "here" and {path.name for path in tmp_path.iterdir()} == {"file", "kills.sh"}


def test_no_connection_is_made():
    """bash itself connects to /dev/tcp/HOST/PORT."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        read_script(f"read x < /dev/tcp/127.0.0.1/{port}; exec 5<>/dev/tcp/127.0.0.1/{port}; echo > /dev/udp/x/1\n{VERL}")
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_value_may_look_like_a_file_or_a_command():
    name = "a > b & python -m verl.trainer.main_ppo c=1"
    command = read_script(f"{VERL} trainer.experiment_name='{name}' > train.log")
    assert command.module == "verl.trainer.main_ppo" and command.values["trainer.experiment_name"] == name


@pytest.mark.parametrize(("before", "value"), rows("redirections"))
def test_a_redirection_changes_no_value(before, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for after in (">train.log", " 2>&1 | tee a.log", "&>log", ""):
        command = read_script(f"{before}\n{VERL} x=$X{after}")
        assert command.values["x"] == value and not command.notes
    assert not any(tmp_path.iterdir())


def test_the_error_says_why_a_script_ended_early():
    with pytest.raises(UserError, match=r"does not start verl.*DATA: set DATA"):
        read_script(f"echo ${{DATA:?set DATA}}\n{VERL}")
