"""With a full disk, a lost directory or a full console, training continues, warns once, and loses no line if possible."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, environment

from rl.errors import UserError
from rl.record import files, run
from rl.record.files import Files
from rl.record.run import LogArgs, Origin, Run


def fill(path) -> None:
    """From now on, writing to the file fails as on a full disk."""
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/full")


def records(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_that_a_full_disk_refuses_are_written_when_there_is_room(tmp_path, capsys):
    here = Run(LogArgs(output_dir=str(tmp_path), experiment_name="run", logger=("tensorboard",)), {}, 9, True, "script")
    (events,) = (here.dir / "tensorboard").iterdir()
    before = events.read_bytes()
    for name in ("metrics.jsonl", "tickets.jsonl", "val_generations", events):
        if (here.dir / name).is_file():
            (here.dir / name).unlink()
    (here.dir / "val_generations").mkdir()
    everything = [here.dir / "metrics.jsonl", here.dir / "tickets.jsonl", events, here.dir / "val_generations/step_000001.md"]
    for path in everything:
        fill(path)
    for step in (1, 2, 3):
        here.log_generations(step, [{"prompt": "p", "response": "r", "ground_truth": "g", "score": 1.0}])
        here.log_tickets(step, [step])
        here.log(step, {"a": 1.0})
    assert capsys.readouterr().err.count("warning: ") == 1
    for path in everything:
        path.unlink()
    events.write_bytes(before)
    here.log(4, {"a": 1.0})
    assert "can be written again: nothing is missing" in capsys.readouterr().err
    assert records(here.dir / "metrics.jsonl") == [1, 2, 3, 4] and records(here.dir / "tickets.jsonl") == [1, 2, 3]
    assert "| p | r | g | 1.000 |" in everything[-1].read_text()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(here.dir / "tensorboard"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("a")] == [1, 2, 3, 4]


def test_a_line_of_which_the_disk_took_a_part_is_completed_by_the_rest(tmp_path, monkeypatch):
    """The disk takes 7 bytes at a time, then none for a while."""
    room = [7]

    class Tight:
        def __init__(self, path, mode, buffering):
            self.file = open(path, mode, buffering=buffering)  # noqa: SIM115

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data) -> int:
            taken, room[0] = min(room[0], len(data)), max(0, room[0] - len(data))
            if not taken:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:taken])

    monkeypatch.setattr(files, "open", Tight, raising=False)
    here = Files(tmp_path)
    for i in range(10):
        here.append("a", b"line %d\n" % i)
        here.replace("b", b"all of %d\n" % i)
        room[0] = 7 if i % 3 else 0
    room[0] = 10**6
    here.close()
    assert (tmp_path / "a").read_bytes() == b"".join(b"line %d\n" % i for i in range(10))
    assert (tmp_path / "b").read_bytes() == b"all of 9\n"


def test_what_is_not_written_at_the_end_is_counted(tmp_path, capsys):
    here = Files(tmp_path)
    fill(tmp_path / "a")
    here.append("a", b"0123456789")
    here.close()
    assert "1 records of" in capsys.readouterr().err


def test_a_directory_that_is_deleted_ends_nothing(tmp_path, capsys):
    here = Run(LogArgs(output_dir=str(tmp_path), experiment_name="run"), {}, 9, True, "script")
    shutil.rmtree(here.dir)
    here.log(1, {})
    here.log_tickets(1, [1])
    assert capsys.readouterr().err.count("warning: ") == 1
    here.dir.mkdir()
    here.log(2, {})
    assert records(here.dir / "metrics.jsonl") == [1, 2] and records(here.dir / "tickets.jsonl") == [1]
    shutil.rmtree(here.dir)
    here.finish("nowhere")
    err = capsys.readouterr().err
    assert "no reward plot" in err and "Traceback" not in err


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", mounted]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield mounted
    subprocess.run(["umount", mounted], check=True)


def test_a_disk_that_turns_read_only_ends_nothing(small_disk, capsys):
    here = Run(LogArgs(output_dir=str(small_disk), experiment_name="run"), {}, 9, True, "script")
    here._lock.close()
    for step, mode in enumerate(["ro", "ro", "rw"], start=1):
        subprocess.run(["mount", "-o", f"remount,{mode}", small_disk], check=True)
        here.log(step, {})
    assert records(here.dir / "metrics.jsonl") == [1, 2, 3] and capsys.readouterr().err.count("warning: ") == 2
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(UserError, match="cannot be made"):  # at the start there is someone to mend it
        Run(LogArgs(output_dir=str(small_disk)), {}, 9, True, "script")
    with pytest.raises(UserError, match="cannot be written"):
        Run(LogArgs(output_dir=str(small_disk)), {}, 9, True, "script", Origin(here.dir, None))


def test_a_run_whose_disk_is_full_trains_all_its_steps(demo_model, small_disk, tmp_path):
    """Its console's file is on a full disk, too. Only the last checkpoint cannot be skipped."""
    (small_disk / "filler").write_bytes(b"0" * 40_000)
    flags = ["--total-training-steps", "6", "--test-freq", "0", "--output-dir", small_disk, "--experiment-name", "run"]
    command = [sys.executable, "train_sync.py", *flags, "--logger", "console", "tensorboard"]
    with open("/dev/full", "w") as console, open(tmp_path / "err", "w") as err:
        done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=console, stderr=err, timeout=120)
    errors = (tmp_path / "err").read_text()
    assert done.returncode == 1 and "Traceback" not in errors, errors
    assert "the last checkpoint, of step 6, could not be written" in errors and errors.count("Training continues; ") == 1
    assert "run the same command again from the beginning, since no other checkpoint is there" in errors
    assert not list(small_disk.glob("run/step_*"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_no_character_of_a_message_ends_a_run(encoding):
    """A warning quotes a reward's error, which may hold half a character of a response, on a console of any encoding."""
    text = "12 é 数 \ud83d \U0001f600"
    program = "from rl.record import console; from rl.ranks import streams; streams.outlive_output(); "
    program += f"console.ConsoleLog(1).say({text!r}); print('on')"
    env = environment(PYTHONIOENCODING=encoding)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, timeout=60)
    assert done.stdout.splitlines() == [text.encode(encoding, "backslashreplace"), b"on"], done.stderr


def test_lines_of_a_record_that_nobody_wrote_are_set_aside(tmp_path):
    record = tmp_path / "metrics.jsonl"
    odd = [b"\xff\xfe\x00", b"5", b'{"a": 1}', b"[]", b"null", b'{"step": "7"}', b'{"step": null}', b"", b'{"step": true}']
    good = [b'{"step": %d}' % step for step in range(1, 6)]
    record.write_bytes(b"\n".join([*good[:2], *odd, *good[2:], b'{"step": 6, "cut o']))
    run._forget_from(record, 4)
    assert records(record) == [1, 2, 3]
    assert (tmp_path / "metrics_superseded.jsonl").read_bytes() == b"".join(line + b"\n" for line in [*odd, *good[3:]])
    run._forget_from(record, 4)
    run._forget_from(tmp_path / "none.jsonl", 4)
    assert records(record) == [1, 2, 3]


def as_directory(file: Path) -> None:
    file.mkdir()


def as_no_records(file: Path) -> None:
    file.write_bytes(b"[1]\n7\n\xff\xfe\n" + b"[" * 100_000 + b"\n" + b'{"step": "x"}\n{"step": 3')


@pytest.mark.parametrize("name", ["metrics.jsonl", "tickets.jsonl", "experts.jsonl", "validations.jsonl"])
def test_a_resumed_run_meets_its_files_damaged(name, tmp_path):
    here = Run(LogArgs(output_dir=str(tmp_path), experiment_name="run"), {}, 9, True, "script")
    here._lock.close()
    (here.dir / name).unlink(missing_ok=True)
    as_directory(here.dir / name)
    with pytest.raises(UserError, match=rf"{name} cannot be read \(Is a directory\): correct that, or move it away"):
        Run(LogArgs(output_dir=str(tmp_path)), {}, 9, True, "script", Origin(here.dir, None))
    (here.dir / name).rmdir()
    as_no_records(here.dir / name)
    again = Run(LogArgs(output_dir=str(tmp_path)), {}, 9, True, "script", Origin(here.dir, here.dir / "step_000004"))
    again.log(5, {"critic/score/mean": 0.5})
    again.finish(None)
    assert (here.dir / name).read_bytes().count(b"\n") == (name == "metrics.jsonl") and (here.dir / "reward.png").exists()


@pytest.mark.parametrize("make", [as_directory, as_no_records])
def test_the_end_of_a_run_whose_files_somebody_replaced(make, tmp_path, capsys):
    here = Run(LogArgs(output_dir=str(tmp_path), experiment_name="run"), {}, 9, True, "script")
    for file in (here.dir / "metrics.jsonl", here.dir / "reward.png"):
        file.unlink(missing_ok=True)
        make(file)
    here.finish(None)
    assert "Traceback" not in capsys.readouterr().err
