"""examples/losses.ipynb runs from top to bottom and shows every loss and estimator. The stored copy is executed and small."""

import json

import pytest
from helpers import ROOT

import losses

NOTEBOOK = ROOT / "examples" / "losses.ipynb"


def code_cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_it_is_stored_executed_and_small():
    assert NOTEBOOK.stat().st_size < 400_000
    assert all(cell["execution_count"] for cell in code_cells())
    assert any("image/png" in output.get("data", {}) for cell in code_cells() for output in cell["outputs"])


def test_it_draws_every_loss_and_has_a_row_for_every_estimator():
    drawing = "".join(next(cell["source"] for cell in code_cells() if "panels = {" in "".join(cell["source"])))
    others = {"luspo"}  # its curve is gspo's
    names = {loss.function.__name__ for loss in losses.POLICY_LOSSES.values()}
    assert {name for name in names if f'("{name}", {{' in drawing} == names - others
    (table,) = (text for cell in code_cells() for o in cell["outputs"] if "dr_grpo" in (text := "".join(o.get("text", ""))))
    estimators = {estimator.function.__name__ for estimator in losses.ADVANTAGES.values()}
    assert {line.split()[0] for line in table.splitlines()} == estimators | {"score", "tokens"}
    prose = "".join(
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "markdown"
    )
    assert all(f"**{name}**" in prose for name in names | estimators - {"gpg"})


@pytest.mark.slow
def test_it_runs():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
