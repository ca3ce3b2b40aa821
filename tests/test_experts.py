"""Mixtures of experts in whole runs: their export, and training with and without replayed routes."""

import pytest
import torch
from helpers import run_script
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl.hub_names import hub_names
from rl.pretrained import empty_model, load_config, load_weights


@pytest.fixture
def fused(models, tmp_path):
    """The tiny mixture, its files with transformers' own names in memory."""
    model = AutoModelForCausalLM.from_pretrained(models["moe"])
    model.config.save_pretrained(tmp_path / "fused")
    save_file(dict(model.named_parameters()), tmp_path / "fused" / "model.safetensors", {"format": "pt"})
    return str(tmp_path / "fused")


def test_files_with_fused_and_with_single_experts_are_one_model(models, fused):
    expected, names = load_weights(models["moe"], torch.float32), load_file(f"{fused}/model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    for name, weight in load_weights(fused, torch.float32).named_parameters():
        assert torch.equal(weight, expected.get_parameter(name)), name


@pytest.mark.parametrize("form", ["hub", "fused"])
def test_the_export_has_the_hubs_names_whatever_was_read(models, fused, tmp_path, form):
    """By two learners, in pieces that end within experts."""
    model = models["moe"] if form == "hub" else fused
    done = run_script("tests/programs/saves.py", model, tmp_path, "whole", ranks=2, timeout=100)
    assert done.stdout.count(" went on: \n") == 2
    hub, export = (load_file(f"{where}/model.safetensors") for where in (models["moe"], tmp_path / "run" / "step_000002"))
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in hub
    assert hub.keys() == export.keys() and all(torch.equal(export[name], hub[name]) for name in hub)


def test_dense_models_keep_their_names(models):
    for kind in ("qwen2-tied", "qwen3"):
        model = empty_model(load_config(models[kind]))
        assert hub_names(model) == {name: [(name, weight.shape)] for name, weight in model.named_parameters()}
