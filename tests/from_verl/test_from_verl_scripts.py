"""tools.from_verl finds verl's command in real shell scripts: behind guards, on clusters, in containers, output redirected."""

import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from helpers import ROOT

from rl.errors import UserError
from tools.from_verl.command import read_script

KEYS = "data.train_batch_size=8 actor_rollout_ref.rollout.n=4"
VERL = f"python3 -m verl.trainer.main_ppo {KEYS}"
WAYS = {
    "into a file": f"{VERL} > train.log 2>&1",
    "appended, in the background": f"nohup {VERL} >> logs/$(date +%F).log 2>&1 &",
    "in the background, after a while": f"(for ((i = 0; i < 20000; i++)); do :; done; {VERL}) >> a.log 2>&1 &",
    "before others in the background": f"(for ((i = 0; i < 20000; i++)); do :; done; {VERL}) &\n{VERL} data.seed=7 & wait",
    "while a loop watches the device": f"while true; do nvidia-smi >> gpu.log; sleep 60; done &\n{VERL}\nkill $!",
    "and watched to its end": f"{VERL} & pid=$!; while kill -0 $pid; do sleep 5; done; tail train.log",
    "both into a file, without a number": f"{VERL} >& log.txt",
    "close to its last key": f"{VERL}>train.log",
    "into a file whose name is a command": f'{VERL} 2>> "$(dirname "$0")/`date +%F`.log" > ${{LOG:-a b}}/\\ c',
    "after a here-document": f"cat > env.yaml <<'EOF'\nit's: a > b\nEOF\n{VERL} > train.log",
    "both into a file": f"{VERL} &> 'my log.txt' # don't\n",
    "each into a file": f"{VERL} 2>err.log >out_`date`.log",
    "through tee": f"{VERL} 2>&1 | tee train.log",
    "into tee": f"{VERL} > >(tee a.log) 2> >(tee b.log >&2)",
    "from another directory": f"cd /opt/verl || exit 1\npushd x && {VERL} && popd",
    "behind a check of the machine": f"command -v nvidia-smi || exit 1\n[ -d /data ] || {{ echo no data; exit 2; }}\n{VERL}",
    "with the line ends of Windows": VERL.replace(" data", " \\\r\n  data") + "\r\n",
    "in a container": f"docker exec -it verl bash -c '{VERL}'",
    "in a container, all of it": f'docker run img bash -lc "cd /w && {VERL} > a.log 2>&1"',
    "on a cluster": f"nodes=($(scontrol show hostnames))\nsrun --overlap -w ${{nodes[0]}} {VERL}",
    "by Ray": f"ray job submit --no-wait --working-dir . -- {VERL}",
}


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


@pytest.mark.parametrize("end", ["exit 1", "command exit 1", "builtin exit", "command -- exit", "command logout", "exec true"])
def test_what_would_end_the_script_does_not_hide_its_start(end):
    assert read_script(f"{end}\n{VERL}").module == "verl.trainer.main_ppo"


def test_no_connection_is_made():
    """bash itself connects to /dev/tcp/HOST/PORT."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        read_script(f"read x < /dev/tcp/127.0.0.1/{port}; exec 5<>/dev/tcp/127.0.0.1/{port}; echo > /dev/udp/x/1\n{VERL}")
        with pytest.raises(TimeoutError):
            server.accept()


def test_long_commands_into_a_pipe_are_read_whole():
    """Both ends of a pipe are noted at the same time, a long command in many pieces."""
    keys = {f"data.key_{i}": i for i in range(1500)}
    words = " ".join(f"{key}={value}" for key, value in keys.items())
    for _ in range(8):
        command = read_script(f"python3 -m verl.trainer.main_ppo {words} 2>&1 | tee a.log | tee b.log | tee c.log")
        assert command.values == keys and not command.unread


@pytest.mark.slow
def test_a_loop_without_end_after_the_start_does_not_hide_it_and_leaves_no_process(monkeypatch):
    monkeypatch.setattr("tools.from_verl.command.SECONDS_TO_READ", 3)
    mark = f"mark_{uuid.uuid4().hex}"
    command = read_script(f"{VERL}\n(while true; do : {mark}; done) & while ps; do sleep 1; done")
    assert command.values["data.train_batch_size"] == 8
    assert any("did not come to the end" in note for note in command.notes)
    deadline = time.monotonic() + 60  # a signal takes a moment
    while any(mark in _text(path) for path in Path("/proc").glob("[0-9]*/environ")):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""


def test_a_value_may_look_like_a_file_or_a_command():
    name = "a > b & python -m verl.trainer.main_ppo c=1"
    command = read_script(f"{VERL} trainer.experiment_name='{name}' > train.log")
    assert command.module == "verl.trainer.main_ppo" and command.values["trainer.experiment_name"] == name


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ("X=15 # > '", 15),
        ("N=1; if (( N > 1 )); then X=8; else X=4; fi", 4),
        ("if [[ b > a ]]; then X=8; fi; X=$(( X > 7 ))", 1),
        ("n=5; while (( n > 3 )); do n=$((n - 1)); done; X=$n", 3),
        ("X=x\\>y", "x>y"),
        ("X=${NONE:->y}", ">y"),
        ("X=$'x\\'>y'", "x'>y"),
        ("{ X=8; } > log", 8),
        ("f() { X=8; }; f >& /dev/null", 8),
        ("echo 8 > log && X=8", 8),
        ("X=$(echo 7 > log)8", 8),
        ("X=`echo 8 2>/dev/null`", 8),
        ('X="$(cd "$(echo /x)" >/dev/null 2>&1 && echo "8")"', 8),
        ("read X < <(echo 8 2> log)", 8),
        ("X=$(( $(echo 8 2>/dev/null) * 2 ))", 16),
        ("cat <<EOF\n> $((1 > 2)) it's\nEOF\nX=8", 8),
    ],
)
def test_a_redirection_changes_no_value(before, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for after in (">train.log", " 2>&1 | tee a.log", "&>log", ""):
        command = read_script(f"{before}\n{VERL} x=$X{after}")
        assert command.values["x"] == value and not command.notes
    assert not any(tmp_path.iterdir())


def test_an_unclear_redirection_is_reported():
    unclear = "cat <<A <<B > log\na > '\nA\nb\nB\n"
    with pytest.raises(UserError, match=r"does not start verl.*train\.log: restricted: cannot redirect output"):
        read_script(f"{unclear}{VERL} > train.log")
    (note,) = read_script(f"{unclear}{VERL}").notes
    assert "log: restricted: cannot redirect output" in note and "check what depends on them" in note


def test_the_error_says_why_a_script_ended_early():
    with pytest.raises(UserError, match=r"does not start verl.*DATA: set DATA"):
        read_script(f"echo ${{DATA:?set DATA}}\n{VERL}")
