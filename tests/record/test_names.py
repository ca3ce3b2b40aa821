"""Names of runs are plain: nothing is written outside the output directory, and each name is one line."""

import pytest

import train_sync
from rl import flags
from rl.errors import UserError

OUTSIDE = ["../x", "a/../b", "/tmp/x", "a//b", "a/", ".", "a/."]
UNPRINTABLE = ["a\nb", "a\tb", "a\x1b[31mb", "a\0b", "a\u202eb", "a\udcffb"]
BAD = [(flag, name) for flag in ("--experiment-name", "--project-name") for name in (*OUTSIDE, *UNPRINTABLE, " a", "x" * 300)]
BAD += [("--output-dir", name) for name in UNPRINTABLE] + [("--project-name", "a/b")]


@pytest.mark.parametrize(("flag", "name"), BAD)
def test_a_name_that_is_not_plain_is_refused_in_a_sentence(flag, name):
    with pytest.raises(UserError) as refused:
        flags.read(train_sync.Args, args=[f"{flag}={name}"])
    text = str(refused.value)
    assert flag in text and text.isprintable() and len(text) < 400


@pytest.mark.parametrize(
    "name", ["run", "group/run", "a/b/c", "lr=1e-6, n=8", "für 数", ".hidden", "..a", "a..b", "x" * 200, "-dash"]
)
def test_plain_and_nested_names_are_taken(name):
    assert flags.read(train_sync.Args, args=[f"--experiment-name={name}"]).log.experiment_name == name
