"""What `pip install .` brings: modules for any notebook or directory, and copies of the scripts run outside the repository. And
other ways to start the scripts than torchrun."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_script

import rl


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A directory with the project installed into it, from a copy: a build leaves files behind."""
    where, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "requirements.txt", "losses.py", "report.py"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "rl", source / "rl", ignore=shutil.ignore_patterns("__pycache__"))
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--no-compile"]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", where, source], check=True, timeout=120)
    return where


def run(site: Path, cwd: Path, program: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=cwd, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_everything_imports_from_any_directory_and_the_report_without_torch(site, tmp_path):
    program = "import sys, report, rl.report.logs; print('torch' in sys.modules, report.__file__)"
    assert run(site, tmp_path, program) == f"False {site / 'report.py'}"
    assert run(site, tmp_path, "import losses; print(losses.__file__)") == str(site / "losses.py")
    modules = {path.relative_to(ROOT) for path in (ROOT / "rl").rglob("*.py")}
    assert modules == {path.relative_to(site) for path in (site / "rl").rglob("*.py")}, "every file of the package is there"


def test_version_and_dependencies_stand_once(site):
    (metadata,) = site.glob("*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    assert f"Version: {rl.__version__}" in lines
    wanted = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert len([line for line in lines if line.startswith("Requires-Dist:")]) == len([line for line in wanted if line])
    assert f"version: {rl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {rl.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_copy_of_a_script_runs_elsewhere(site, demo_model, tmp_path):
    """Under its own name, with an experiment of its own in it."""
    text = (ROOT / "train_sync.py").read_text()
    copy = tmp_path / "my_experiment.py"
    copy.write_text(text)
    out = tmp_path / "runs"
    flags = ["--total-training-steps", "2", "--test-freq", "0", "--output-dir", out]
    run_script(copy, *flags, fresh=True, env={"PYTHONPATH": str(site)})
    (directory,) = out.iterdir()
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps[-2:] == [1, 2]
    assert directory.name.startswith("my_experiment-")
    assert json.loads((directory / "config.json").read_text())["script"] == "my_experiment"
