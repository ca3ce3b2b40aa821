"""--compile compiles once for any number of tokens and is refused where it cannot work. test_learner.py checks the numbers."""

import shutil

import pytest
import torch
from helpers import make_group
from torch._inductor import config

from rl.errors import UserError
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.learning.micro_batches import micro_batches
from rl.model.compiled import compile_layers
from rl.model.pretrained import empty_model, load_config


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_a_layer_is_compiled_once_for_all_lengths(models, ranks):
    learner = Learner(models["qwen2-tied"], LearnerArgs(compile=True), ranks, total_steps=1)

    def graphs_after(sizes: list[int]) -> int:
        batch = Batch.of([make_group(0, sizes)])
        for micro in micro_batches(batch, torch.arange(len(sizes)), 4096, ranks):
            learner.forward(micro).log_prob.sum().backward()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    begin = graphs_after([7, 9]), graphs_after([20, 30, 5])
    assert begin[0] > 0
    assert graphs_after([11]) == graphs_after([40, 40]) == graphs_after([3, 60, 17, 8]) == begin[1]


def test_experts_are_refused(models):
    with pytest.raises(UserError, match="--compile is for models without experts"):
        compile_layers(empty_model(load_config(models["moe"]), False), models["moe"])


def test_a_missing_compiler_is_named(models, monkeypatch):
    monkeypatch.setattr(config.cpp, "cxx", ("/nowhere/g++",))
    with pytest.raises(UserError, match=r"--compile: there is no C\+\+ compiler"):
        compile_layers(empty_model(load_config(models["qwen3"]), False), models["qwen3"])
