"""The record of a run's samples: everything written is read back, even after failed writes."""

import os
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import make_group, run_script

from rl.errors import UserError
from rl.samples import recorder
from rl.samples.group import Group
from rl.samples.recorder import Recorder
from tools.recorded import Record


def groups(step: int, n: int = 3, tokens: int = 40) -> list:
    """Return the groups of a step, all different, with and without masks."""
    rng = np.random.default_rng(step)
    sizes = lambda: [int(rng.integers(1, tokens)) for _ in range(4)]  # noqa: E731
    return [make_group(100 * step + i, sizes(), rng=rng, masked=bool(i % 2), unscored=(i,)) for i in range(n)]


def as_bytes(of_step) -> list[bytes]:
    """Return each group's record, made again of what was read."""
    return [replace(group).to_bytes() for group in of_step]


def record(run, steps: int, after: int = 0, keeps_all: bool = True) -> Recorder:
    """Record the steps after `after`, as a run in this directory does."""
    writer = Recorder(run, after, keeps_all)
    writer.begin({"after": after, "flags": {"lr": after}})
    for step in range(after + 1, after + steps + 1):
        writer.write(step, groups(step))
    return writer


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py")])


def test_what_is_recorded_is_read(tmp_path):
    record(tmp_path, 5)
    back = Record(tmp_path)
    assert back.steps == [1, 2, 3, 4, 5]
    for step in back.steps:
        assert as_bytes(back.groups(step)) == as_bytes(groups(step))
        masks = lambda of: [None if r.mask is None else r.mask.tolist() for g in of for r in g.responses]  # noqa: E731
        assert masks(back.groups(step)) == masks(groups(step)) and any(masks(groups(step)))
    start = back.start_of(3)
    assert start["flags"] == {"lr": 0} and (tmp_path / "samples" / start["file"]).read_text() == "x = 1\n"


def test_a_group_that_was_read_has_its_record_and_a_changed_one_its_own():
    group, _, other = groups(1)
    read = Group.from_bytes(record := group.to_bytes())
    assert read.to_bytes() == record == replace(read).to_bytes()
    changed = replace(read, responses=other.responses)
    assert changed.to_bytes() == replace(group, responses=other.responses).to_bytes() != record


def test_a_damaged_step_is_named(tmp_path):
    record(tmp_path, 3)
    file = tmp_path / "samples" / "step_000002.rec"
    file.write_bytes(file.read_bytes()[:-9])
    back = Record(tmp_path)
    assert as_bytes(back.groups(3)) == as_bytes(groups(3))
    with pytest.raises(UserError, match=r"step_000002\.rec cannot be read \("):
        back.groups(2)


def test_a_resumed_run_takes_its_record_back_to_the_checkpoint(tmp_path):
    record(tmp_path, 6)
    (tmp_path / "samples" / "step_000007.partial").write_bytes(b"killed")
    record(tmp_path, 4, after=3)
    back = Record(tmp_path)
    assert back.steps == [1, 2, 3, 4, 5, 6, 7]
    assert [back.start_of(step)["flags"]["lr"] for step in (3, 4)] == [0, 3]
    record(tmp_path, 1, after=0)  # nothing was saved: from the beginning
    back = Record(tmp_path)
    assert back.steps == [1] and len(back.starts) == 1


def test_groups_that_are_left_out_are_read_apart(tmp_path):
    """A replay learns from the others alone. They go with their step."""
    writer = record(tmp_path, 11, keeps_all=False)
    writer.write(12, groups(12), left_out=groups(99))
    back = Record(tmp_path)
    assert as_bytes(back.groups(12)) == as_bytes(groups(12)) and as_bytes(back.left_out(12)) == as_bytes(groups(99))
    assert back.left_out(11) == [] and back.steps == [*range(1, 13)]
    for step in range(13, 34):
        writer.write(step, groups(step))
    assert not Record(tmp_path).left_out(12)
    writer.write(34, groups(34), left_out=groups(99))
    record(tmp_path, 1, after=33)
    assert not Record(tmp_path).left_out(34), "a resumed run trains the step again"


def test_recent_keeps_the_newest_steps_and_every_tenth(tmp_path):
    writer = record(tmp_path, 47, keeps_all=False)
    assert Record(tmp_path).steps == [10, 20, *range(28, 48)]
    writer.write(48, groups(48))
    assert Record(tmp_path).steps == [10, 20, *range(29, 49)]


def test_where_nothing_can_be_or_is_recorded(tmp_path):
    (tmp_path / "samples").write_text("")
    with pytest.raises(
        UserError, match=r"samples cannot be written \(File exists\)\. Leave samples out with --record-samples off"
    ):
        Recorder(tmp_path, 0, True)
    with pytest.raises(UserError, match="nowhere is no run that recorded its samples"):
        Record(tmp_path / "nowhere")


def test_a_full_disk_leaves_a_step_out_and_no_more(tmp_path, capfd, monkeypatch):
    writer = record(tmp_path, 2)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(recorder.os, "replace", full)
        writer.write(3, groups(3))
        writer.write(4, groups(4))
    writer.write(5, groups(5))
    back = Record(tmp_path)
    assert back.steps == [1, 2, 5] and as_bytes(back.groups(5)) == as_bytes(groups(5))
    assert capfd.readouterr().err.count("step 3 is not recorded (No space left on device)") == 1


SLOW = """
import time
from rl.checkpoint.saver import Saver
from rl.samples.recorder import Recorder

write, save = Recorder.write, Saver.save

def write_slowly(self, *its):
    time.sleep(1)
    write(self, *its)

def save_if_recorded(self, step, *its):
    assert (self.run_dir / "samples" / f"step_{step:06d}.rec").exists()
    save(self, step, *its)

Recorder.write, Saver.save = write_slowly, save_if_recorded
"""


@pytest.mark.runs
def test_a_checkpoint_is_saved_once_its_steps_are_recorded(demo_model, tmp_path):
    flags = ("--total-training-steps", 3, "--save-freq", 2, "--test-freq", 0, "--output-dir", tmp_path / "runs")
    run_script("tests/programs/patched.py", SLOW, "train_sync.py", *flags)
    (run,) = (tmp_path / "runs").iterdir()
    assert Record(run).steps == [1, 2, 3] and len((run / "groups.jsonl").read_text().splitlines()) == 3


def test_recent_stays_within_its_bytes(tmp_path, monkeypatch):
    writer = record(tmp_path, 30, keeps_all=False)
    size = lambda: sum(file.stat().st_size for file in (tmp_path / "samples").glob("*.rec"))  # noqa: E731
    monkeypatch.setattr(recorder, "MOST_BYTES", size() // 2)
    writer.write(31, groups(31))
    kept = Record(tmp_path).steps
    assert size() <= recorder.MOST_BYTES and kept == list(range(kept[0], 32)) and kept[0] > 12
    monkeypatch.setattr(recorder, "MOST_BYTES", 1)
    writer.write(32, groups(32))
    assert Record(tmp_path).steps == [32]  # the newest stays, however large


@pytest.mark.parametrize(("vocabulary", "length"), [(150_000, 300), (32_000, 64)])
def test_a_token_takes_at_most_12_bytes(tmp_path, vocabulary, length):
    """Prompts included: random tokens of a large vocabulary and random log-probs, which nothing compresses."""
    rng = np.random.default_rng(0)
    of_step, tokens = [], 0
    for ticket in range(16):
        group = make_group(ticket, [length] * 8, prompt=100, rng=rng)
        for response in group.responses:
            response.token_ids[:] = rng.integers(0, vocabulary, length)
        group.prompt_ids[:] = rng.integers(0, vocabulary, 100)
        tokens += 8 * length + 100
        of_step.append(group)
    writer = Recorder(tmp_path, 0, True)
    writer.write(1, of_step)
    assert os.path.getsize(tmp_path / "samples" / "step_000001.rec") / tokens < 8
