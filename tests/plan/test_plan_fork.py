"""plan.py accepts a user's own script: its flags, its `learn`, and the schedule of the script it was copied from."""

import re
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_script

import plan
from rl.errors import UserError

MORE_FLAGS = '''    bonus: float = 0.5
    """A flag of its own."""
'''


def fork(script: str, path: Path, learn: str = "") -> Path:
    """A copy of the script with an additional flag and a new first line in `learn`."""
    text = (ROOT / script).read_text()
    text = re.sub(r"^    schedule: .*\n", rf"\g<0>{MORE_FLAGS}", text, count=1, flags=re.M)
    head, end, body = text.partition("    minis = batch.mini_batches(")
    assert end and "bonus" in head
    path.write_text(f"{head}{learn}{end}{body}")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_one_step_off.py", "train_async.py"])
def test_a_copy_is_planned_as_its_script(script, tmp_path, capsys, monkeypatch):
    """The plan runs in this process, because a new process would have to import everything."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    own = fork(script, tmp_path / f"my_{script}")
    words = ["--model", "demo", "--nproc-per-node", "2", "--device", "H100-80GB"]
    said = []
    for name, more in ((script, ()), (str(own), ("--bonus", "2"))):
        plan.main([name, *words, *more])
        said.append(capsys.readouterr().out)
    plain, copied = said
    assert "weights" in plain and "optimizer" in plain and copied == plain


@pytest.mark.runs
def test_the_copys_own_learn_is_what_is_run(tmp_path):
    learn = '    raise __import__("rl.errors").errors.UserError(f"the learn of this copy, flag {args.bonus}")\n'
    own = fork("train_sync.py", tmp_path / "other.py", learn)
    done = run_script("plan.py", own, "--model", "demo", "--device", "H100-80GB", "--bonus", "7", check=False)
    assert done.returncode == 1 and "the learn of this copy, flag 7.0" in done.stderr


def test_what_is_no_training_script_is_one_message(tmp_path):
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("import nowhere_at_all\n")
    cases = {
        "train.py": r"^python plan\.py train\.py: name one of train_sync\.py, .* or the file of a copy",
        str(tmp_path / "gone.py"): "name one of",
        str(tmp_path / "empty.py"): "no training script with Args and learn",
        str(tmp_path / "broken.py"): r"cannot be imported \(ModuleNotFoundError: No module named 'nowhere_at_all'\)",
        str(ROOT / "report.py"): "no training script with Args and learn",
    }
    for named, message in cases.items():
        with pytest.raises(UserError, match=message):
            plan.main([named, "--device", "H100-80GB"])
