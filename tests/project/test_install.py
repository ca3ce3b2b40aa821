"""`pip install .` installs modules for any notebook or directory, and copies of the scripts run outside the repository. The
scripts also start without torchrun."""

import email
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_script
from packaging.requirements import Requirement
from test_requirements import requirements

import rl
from tools.command import PROGRAMS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The project, built from a copy because a build leaves files behind."""
    where, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for file in (ROOT / "pyproject.toml", ROOT / "README.md", *ROOT.glob("*.py")):
        shutil.copy(file, source / file.name)
    for name in ("rl", "user_processes", "tools", "math_grader", "program_grader", "examples/demo"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", where, source], check=True, timeout=120)
    (made,) = where.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A directory with the project installed into it."""
    where, flags = tmp_path_factory.mktemp("site"), ["--no-deps", "--no-index", "--quiet", "--no-compile"]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", where, wheel], check=True, timeout=120)
    return where


def run(site: Path, cwd: Path, *words: str | Path) -> str:
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=cwd, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_everything_imports_from_any_directory_and_the_report_without_torch(site, tmp_path):
    program = "import sys, report, tools.report.logs; print('torch' in sys.modules, report.__file__)"
    assert run(site, tmp_path, "-c", program) == f"False {site / 'report.py'}"
    assert run(site, tmp_path, "-c", "import losses; print(losses.__file__)") == str(site / "losses.py")
    for name in ("rl", "user_processes", "tools", "math_grader", "program_grader", "examples/demo"):
        modules = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*.py")}
        assert modules == {path.relative_to(site) for path in (site / name).rglob("*.py")}, "every file of the package is there"


@pytest.mark.slow
def test_the_command_knows_all_programs_and_copies_one(site, tmp_path):
    """Every program of the repository's first level is installed, starts by its name, and is not overwritten."""
    command = site / "bin" / "flat-rl"
    assert {file.stem for file in ROOT.glob("*.py")} == {*PROGRAMS} - {"from_verl"} | {"losses"}
    assert all(name in run(site, tmp_path, command) for name in PROGRAMS)
    for name in ("report", "from_verl"):
        assert "usage" in run(site, tmp_path, command, name, "--help")
    run(site, tmp_path, command, "copy", "train_sync", "mine.py")
    assert (tmp_path / "mine.py").read_text() == (ROOT / "train_sync.py").read_text()
    for words in (["copy", "train_sync", "mine.py"], ["no_such"]):
        done = subprocess.run([sys.executable, command, *words], cwd=tmp_path, env={"PYTHONPATH": str(site)}, timeout=60)
        assert done.returncode == 1


def metadata(site: Path) -> email.message.Message:
    (file,) = site.glob("*.dist-info/METADATA")
    return email.message_from_string(file.read_text())


@pytest.mark.slow
def test_the_version_is_the_same_everywhere(site):
    assert metadata(site)["Version"] == rl.__version__
    assert f"version: {rl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {rl.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_the_dependencies_are_those_of_requirements_txt_whatever_torch_and_transformers_there_are(site):
    wanted = {name: str(of.specifier) for name, of in requirements("requirements.txt").items()}
    declared = {Requirement(line).name: str(Requirement(line).specifier) for line in metadata(site).get_all("Requires-Dist")}
    assert declared == wanted | {"torch": "", "transformers": ""}


@pytest.mark.runs
def test_a_copy_of_a_script_runs_elsewhere(site, demo_model, tmp_path):
    """Under its own name, with an experiment of its own in it."""
    text = (ROOT / "train_sync.py").read_text()
    copy = tmp_path / "my_experiment.py"
    copy.write_text(text)
    out = tmp_path / "runs"
    flags = ["--total-training-steps", "2", "--test-freq", "0", "--output-dir", out]
    run_script(copy, *flags, imported="packages", env={"PYTHONPATH": str(site)})
    (directory,) = out.iterdir()
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps[-2:] == [1, 2]
    assert directory.name.startswith("my_experiment-")
    assert json.loads((directory / "config.json").read_text())["script"] == "my_experiment"
