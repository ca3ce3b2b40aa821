"""The diffs of docs/forking.md: each applies to a copy of the repository, and the result trains for three steps."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, run_script

TITLES = ["A loss with a knob of its own", "An advantage", "A reward", "A script of your own"]
KEYS = ["actor/pg_clipfrac_lower", "critic/advantages/mean", "critic/score/mean", "actor/imitation"]


def section(title: str) -> list[tuple[str, str]]:
    """Return the section's fenced blocks in order: (language, text)."""
    page = (ROOT / "docs" / "forking.md").read_text()
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)


def prepare(title: str, tree: Path) -> list[str]:
    """Make the tree, run the section's commands, and return the last one, which trains."""
    tree.mkdir()
    for path in (*ROOT.glob("*.py"), *(ROOT / name for name in ("rl", "tools", "math_grader"))):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tree / path.name)
    *first, (language, last) = section(title)
    assert language == "sh"
    for language, text in first:
        command = ["git", "apply", "--recount", "-"] if language == "diff" else text.split()
        done = subprocess.run(command, cwd=tree, input=text, text=True, capture_output=True)
        assert done.returncode == 0, f"{title}: {done.stderr}"
    return last.split()


def test_each_section_is_tested():
    page = (ROOT / "docs" / "forking.md").read_text()
    assert re.findall(r"^## (.*)$", page, re.M) == TITLES


@pytest.mark.parametrize("title", TITLES)
def test_the_diff_applies_and_compiles(title, tmp_path):
    python, script, *_ = prepare(title, tmp_path / "tree")
    assert python == "python"
    for file in (tmp_path / "tree").glob("*.py"):
        compile(file.read_text(), file, "exec")
    assert (tmp_path / "tree" / script).exists()


@pytest.mark.slow
@pytest.mark.parametrize(("title", "key"), zip(TITLES, KEYS, strict=True))
def test_what_it_makes_trains(title, key, demo_model, tmp_path):
    tree = tmp_path / "tree"
    _, script, *flags = prepare(title, tree)
    flags = [tree / flag if flag.startswith("my_reward.py") else flag for flag in flags]
    more = ["--total-training-steps", 3, "--test-freq", 0, "--output-dir", tmp_path / "runs"]
    run_script(tree / script, *flags, *more, fresh=True, env={"PYTHONPATH": str(tree)})
    (directory,) = (tmp_path / "runs").iterdir()
    assert directory.name.startswith(f"{Path(script).stem}-")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][-3:] == [1, 2, 3] and key in lines[-1]
