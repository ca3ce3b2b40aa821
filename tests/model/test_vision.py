"""Images in prompts: positions and packed rows equal transformers' own for any content; so do log-probs of the embedded engine,
across publishes that change the tower, the text, or both; of a mixture it records the experts."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import drain, make_group, response_of
from tiny_vlm import picture, pixels_of, png, row, save_vlm
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from rl.data.args import DataArgs
from rl.data.image_prompts import ImagePrep
from rl.data.prompts import PromptDataset, PromptOrder
from rl.generation.embedded import TransformersEngine
from rl.generation.engine import Request, SamplingParams, request_seed
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, MicroBatch
from rl.learning.batch_images import BatchImages
from rl.learning.learner import Learner
from rl.model.loading import load_weights
from rl.model.policy import Policy
from rl.model.pretrained import load_config, load_tokenizer
from rl.samples.group import Group

KINDS = ["qwen2.5-vl", "qwen3-vl", "qwen3.5"]
ROWS = [
    row("<image>How many?", [picture(120, 90, 0)]),
    row("See <image> and <image>: equal?", [picture(64, 200, 1), picture(130, 70, 2)]),
    row("No picture here.", []),
    row("<image>How many?", [picture(120, 90, 3)]),  # the first one's ids, another image
    row("Again <image>.", [picture(120, 90, 0)]),  # the first one's image
]


@pytest.fixture(scope="module")
def vlms(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("vlms")
    return {kind: save_vlm(kind, root / kind, max_pixels=2**14) for kind in KINDS}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rows") / "a.parquet"
    Dataset.from_list(ROWS).to_parquet(path)
    return str(path)


def dataset(model: str, *files: str, **flags) -> PromptDataset:
    args = DataArgs(**{"max_prompt_length": 400} | flags)
    return PromptDataset(files, "train", load_tokenizer(model), args, ImagePrep(model, load_config(model)))


def inputs_of(model, prompt, response=()) -> dict:
    """Return transformers' inputs for a prompt and a response. transformers finds places and positions itself."""
    ids = torch.tensor([[*prompt.ids, *response]])
    out = {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)}
    if prompt.images:
        out["mm_token_type_ids"][0, : len(prompt.ids)] = (ids[0, : len(prompt.ids)] == model.config.image_token_id).int()
        out |= {"pixel_values": pixels_of(prompt.images), "image_grid_thw": prompt.images.grid}
    return out


def make_batch(prompts: PromptDataset, special: list[int], n: int = 2) -> Batch:
    """A batch with n responses to each row, made of random tokens and tokens from `special`."""
    rng, groups = np.random.default_rng(0), []
    for ticket, prompt in enumerate(prompts):
        group = make_group(ticket, list(rng.integers(4, 9, n)), rng=rng)
        for response in group.responses:
            response.token_ids[1:3] = special
        digest = prompt.images.digest if prompt.images else ""
        groups.append(Group(ticket, np.array(prompt.ids, np.int32), "demo", group.responses, images=digest))
    batch = Batch.of(groups)
    batch.images = BatchImages(prompts, PromptOrder(len(prompts), 0, shuffle=False), groups)
    return batch


def reference(model, prompt, tokens: list[int]) -> torch.Tensor:
    """transformers' log-probs of the response, one sequence at a time. It cannot take an image token that was sampled, so the
    ids' embeddings are made first and the images' put in by place."""
    of = inputs_of(model, prompt, tokens)
    ids = of.pop("input_ids")
    base = model.model
    position_ids, _ = base.get_rope_index(ids, of["mm_token_type_ids"], of.get("image_grid_thw"))
    embeds, extra = base.get_input_embeddings()(ids), {}
    if prompt.images:
        features = base.get_image_features(of["pixel_values"], of["image_grid_thw"], return_dict=True)
        mask = of["mm_token_type_ids"].bool()
        embeds = embeds.masked_scatter(mask[..., None], torch.cat(features.pooler_output))
        if hasattr(features, "deepstack_features"):
            levels = [level if torch.is_tensor(level) else torch.cat(level) for level in features.deepstack_features]
            extra = {"visual_pos_masks": mask, "deepstack_visual_embeds": levels}
    hidden = base.language_model(inputs_embeds=embeds, position_ids=position_ids, use_cache=False, **extra)[0]
    logits = model.lm_head(hidden[0, len(prompt.ids) - 1 : -1])
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_have_the_log_probs_and_gradients_of_transformers(vlms, rows, kind):
    """Prompts shared by their responses, 0, 1 and 2 images, one image in two prompts, equal ids with other images, and
    responses that hold image and video tokens; in one micro-batch and in several, of which some have no image."""
    prompts = dataset(vlms[kind], rows)
    config = load_config(vlms[kind])
    batch = make_batch(prompts, [config.image_token_id, config.video_token_id])
    theirs = AutoModelForImageTextToText.from_pretrained(vlms[kind], attn_implementation="eager").double()
    weight = torch.randn(len(batch.token), generator=torch.Generator().manual_seed(0))
    tokens = batch.token.split(batch.lengths.tolist())
    expected = torch.cat([reference(theirs, prompts[i // 2], of_one.tolist()) for i, of_one in enumerate(tokens)])
    (expected * weight).sum().backward()
    policy = Policy(load_weights(vlms[kind], torch.float64))
    allowed = 1e-4 if kind == "qwen3.5" else 2e-6  # transformers' delta rule is in fp32, and its norms
    for cuts in ([range(10)], [range(4), range(4, 6), range(6, 10)]):
        policy.zero_grad()
        for cut in cuts:
            micro = MicroBatch.of(batch, list(cut), torch.device("cpu"))
            with FlopCounterMode(display=False) as counter:
                log_prob, _ = policy(micro.inputs, micro.layout, micro.predict, micro.labels, 1.0, "none")
            made = {str(name) for name in counter.get_flop_counts()["Global"]}
            assert kind == "qwen3.5" or not any("conv" in name for name in made), "patches are embedded by a product"
            torch.testing.assert_close(log_prob, expected[micro.index].float(), atol=allowed, rtol=allowed)
            (log_prob * weight[micro.index]).sum().backward()
        for (name, ours), (same_name, of_theirs) in zip(
            policy.model.named_parameters(), theirs.named_parameters(), strict=True
        ):
            assert name == same_name and ours.grad is not None
            assert float((ours.grad - of_theirs.grad).norm()) <= allowed * max(1.0, float(of_theirs.grad.norm())), name


def test_a_kept_image_is_there_while_another_is_prepared(vlms, monkeypatch):
    model = vlms["qwen3-vl"]
    prep = ImagePrep(model, load_config(model))
    first, other = png(picture(40, 30)), png(picture(60, 50))
    kept = prep.pixels("first", first)
    prepare, begun, may_end = prep.prepare, threading.Event(), threading.Event()

    def slow(sources):
        begun.set()
        assert may_end.wait(60)
        return prepare(sources)

    monkeypatch.setattr(prep, "prepare", slow)
    with ThreadPoolExecutor(2) as pool:
        making = pool.submit(prep.pixels, "other", other)
        assert begun.wait(60)
        try:
            assert pool.submit(prep.pixels, "first", first).result(30) is kept
        finally:
            may_end.set()
        assert prep.pixels("other", other) is making.result(60)


# -------------------------------------------------------------------------------------------------- the embedded engine


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
def test_log_probs_are_the_models_after_each_of_four_publishes(vlms, rows, kind, recompute):
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


def test_the_experts_that_the_engine_records_the_learner_replays(rows, ranks, tmp_path):
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
