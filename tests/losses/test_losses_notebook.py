"""examples/losses.ipynb runs from top to bottom. The stored copy is executed and small."""

import json

import pytest
from helpers import ROOT

NOTEBOOK = ROOT / "examples" / "losses.ipynb"


def code_cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_it_is_stored_executed_and_small():
    assert NOTEBOOK.stat().st_size < 400_000
    assert all(cell["execution_count"] for cell in code_cells())
    assert any("image/png" in output.get("data", {}) for cell in code_cells() for output in cell["outputs"])


def test_it_runs():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
