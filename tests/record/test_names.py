"""Names of runs are plain: nothing is written outside the output directory, and each name is one line."""

import pytest

import train_sync
from rl import flags
from rl.errors import UserError

LONG = "x" * 300
BAD = [
    "../x",
    "a/../b",
    "/tmp/x",
    "a//b",
    "a/",
    ".",
    "a/.",
    "a\nb",
    "a\tb",
    "a\x1b[31mb",
    "a\0b",
    "a\u202eb",
    " a",
    LONG,
    "a\udcffb",
]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("flag", ["--experiment-name", "--project-name"])
def test_a_name_that_is_not_plain_is_refused_in_a_sentence(flag, name):
    with pytest.raises(UserError) as refused:
        flags.read(train_sync.Args, args=[f"{flag}={name}"])
    text = str(refused.value)
    assert flag in text and text.isprintable() and len(text) < 400


@pytest.mark.parametrize("path", ["a\nb", "a\x1bb", "a\0b", "a\udcffb"])
def test_a_directory_is_on_one_line(path):
    with pytest.raises(UserError, match="--output-dir") as refused:
        flags.read(train_sync.Args, args=[f"--output-dir={path}"])
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "name", ["run", "group/run", "a/b/c", "lr=1e-6, n=8", "für 数", ".hidden", "..a", "a..b", "x" * 200, "-dash"]
)
def test_plain_and_nested_names_are_taken(name):
    assert flags.read(train_sync.Args, args=[f"--experiment-name={name}"]).log.experiment_name == name


def test_a_project_has_no_parts():
    with pytest.raises(UserError, match="--project-name 'a/b': it has parts"):
        flags.read(train_sync.Args, args=["--project-name", "a/b"])
