"""Each command in a code block of the docs, and in a script's head, parses with the script's own flags, without a warning."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import make_dataclass

import pytest
import tyro
from helpers import ROOT

import plan
import report
import train_async
import train_one_step_off
import train_sft
import train_sync
from rl import flags

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.py")]
PAGES.remove(ROOT / "docs" / "forking.md")  # its commands train what its diffs make (test_forking.py)
SCRIPTS = {f"{module.__name__}.py": module for module in (train_sync, train_one_step_off, train_async, train_sft)}
SCRIPT = re.compile(r"(?:train_\w+|plan|replay|report)\.py")
OF_REPLAY = {"--from-step": 1, "--to-step": 1, "--without": 1, "--script": 1, "--tokens": 0}  # its own, and their values


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command from its script on; an ellipsis is left out."""
    blocks = re.findall(r"^```(?:sh|console)?\n(.*?)^```|((?:^    [^\n]*\n)+)", text, re.M | re.S)
    for line in (
        "".join(fenced or indented for fenced, indented in blocks).replace("\\\\\n", " ").replace("\\\n", " ").splitlines()
    ):
        if re.match(r"\s*(?:\w+=\S+ +)*(?:python|torchrun|srun|pip)\b.*\.py\b", line):
            words = shlex.split(line.partition(" &")[0] if line.rstrip().endswith("&") else line, comments=True)
            for at in (at for at, word in enumerate(words) if SCRIPT.fullmatch(word)):
                yield [word for word in words[at:] if word != "..."]
                break


def parse(script: str, *words: str) -> None:
    if script == "report.py":
        tyro.cli(report.Args, args=words)
    elif script == "replay.py":
        own = {at + more for at, word in enumerate(words) if word in OF_REPLAY for more in range(1 + OF_REPLAY[word])}
        flags.read(train_async.Args, args=[word for at, word in enumerate(words) if at and at not in own])
    elif script == "plan.py" and words[0] in SCRIPTS:
        both = make_dataclass("Args", [], bases=(plan.PlanArgs, SCRIPTS[words[0]].Args))
        flags.read(both, args=words[1:], defaults={"dtype": "bfloat16"})
    elif script in SCRIPTS:
        flags.read(SCRIPTS[script].Args, args=words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_parse(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where the user's files are
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in commands(page.read_text()):
        for word in command[1:]:
            if file := re.match(r"(?:\w+=)?(\w+\.py):", word):
                (tmp_path / file[1]).touch()
        parse(*command)
        assert "warning" not in capsys.readouterr().err, command


def test_commands_are_found():
    found = [command for page in PAGES for command in commands(page.read_text())]
    assert len(found) > 40 and {command[0] for command in found} >= {*SCRIPTS, "plan.py", "replay.py", "report.py"}
    text = "Text:\n\n    torchrun --nproc-per-node 2 train_async.py --lr 1e-6 \\\n      --seed 1 ...    # words\n\n"
    text += "```sh\npython report.py a &\n```\n"
    assert [*commands(text)] == [["train_async.py", "--lr", "1e-6", "--seed", "1"], ["report.py", "a"]]
