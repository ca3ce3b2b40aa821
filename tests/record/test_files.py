"""A run's files: what a resumed run keeps of them, and what happens when they cannot be read or written."""

import json
from pathlib import Path

import pytest
from helpers import job_of

import train_sync
from rl import parts
from rl.errors import UserError
from rl.record import run
from rl.record.run import Origin, Run


def records(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def start(tmp_path: Path, origin: Origin | None = None) -> Run:
    return Run(parts.make(train_sync.Args, output_dir=str(tmp_path), experiment_name="run"), job_of(9), {}, True, origin)


def test_a_record_that_cannot_be_written_ends_the_run_with_a_sentence(tmp_path):
    here = start(tmp_path)
    (here.dir / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be written \(No space left on device\). Make room"):
        here.log(1, {"a": 1.0})
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        start(tmp_path / "file")


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


@pytest.mark.parametrize("name", ["metrics.jsonl", "tickets.jsonl", "validations.jsonl"])
def test_a_resumed_run_meets_its_files_damaged(name, tmp_path):
    here = start(tmp_path)
    here._lock.close()
    (here.dir / name).write_bytes(b"[1]\n7\n\xff\xfe\n" + b"[" * 100_000 + b"\n" + b'{"step": "x"}\n{"step": 3')
    again = start(tmp_path, Origin(here.dir, here.dir / "step_000004"))
    again.log(5, {"critic/score/mean": 0.5})
    again.finish(None)
    assert (here.dir / name).read_bytes().count(b"\n") == (name == "metrics.jsonl") and (here.dir / "reward.png").exists()
