"""The embedded engine with images, compared with transformers, across publishes that change the tower, the text, or both; and
the experts that it records of a mixture."""

import copy

import numpy as np
import pytest
import torch
from helpers import drain, response_of
from test_vision import KINDS, ROWS, dataset, inputs_of, reference, rows, vlms  # noqa: F401  (fixtures)
from tiny_vlm import save_vlm
from transformers import AutoModelForImageTextToText

from rl.data.prompts import PromptOrder
from rl.generation.embedded.engine import TransformersEngine
from rl.generation.engine import Request, SamplingParams, request_seed
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.batch_images import BatchImages
from rl.learning.learner import Learner
from rl.learning.micro_batches import MicroBatch
from rl.samples.group import Group

STEPS = 3  # of the engine between two publishes
CHANGES = ["model.visual.", "model.language_model.", "", "model.visual."]  # what a publish changes: names that begin so


def requests_of(prompts, n: int, max_tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    pairs = [(i, j) for j in range(n) for i in range(len(prompts))]
    return [Request((i, j), prompts[i].ids, params, request_seed(3, i, j), images=prompts[i].images) for i, j in pairs]


@torch.no_grad()
def publish(engine, model, version: int, recompute: bool) -> None:
    generator = torch.Generator().manual_seed(version)
    for name, parameter in model.named_parameters():
        if name.startswith(CHANGES[version - 1]):
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    engine.update(model.named_parameters(), version, recompute)


@torch.no_grad()
def along_the_versions(models: list, prompt, output) -> torch.Tensor:
    """transformers' log-probs of the response where each version of the model samples its tokens with the keys and values that
    the versions before have left in the cache."""
    of, cache, logits, done = inputs_of(models[0], prompt), None, None, 0
    for version in sorted(set(output.versions)):
        model, own = models[version], [t for t, v in zip(output.token_ids, output.versions, strict=True) if v == version]
        if cache is None:
            out = model(**of, use_cache=True)
            cache, logits = out.past_key_values, [out.logits[0, -1:]]
            feed = own[:-1]
        else:
            feed = [output.token_ids[done - 1], *own[:-1]]
        next_position = prompt.images.next_position if prompt.images else len(prompt.ids)
        for place, token in enumerate(feed, next_position + max(0, done - 1)):
            position_ids = torch.full((3, 1, 1), place)
            out = model(input_ids=torch.tensor([[token]]), position_ids=position_ids, past_key_values=cache, use_cache=True)
            logits.append(out.logits[0])
        done += len(own)
    return torch.cat(logits).log_softmax(-1)[torch.arange(done), torch.tensor(output.token_ids)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
def test_log_probs_are_the_models_after_each_of_four_publishes(vlms, rows, kind, recompute):  # noqa: F811
    """With running and waiting requests; among those that begin together are two with the same ids but different images."""
    prompts = list(dataset(vlms[kind], rows))
    model = AutoModelForImageTextToText.from_pretrained(vlms[kind])
    engine, models = TransformersEngine(vlms[kind], max_length=120, max_num_seqs=6), [copy.deepcopy(model)]
    engine.update(model.named_parameters(), 0)
    for request in requests_of(prompts, 2, max_tokens=9):
        engine.add(request)
    outputs = {}
    for version in range(1, 5):
        for _ in range(STEPS):
            outputs |= {output.id: output for output in engine.step()}
        assert engine.running and (engine.waiting or version > 2)
        publish(engine, model, version, recompute)
        models.append(copy.deepcopy(model))
    outputs |= drain(engine, [])
    assert {v for output in outputs.values() for v in output.versions} == set(range(5))
    for (i, _), output in outputs.items():
        if recompute:  # each token under the whole model of its version
            of_version = [reference(m, prompts[i], output.token_ids) for m in models]
            expected = torch.stack([of_version[v][k] for k, v in enumerate(output.versions)])
        else:
            expected = along_the_versions(models, prompts[i], output)
        allowed = 1e-3 if kind == "qwen3.5" else 1e-4  # it decodes by a recurrence what a forward pass computes in chunks
        torch.testing.assert_close(torch.tensor(output.log_probs), expected.detach(), atol=allowed, rtol=0)


def experts_of(theirs, prompt, tokens: list[int]) -> torch.Tensor:
    """The experts [T, L, K], each token's in ascending order, of transformers' forward."""
    seen, layers = [], theirs.model.language_model.layers
    hooks = [layer.mlp.gate.register_forward_hook(lambda _, __, out: seen.append(out[2])) for layer in layers]
    reference(theirs, prompt, tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).sort(-1).values


def test_the_experts_that_the_engine_records_the_learner_replays(rows, ranks, tmp_path):  # noqa: F811
    """Of image tokens, too."""
    model = save_vlm("qwen3-vl-moe", tmp_path, max_pixels=2**14)
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
