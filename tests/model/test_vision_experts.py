"""MoE models with images: the embedded engine records the experts of image tokens, and the learner replays them."""

import numpy as np
import pytest
import torch
from helpers import response_of
from test_engine import drain
from test_vision import dataset, reference, rows  # noqa: F401  (a fixture)
from test_vision_engine import requests_of
from tiny_vlm import save_vlm
from transformers import AutoModelForImageTextToText

from rl.data.prompts import PromptOrder
from rl.generation.embedded.engine import TransformersEngine
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.batch_images import BatchImages
from rl.learning.learner import Learner
from rl.learning.micro_batches import MicroBatch
from rl.samples.group import Group


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_vlm("qwen3-vl-moe", tmp_path_factory.mktemp("model"), max_pixels=2**14)


def experts_of(theirs, prompt, tokens: list[int]) -> torch.Tensor:
    """The experts [T, L, K], each token's in ascending order, of transformers' forward."""
    seen, layers = [], theirs.model.language_model.layers
    hooks = [layer.mlp.gate.register_forward_hook(lambda _, __, out: seen.append(out[2])) for layer in layers]
    reference(theirs, prompt, tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).sort(-1).values


def test_what_the_engine_records_the_learner_replays(model, rows, ranks):  # noqa: F811
    prompts = dataset(model, rows)
    engine = TransformersEngine(model, 120, 6, records_routes=True)
    theirs, groups = AutoModelForImageTextToText.from_pretrained(model), []
    outputs = drain(engine, requests_of(prompts, 2, max_tokens=6))
    for (i, _), output in outputs.items():
        expected = experts_of(theirs, prompts[i], output.token_ids)[:-1]  # the last token was never fed
        assert np.array_equal(np.sort(output.routes, -1), expected.numpy())
    for i, prompt in enumerate(prompts):
        p = len(prompt.ids)
        responses = [response_of(outputs[i, n], p) for n in (0, 1)]
        images = {"images": prompt.images.digest if prompt.images else "", "prompt_routes": outputs[i, 0].routes[:p]}
        group = Group(i, np.array(prompt.ids, np.int32), "demo", responses, **images)
        groups.append(Group.from_bytes(group.to_bytes()))
    batch = Batch.of(groups)
    batch.images = BatchImages(prompts, PromptOrder(len(prompts), 0, shuffle=False), groups)
    learner = Learner(model, LearnerArgs(router_replay="R3"), ranks, 10)
    micro = MicroBatch.of(batch, list(range(len(batch.lengths))), ranks.device)
    log_prob = learner.forward(micro).log_prob
    torch.testing.assert_close(log_prob.detach(), batch.rollout_log_prob, atol=1e-4, rtol=0)
    assert learner.router_metrics()["moe/replay/tokens_differ"] < 0.01
    micro.routes = torch.where(micro.routes < 0, micro.routes, (micro.routes + 1) % 4)
    replayed = learner.forward(micro).log_prob
    assert (replayed - log_prob).abs().max() > 0.01, "the experts that are reported are those that compute"
