"""The embedded engine with images, compared with transformers, across publishes that change the tower, the text, or both."""

import copy

import pytest
import torch
from helpers import drain
from test_vision import KINDS, ROWS, dataset, inputs_of, reference, rows, vlms  # noqa: F401  (fixtures)
from transformers import AutoModelForImageTextToText

from rl.generation.embedded.engine import TransformersEngine
from rl.generation.engine import Request, SamplingParams, request_seed

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
