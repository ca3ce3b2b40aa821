"""Checks of images, delta nets and experts in vLLM, as in vllm_checks.py."""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))

import numpy as np
import torch
from test_vision import inputs_of, reference
from tiny_vlm import odd_files, picture, prompt_with_images
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vllm_checks import (
    BOUND,
    PROMPTS,
    Texts,
    check_agree,
    check_both_ways,
    check_loaded,
    drain,
    interrupted,
    sends,
)

from rl.generation.engine import Output, Request
from rl.model.router import check_record
from rl.ranks import dist

# --------------------------------------------------------------------------------------------------------------- images

PARTS = ("tower", "text", "both", "tower")
ROUTES = {"records_routes": True}


class Pictures(Texts):
    slots, length = 3, 300

    def __init__(self, path: str):
        self.path, self.tokenizer = path, AutoTokenizer.from_pretrained(path)
        self.end_tokens = {self.tokenizer.eos_token_id}
        self.model = AutoModelForImageTextToText.from_pretrained(path)
        one, other, third = picture(96, 64, 1), picture(96, 64, 2), picture(64, 128, 3)
        texts = [("what?", [one]), ("what?", [other]), ("both?", [one, third]), ("none", [])]
        self.prompts = [prompt_with_images(path, *text) for text in texts]
        self.long = [prompt_with_images(path, "x" * 120, [image]) for image in (one, other)]
        assert self.prompts[0][0] == self.prompts[1][0] and self.long[0][0] == self.long[1][0], "equal ids, other images"
        assert len(self.long[0][0]) > 128, "more than a KV block of a CPU"

    def changed(self, part: str = "both", seed: int = 1, model=None):
        """The model with the tower's weights moved, the text's, or both."""
        torch.manual_seed(seed)
        model = copy.deepcopy(model or self.model)
        for name, parameter in model.named_parameters():
            if part == "both" or (".visual." in name) == (part == "tower"):
                parameter.data += 0.05 * torch.randn_like(parameter)
        return model

    def requests(self, n: int = 2, max_tokens: int = 16, **more) -> list[Request]:
        return super().requests(n, max_tokens, **more)

    @torch.no_grad()
    def log_probs(self, model, prompt, tokens: list[int], old=None, kept: int = 0) -> torch.Tensor:
        """By transformers' own forward; an image or video token in the response is text."""
        whole = SimpleNamespace(ids=prompt[0], images=prompt[1])
        if old is None:
            return reference(model, whole, tokens)[kept:]
        cache, logits = old(**inputs_of(old, whole), use_cache=True).past_key_values, []
        first = whole.images.next_position if whole.images else len(whole.ids)
        for place, token in enumerate(tokens[:-1]):
            which = old if place < kept - 1 else model
            where = {"position_ids": torch.full((3, 1, 1), first + place), "past_key_values": cache}
            logits.append(which(input_ids=torch.tensor([[token]]), **where, use_cache=True).logits[0])
        rows = torch.cat(logits[kept - 1 :]).log_softmax(-1)
        return rows[torch.arange(len(rows)), torch.tensor(tokens[kept:])]


def images(path: str) -> None:
    """Each of four publishes changes the tower, the text model, or both, and takes effect. Files of every kind are seen as the
    learner sees them, an image token in a response is text, and equal ids with another image share no KV."""
    case = Pictures(path)
    engine, model = case.engine(), case.model
    case.check(drain(engine, case.requests()), model)
    check_loaded(engine, model)
    for version, part in enumerate(PARTS, start=1):
        old, model = model, case.changed(part, version, model)
        engine.update(model.named_parameters(), version)
        outputs = drain(engine, case.requests())
        case.check(outputs, model)
        check_loaded(engine, model)
        assert case.error(outputs, old) > 1e-2, "or a missed publish would not show"
        assert {v for o in outputs.values() for v in o.versions} == {version}
    tower = [name for name, _ in model.named_parameters() if name.startswith("model.visual.")]
    assert any("attn.qkv" in name for name in tower) and any("patch_embed" in name for name in tower)
    odd = odd_files()
    kinds = [[kind] for kind in odd] + [["animated", "turned by EXIF"]]
    given, seen = ([prompt_with_images(path, "what?", [odd[kind][which] for kind in of]) for of in kinds] for which in (0, 1))
    case.check(drain(engine, case.requests(n=1, prompts=given)), model, seen)
    assert len(kinds) == 7
    begun = [7, model.config.image_token_id, model.config.video_token_id, 9, *[model.config.image_token_id] * 2]
    requests = []
    for r in case.requests(n=1, max_tokens=len(begun) + 6, ignore_eos=True):
        so_far = Output(r.id, begun, [0.0] * len(begun), [4] * len(begun), "unfinished")
        requests.append(Request(r.id, r.prompt_ids, r.sampling, r.seed, so_far, r.images))
    for (i, _), o in drain(engine, requests).items():
        gap = torch.tensor(o.log_probs) - case.log_probs(model, case.prompts[i], o.token_ids)
        assert gap[len(begun) :].abs().max() < BOUND
    # equal ids of more than a KV block with different images, one after the other; the second time both are cached
    for r in case.requests(n=1, prompts=case.long) * 2:
        case.check(drain(engine, [r]), model, case.long)
    assert (case.log_probs(model, case.long[0], [5]) - case.log_probs(model, case.long[1], [5])).abs() > 1e-3
    images_in_flight(case, engine)


def images_in_flight(case, engine) -> None:
    """With the KV kept, the image keeps the old tower's keys and values. With the KV recomputed, the new tower sees it."""
    for part in ("tower", "both"):
        check_both_ways(case, engine, sends(engine, case.model), sends(engine, case.changed(part)), tokens=12, slots=3)


def images_and_experts_on_two_ranks(path: str) -> None:
    """A mixture of experts, whose weights come with the first publish, and whose experts are reported (R3)."""
    dist.init()
    case = Pictures(path)
    engine, model = case.engine(how=ROUTES, rollout_tp=2), case.model
    for version, part in enumerate(("both", "tower", "text")):
        model = case.changed(part, version, model)
        engine.update(model.named_parameters(), version)
        outputs = drain(engine, case.requests())
        case.check(outputs, model)
        check_routes(case, outputs, model, [layer.mlp.gate for layer in model.model.language_model.layers])
        check_agree(outputs)
    check_both_ways(case, engine, sends(engine, case.model), sends(engine, model), tokens=12, slots=3)


# ----------------------------------------------------------------------------------------------------------- delta nets

FP32 = ("A_log", "dt_bias", "linear_attn.norm.weight")


def in_bfloat16(model):
    """The weights as the engine is sent them, computed with in fp32."""
    for name, parameter in model.named_parameters():
        if not name.endswith(FP32):
            parameter.data = parameter.data.bfloat16().float()
    return model


def hybrid(path: str, Case=Texts, missed: float = 0.5) -> None:
    """Mean errors before and after an update, the weights read back, swaps in flight, and responses that continue elsewhere.
    missed: the error of a missed publish."""
    case, bound = Case(path), 5e-2
    engine, old, new = case.engine(torch.bfloat16), in_bfloat16(case.model), in_bfloat16(case.changed())
    cache = engine.engine.vllm_config.cache_config
    assert cache.mamba_ssm_cache_dtype == "float32" and not cache.enable_prefix_caching
    assert case.errors(drain(engine, case.requests(ignore_eos=True)), old).mean() < bound
    engine.update(new.named_parameters(), version=1)
    outputs = drain(engine, case.requests(ignore_eos=True))
    assert case.errors(outputs, new).mean() < bound < missed < case.errors(outputs, old).mean()
    check_loaded(engine, new)
    if Case is not Texts:
        return
    sent = {name: parameter.data for name, parameter in new.named_parameters()}
    held = {name: live for name in sent if (live := engine.read_back(name)) is not None}
    assert not [name for name in held if not torch.equal(engine.own_part(name, sent[name]), held[name].float())]
    # Its own choice. All three are sent in fp32; what it is compared with after a publish has its rounding.
    precision = {name.partition("linear_attn.")[2]: held[name].dtype for name in held if name.endswith(FP32)}
    assert precision == {"A_log": torch.float32, "dt_bias": torch.bfloat16, "norm.weight": torch.bfloat16}
    check_both_ways(case, engine, sends(engine, old), sends(engine, new), bound=bound, mean=torch.mean)
    engine.update(old.named_parameters(), version=2)
    _, again = interrupted(engine, case.requests(n=1, ignore_eos=True), steps=8)
    assert case.errors(again, old).mean() < bound


def hybrid_with_images(path: str) -> None:
    hybrid(path, Pictures, missed=0.3)


# -------------------------------------------------------------------------------------------------------------- experts


def experts_of(case, model, prompt, tokens: list[int], gates=None) -> np.ndarray:
    """The experts [T, L, K], each token's in ascending order, of a plain forward pass over all tokens but the last."""
    seen = []
    gates = gates or [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda _, __, out: seen.append(out[2])) for gate in gates]
    case.log_probs(model, prompt, tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)[:-1].sort(-1).values.numpy()


def check_routes(case, outputs, model, gates=None) -> None:
    """Every token but the last went to the model's experts in each layer."""
    for (i, *_), output in outputs.items():
        check_record(output.routes)
        found = np.sort(output.routes, axis=-1)
        assert np.array_equal(found, experts_of(case, model, case.prompts[i], output.token_ids, gates))


def routes(path: str) -> None:
    """A token keeps the experts it was sampled with: over an update, with swaps in flight, and where a response continues."""
    case = Texts(path)
    engine, old, new = case.engine(how=ROUTES), case.model, case.changed()
    check_routes(case, drain(engine, case.requests()), old)
    check_both_ways(case, engine, sends(engine, old), sends(engine, new))
    outputs = drain(engine, case.requests())
    check_routes(case, outputs, new)
    case.check(outputs, new)
    check_loaded(engine, new)
    assert outputs[0, 0].routes.dtype == ("uint8" if case.model.config.num_experts <= 256 else "uint16")
    swapped_routes(case, engine, old, new)
    so_far, again = interrupted(engine, case.requests(n=1, max_tokens=20, ignore_eos=True))
    assert all(len(s.routes) == len(PROMPTS[i]) + 5 for (i, _), s in so_far.items())
    check_routes(case, again, new)
    wakes_with_turned_experts(case, engine)


def swapped_routes(case, engine, old, new) -> None:
    """A swap with the KV recomputed: the tokens before it keep the old model's experts, the others have the new one's."""
    engine.update(old.named_parameters(), version=0)
    for request in case.requests(n=1, max_tokens=20, ignore_eos=True):
        engine.add(request)
    for _ in range(6):
        engine.step()
    engine.update(new.named_parameters(), version=1, recompute_kv=True)
    for (i, _), output in drain(engine, []).items():
        what, found = (case.prompts[i], output.token_ids), np.sort(output.routes, axis=-1)
        fed = len(PROMPTS[i]) + 5  # the sixth sampled token is fed to the new model
        assert np.array_equal(found[:fed], experts_of(case, old, *what)[:fed])
        assert np.array_equal(found[fed:], experts_of(case, new, *what)[fed:])
    engine.update(new.named_parameters(), version=2)


def wakes_with_turned_experts(case, engine) -> None:
    """The worker wakes up as vllm-ascend 0.23's does: experts are parameters turned to [E, out, in]."""
    inner, model, turned = engine.engine, engine.weights.model, []

    def wake_up(tags: list[str]) -> None:
        for name, parameter in list(model.named_parameters()) if "weights" in tags else ():
            if "w13_weight" in name or "w2_weight" in name:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, torch.nn.Parameter(parameter.transpose(1, 2), requires_grad=False))
                turned.append(name)

    inner.sleep, inner.wake_up, engine.sleeps = lambda level: None, wake_up, True
    for version, weights in enumerate((case.changed(), case.model)):
        engine.sleep()
        engine.update(weights.named_parameters(), version)
        case.check(drain(engine, case.requests(n=1)), weights)
    assert len(turned) >= 4


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
