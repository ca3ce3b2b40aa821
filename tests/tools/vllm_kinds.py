"""Checks of images, delta nets and experts in vLLM, as in vllm_checks.py."""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vllm_checks import Texts, after_update, agree, both_ways, interrupted, main, sends

from vllm_checks import wrongly_loaded  # isort: skip

from test_engine import PROMPTS, drain
from tiny_vlm import odd_files, picture, pixels_of, prompt_with_images

from rl.generation.engine import EngineArgs, Output, Request
from rl.generation.vllm.engine import VLLMEngine
from rl.model.router import check_record
from rl.ranks import dist

# --------------------------------------------------------------------------------------------------------------- images

PARTS = ("tower", "text", "both", "tower")


class Pictures(Texts):
    def __init__(self, path: str):
        self.path, self.tokenizer = path, AutoTokenizer.from_pretrained(path)
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

    def engine(self, dtype: torch.dtype = torch.float32, **flags) -> VLLMEngine:
        args = EngineArgs(**{"max_num_seqs": 6, "max_num_batched_tokens": 2048, **flags})  # fewer slots than requests
        return VLLMEngine(self.path, args, 300, dtype, end_tokens={self.tokenizer.eos_token_id})

    def requests(self, n: int = 2, max_tokens: int = 16, **more) -> list[Request]:
        return super().requests(n, max_tokens, **more)

    @torch.no_grad()
    def log_probs(self, model, prompt, tokens: list[int], old=None, kept: int = 0) -> torch.Tensor:
        """By transformers' own forward. An image or video token in the response is text: it goes in under a new id with the
        same embedding, by which transformers does not know it."""
        (ids, images), marks = prompt, [model.config.image_token_id, model.config.video_token_id]
        row = torch.tensor([ids + tokens])
        of_images = torch.zeros_like(row)
        of_images[0, : len(ids)] = row[0, : len(ids)] == marks[0]
        grid = {"image_grid_thw": images.grid} if images else {}
        positions, _ = model.model.get_rope_index(row, of_images, **grid)
        rows = model.config.get_text_config().vocab_size
        for number, mark in enumerate(marks):
            row[0, len(ids) :][row[0, len(ids) :] == mark] = rows + number

        def hidden(which, start, end, cache):
            embedding = which.get_input_embeddings()
            weight = embedding.weight
            embedding.weight = torch.nn.Parameter(torch.cat([weight, weight[marks]]))
            out = which.model(
                input_ids=row[:, start:end],
                position_ids=positions[:, :, start:end],
                mm_token_type_ids=of_images[:, start:end],
                past_key_values=cache,
                use_cache=True,
                **({"pixel_values": pixels_of(images)} | grid if images and not start else {}),
            )
            embedding.weight = weight
            return out.last_hidden_state[0], out.past_key_values

        cache, start = None, 0
        if old is not None:
            start = len(ids) + kept - 1
            _, cache = hidden(old, 0, start, None)
        states, _ = hidden(model, start, row.shape[1], cache)
        logits = model.lm_head(states[len(ids) + kept - 1 - start : -1])
        return logits.log_softmax(-1)[torch.arange(len(tokens) - kept), torch.tensor(tokens[kept:])]


def images(path: str) -> dict:
    """Log-probs and read-back before any publish and after each of four, and publishes in flight."""
    case = Pictures(path)
    engine, model = case.engine(), case.model
    out = {"start": {"error": case.error(drain(engine, case.requests()), model), "wrong": wrongly_loaded(engine, model)}}
    for version, part in enumerate(PARTS, start=1):
        old, model = model, case.changed(part, version, model)
        engine.update(model.named_parameters(), version)
        outputs = drain(engine, case.requests())
        out[f"{version} {part}"] = {
            "error": case.error(outputs, model),
            "error against the old model": case.error(outputs, old),
            "wrong": wrongly_loaded(engine, model),
            "versions": sorted({v for o in outputs.values() for v in o.versions}),
        }
    out["names"] = [name for name, _ in model.named_parameters()]
    odd = odd_files()
    kinds = [[kind] for kind in odd] + [["animated", "turned by EXIF"]]
    given, seen = ([prompt_with_images(path, "what?", [odd[kind][which] for kind in of]) for of in kinds] for which in (0, 1))
    out["odd"] = case.error(drain(engine, case.requests(n=1, prompts=given)), model, seen), len(kinds)
    begun = [7, model.config.image_token_id, model.config.video_token_id, 9, *[model.config.image_token_id] * 2]
    requests = []
    for r in case.requests(n=1, max_tokens=len(begun) + 6, ignore_eos=True):
        so_far = Output(r.id, begun, [0.0] * len(begun), [4] * len(begun), "unfinished")
        requests.append(Request(r.id, r.prompt_ids, r.sampling, r.seed, so_far, r.images))
    outputs = drain(engine, requests)
    after = [torch.tensor(o.log_probs) - case.log_probs(model, case.prompts[i], o.token_ids) for (i, _), o in outputs.items()]
    out["marks"] = float(max(gap[len(begun) :].abs().max() for gap in after))
    # equal ids of more than a KV block with different images, one after the other; the second time both are cached
    shared = [drain(engine, [r]) for _ in range(2) for r in case.requests(n=1, prompts=case.long)]
    out["shared"] = max(case.error(one, model, case.long) for one in shared)
    out["apart"] = float((case.log_probs(model, case.long[0], [5]) - case.log_probs(model, case.long[1], [5])).abs())
    return out


def images_in_flight(path: str) -> dict:
    case = Pictures(path)
    engine = case.engine(max_num_seqs=3)
    first = sends(engine, case.model)
    return {part: both_ways(case, engine, first, sends(engine, case.changed(part)), tokens=12) for part in ("tower", "both")}


def images_on_two_ranks(path: str) -> dict:
    ranks, case = dist.init(), Pictures(path)
    engine = case.engine(rollout_tp=2)
    out = after_update(path, case, engine)
    out["ranks agree"] = agree(drain(engine, case.requests()))
    return out if ranks.is_main else {}


def images_and_experts(path: str) -> dict:
    """A mixture of experts, whose weights come with the first publish, and whose experts are reported (R3)."""
    case, out = Pictures(path), {}
    engine, model = case.engine(router_replay="R3"), case.model
    gates = lambda model: [layer.mlp.gate for layer in model.model.language_model.layers]  # noqa: E731
    for version, part in enumerate(("both", "tower", "text")):
        model = case.changed(part, version, model)
        engine.update(model.named_parameters(), version)
        outputs = drain(engine, case.requests())
        out[part] = {"error": case.error(outputs, model), "wrong": wrongly_loaded(engine, model)}
        out[part]["elsewhere"] = wrong_routes(case, outputs, model, gates(model))
    return out


# ----------------------------------------------------------------------------------------------------------- delta nets

FP32 = ("A_log", "dt_bias", "linear_attn.norm.weight")


def in_bfloat16(model):
    """The weights as the engine is sent them, computed with in fp32."""
    for name, parameter in model.named_parameters():
        if not name.endswith(FP32):
            parameter.data = parameter.data.bfloat16().float()
    return model


def hybrid(path: str, Case=Texts) -> dict:
    """Mean errors before and after an update, the weights read back, swaps in flight, and responses that continue elsewhere."""
    case = Case(path)
    engine, old, new = case.engine(torch.bfloat16), in_bfloat16(case.model), in_bfloat16(case.changed())
    cache = engine.engine.vllm_config.cache_config
    out = {"states": cache.mamba_ssm_cache_dtype, "shares prefixes": cache.enable_prefix_caching}
    out["before"] = float(case.errors(drain(engine, case.requests(ignore_eos=True)), old).mean())
    engine.update(new.named_parameters(), version=1)
    outputs = drain(engine, case.requests(ignore_eos=True))
    out |= {"after": float(case.errors(outputs, new).mean()), "old weights": float(case.errors(outputs, old).mean())}
    sent = {name: parameter.data for name, parameter in new.named_parameters()}
    held = {name: live for name in sent if (live := engine.read_back(name)) is not None}
    out["wrong"] = wrongly_loaded(engine, new)
    out["not its part"] = [name for name in held if not torch.equal(engine.own_part(name, sent[name]), held[name].float())]
    out["precision"] = {name.partition("linear_attn.")[2]: str(held[name].dtype) for name in held if name.endswith(FP32)}
    if Case is Texts:
        out |= both_ways(case, engine, sends(engine, old), sends(engine, new), average=torch.mean)
        engine.update(old.named_parameters(), version=2)
        _, again = interrupted(engine, case.requests(n=1, ignore_eos=True), steps=8)
        out["resumed"] = float(case.errors(again, old).mean())
    return out


def hybrid_with_images(path: str) -> dict:
    return hybrid(path, Pictures)


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


def wrong_routes(case, outputs, model, gates=None) -> int:
    """The number of (token, layer) pairs that vLLM says went elsewhere than in the model; of too few or too many tokens all."""
    wrong = 0
    for (i, *_), output in outputs.items():
        expected = experts_of(case, model, case.prompts[i], output.token_ids, gates)
        check_record(output.routes)
        found = np.sort(output.routes, axis=-1)
        wrong += int((found != expected).any(-1).sum()) if found.shape == expected.shape else expected.shape[0] * 2
    return wrong


def routes(path: str) -> dict:
    """One engine with its routes: log-probs and experts over an update, with swaps in flight, and of continued responses."""
    case = Texts(path)
    engine, old, new = case.engine(router_replay="R3"), case.model, case.changed()
    out = {"before": wrong_routes(case, drain(engine, case.requests()), old)}
    out |= both_ways(case, engine, sends(engine, old), sends(engine, new))
    outputs = drain(engine, case.requests())
    out |= {
        "after": wrong_routes(case, outputs, new),
        "error": case.error(outputs, new),
        "dtype": str(outputs[0, 0].routes.dtype),
    }
    out["swapped"] = swapped_routes(case, engine, old, new)
    so_far, again = interrupted(engine, case.requests(n=1, max_tokens=20, ignore_eos=True))
    kept = all(len(s.routes) == len(PROMPTS[i]) + 5 for (i, _), s in so_far.items())
    return out | {"elsewhere": {"so far": kept, "wrong": wrong_routes(case, again, new)}}


def swapped_routes(case, engine, old, new) -> dict:
    """A swap with the KV recomputed: the tokens before it keep the old model's experts, the others have the new one's."""
    engine.update(old.named_parameters(), version=0)
    for request in case.requests(n=1, max_tokens=20, ignore_eos=True):
        engine.add(request)
    for _ in range(6):
        engine.step()
    engine.update(new.named_parameters(), version=1, recompute_kv=True)
    wrong = {"old": 0, "new": 0}
    for (i, _), output in drain(engine, []).items():
        what, found = (case.prompts[i], output.token_ids), np.sort(output.routes, axis=-1)
        fed = len(PROMPTS[i]) + 5  # the sixth sampled token is fed to the new model
        wrong["old"] += int((found[:fed] != experts_of(case, old, *what)[:fed]).any(-1).sum())
        wrong["new"] += int((found[fed:] != experts_of(case, new, *what)[fed:]).any(-1).sum())
    engine.update(new.named_parameters(), version=2)
    return wrong


def routes_in_bfloat16(path: str) -> dict:
    """Return samples of a bf16 engine for a learner in fp32: (prompt, tokens, log-probs, routes) of each response."""
    case = Texts(path)
    engine = case.engine(torch.bfloat16, router_replay="R3")
    engine.update(case.model.named_parameters(), version=1)
    outputs = drain(engine, case.requests(n=8))
    return {"responses": [[PROMPTS[i], o.token_ids, o.log_probs, o.routes.tolist()] for (i, _), o in outputs.items()]}


def routes_on_two_ranks(path: str) -> dict:
    ranks, case = dist.init(), Texts(path)
    engine, old, new = case.engine(rollout_tp=2, router_replay="R3"), case.model, case.changed()
    out = both_ways(case, engine, sends(engine, old), sends(engine, new))
    outputs = drain(engine, case.requests())
    out |= {"after": case.error(outputs, new), "wrong after": wrong_routes(case, outputs, new)}
    out["ranks agree"] = agree(outputs)
    return out if ranks.is_main else {}


def wakes_with_turned_experts(path: str) -> dict:
    """A model with experts, whose worker wakes up as vllm-ascend 0.23's does: experts are parameters turned to [E, out, in]."""
    case = Texts(path)
    engine, turned = case.engine(), []
    inner, model = engine.engine, engine.weights.model

    def wake_up(tags: list[str]) -> None:
        for name, parameter in list(model.named_parameters()) if "weights" in tags else ():
            if "w13_weight" in name or "w2_weight" in name:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, torch.nn.Parameter(parameter.transpose(1, 2), requires_grad=False))
                turned.append(name)

    inner.sleep, inner.wake_up, engine.sleeps = lambda level: None, wake_up, True
    errors = []
    for version, weights in enumerate((case.changed(), case.model)):
        engine.sleep()
        engine.update(weights.named_parameters(), version)
        errors.append(case.error(drain(engine, case.requests(n=1)), weights))
    return {"turned": len(turned), "errors": errors}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), globals())
