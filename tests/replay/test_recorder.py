"""The record of a run's samples: everything written is read back, even after failed writes."""

import os
import sys

import numpy as np
import pytest
from helpers import make_group

from rl.errors import UserError
from rl.replay import recorder
from rl.replay.recorder import Record, Recorder


def groups(step: int, n: int = 3, tokens: int = 40) -> list:
    """Return the groups of a step, all different, with and without masks."""
    rng = np.random.default_rng(step)
    sizes = lambda: [int(rng.integers(1, tokens)) for _ in range(4)]  # noqa: E731
    return [make_group(100 * step + i, sizes(), rng=rng, masked=bool(i % 2), unscored=(i,)) for i in range(n)]


def as_bytes(of_step) -> list[bytes]:
    return [group.to_bytes() for group in of_step]


def record(tmp_path, steps: int, after: int = 0, first: bool = True) -> Recorder:
    """Record the steps after `after`, as a run in tmp_path/run does."""
    run = tmp_path / "run"
    writer = Recorder(str(tmp_path / "record"), None if first else run, after)
    writer.begin(run, {"after": after, "flags": {"lr": after}})
    for step in range(after + 1, after + steps + 1):
        writer.write(step, groups(step))
    return writer


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py")])


def test_what_is_recorded_is_read(tmp_path):
    record(tmp_path, 5)
    back = Record(tmp_path / "record")
    assert back.steps == [1, 2, 3, 4, 5]
    for step in back.steps:
        assert as_bytes(back.groups(step)) == as_bytes(groups(step))
        masks = lambda of: [None if r.mask is None else r.mask.tolist() for g in of for r in g.responses]  # noqa: E731
        assert masks(back.groups(step)) == masks(groups(step)) and any(masks(groups(step)))
    start = back.start_of(3)
    assert start["flags"] == {"lr": 0} and (tmp_path / "record" / start["file"]).read_text() == "x = 1\n"


def test_a_damaged_step_is_named(tmp_path):
    record(tmp_path, 3)
    file = tmp_path / "record" / "step_000002.rec"
    file.write_bytes(file.read_bytes()[:-9])
    back = Record(tmp_path / "record")
    assert as_bytes(back.groups(3)) == as_bytes(groups(3))
    with pytest.raises(UserError, match=r"step_000002\.rec cannot be read \("):
        back.groups(2)


def test_a_resumed_run_takes_its_record_back_to_the_checkpoint(tmp_path):
    record(tmp_path, 6)
    (tmp_path / "record" / "step_000007.partial").write_bytes(b"killed")
    record(tmp_path, 4, after=3, first=False)
    back = Record(tmp_path / "record")
    assert back.steps == [1, 2, 3, 4, 5, 6, 7]
    assert [back.start_of(step)["flags"]["lr"] for step in (3, 4)] == [0, 3]
    record(tmp_path, 1, after=0, first=False)  # nothing was saved: from the beginning
    back = Record(tmp_path / "record")
    assert back.steps == [1] and len(back.starts) == 1


def test_the_record_of_another_run_is_left_alone(tmp_path):
    record(tmp_path, 2)
    before = sorted((tmp_path / "record").rglob("*"))
    for run_dir in (None, tmp_path / "other"):
        with pytest.raises(UserError, match=r"--record-samples .*record holds the samples of .*run\. Give another directory"):
            Recorder(str(tmp_path / "record"), run_dir, 1)
    assert sorted((tmp_path / "record").rglob("*")) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--record-samples .*file cannot be written"):
        Recorder(str(tmp_path / "file"), None, 0)
    with pytest.raises(UserError, match="no samples were recorded here"):
        Record(tmp_path / "nowhere")


def test_a_full_disk_leaves_a_step_out_and_no_more(tmp_path, capfd, monkeypatch):
    writer = record(tmp_path, 2)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(recorder.pa, "output_stream", full)
        writer.write(3, groups(3))
        writer.write(4, groups(4))
    writer.write(5, groups(5))
    back = Record(tmp_path / "record")
    assert back.steps == [1, 2, 5] and as_bytes(back.groups(5)) == as_bytes(groups(5))
    assert capfd.readouterr().err.count("step 3 is not recorded (No space left on device)") == 1


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
    writer = Recorder(str(tmp_path / "record"), None, 0)
    writer.write(1, of_step)
    assert os.path.getsize(tmp_path / "record" / "step_000001.rec") / tokens < 8
