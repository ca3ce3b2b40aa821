"""The publish of train_sync.py: frozen weights are gathered only once, and the engine still has all weights."""

import pytest
import torch
from test_vision import vlms  # noqa: F401  (a fixture)

from rl.generation.embedded.engine import TransformersEngine
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks.shards import local
from rl.weights.local import LocalWeights


class Whole:
    """An engine that, like vLLM, has its own copies and always receives all weights."""

    shares_memory = False

    def update(self, weights, version: int) -> None:
        self.given, self.version = {name: tensor.clone() for name, tensor in weights}, version

    def read_back(self, name: str) -> torch.Tensor:
        return self.given[name]


@pytest.mark.parametrize("own_memory", [False, True])
def test_a_frozen_tower_is_gathered_once(vlms, ranks, monkeypatch, own_memory):  # noqa: F811
    learner = Learner(vlms["qwen3-vl"], LearnerArgs(freeze_vision_tower=True), ranks, 10)
    engine = Whole() if own_memory else TransformersEngine(vlms["qwen3-vl"], max_length=64)
    gathered, weights = [], learner.weights

    def recorded(*given, **how):
        for name, tensor in weights(*given, **how):
            gathered[-1].add(name)
            yield name, tensor

    monkeypatch.setattr(learner, "weights", recorded)
    publishes = LocalWeights(learner, engine, torch.float32)
    for version in range(3):
        gathered.append(set())
        publishes.publish(version)
        for name, parameter in learner.parameters.items():
            assert torch.equal(engine.read_back(name), local(parameter)), name
        with torch.no_grad():
            for name, parameter in learner.parameters.items():
                if name not in learner.frozen:
                    local(parameter).add_(0.1)
    assert engine.version == 2 and gathered[0] == set(learner.parameters)
    assert (
        {name for name in gathered[0] if name.startswith("model.visual.")} == set(learner.frozen) == gathered[0] - gathered[1]
    )
    assert gathered[1] == gathered[2]
