"""An accelerator on a machine without one: our own code runs on a fake device that knows shapes, precisions and devices, but
no values. A tensor that is left on the host fails here."""

import json

import pytest
from helpers import run_script
from tiny_vlm import save_vlm


@pytest.fixture(scope="session")
def every_model(models, tmp_path_factory) -> dict[str, str]:
    """All models, including those with images."""
    root = tmp_path_factory.mktemp("vlms")
    return models | {kind: save_vlm(kind, root / kind) for kind in ("qwen3-vl", "qwen2.5-vl")}


@pytest.mark.runs
@pytest.mark.parametrize("part", ["quick", *(pytest.param(part, marks=pytest.mark.slow) for part in range(3))])
def test_our_code_runs_on_an_accelerator(every_model, part):
    """The fake device is found as a real one is."""
    words = ["tests/programs/fake_accelerator.py", part, json.dumps(every_model)]
    report = json.loads(run_script(*words, timeout=280, env={"RL_DEVICE": ""}).stdout.splitlines()[-1])
    assert report and {name: said for name, said in report.items() if said} == {}
