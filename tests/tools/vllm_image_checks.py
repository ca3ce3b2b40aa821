"""Checks that tests/generation/test_engine_vllm_images.py runs in separate processes, like tests/tools/vllm_checks.py for
text.

python tests/tools/vllm_image_checks.py '{"qwen3-vl": ["publishes", "models/qwen3-vl", 1]}' results
"""

import copy
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generation"))

from test_engine import drain
from tiny_vlm import odd_files, picture, pixels_of, prompt_with_images
from vllm_checks import main, wrongly_loaded

from rl.generation.engine import EngineArgs, Output, Request, SamplingParams
from rl.generation.vllm.engine import VLLMEngine

LONG = "x" * 120  # with an image before it more than a KV block of a CPU, 128 tokens: less is never shared
CHANGES = ("tower", "text", "both", "tower")


class Case:
    """A model, its prompts, and what transformers computes of them."""

    def __init__(self, path: str):
        self.path, self.tokenizer = path, AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForImageTextToText.from_pretrained(path)
        one, other, third = picture(96, 64, 1), picture(96, 64, 2), picture(64, 128, 3)
        texts = [("what?", [one]), ("what?", [other]), ("both?", [one, third]), ("none", [])]
        self.prompts = [prompt_with_images(path, *text) for text in texts]
        self.long = [prompt_with_images(path, LONG, [image]) for image in (one, other)]
        assert self.prompts[0][0] == self.prompts[1][0] and self.long[0][0] == self.long[1][0], "equal ids, other images"
        assert len(self.long[0][0]) > 128

    def engine(self, **flags) -> VLLMEngine:
        args = EngineArgs(**{"max_num_seqs": 6, "max_num_batched_tokens": 2048, **flags})  # fewer slots than requests
        return VLLMEngine(self.path, args, 300, end_tokens={self.tokenizer.eos_token_id})

    def requests(self, prompts=None, n: int = 2, max_tokens: int = 16, **more) -> list[Request]:
        params = SamplingParams(max_tokens=max_tokens, **more)
        prompts = enumerate(prompts or self.prompts)
        return [Request((i, j), ids, params, 100 * i + j, images=images) for i, (ids, images) in prompts for j in range(n)]

    def error(self, outputs, model, prompts=None) -> float:
        """The largest difference between the outputs' log-probs and transformers' forward of the model."""
        worst = 0.0
        for (i, *_), output in outputs.items():
            expected = log_probs(model, (prompts or self.prompts)[i], output.token_ids)
            worst = max(worst, (torch.tensor(output.log_probs) - expected).abs().max().item())
        return worst


@torch.no_grad()
def log_probs(model, of, tokens: list[int], old=None, kept: int = 0) -> torch.Tensor:
    """Log-probs of `tokens` after the prompt, by transformers' own forward. With `old` the keys and values of what stands
    before token `kept` - 1 are that model's, and only tokens from `kept` on count. An image or video token in the response is
    text: it goes in under a new id with the same embedding, by which transformers does not know it."""
    (ids, images), marks = of, [model.config.image_token_id, model.config.video_token_id]
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
        weight, embedding.weight = embedding.weight, torch.nn.Parameter(torch.cat([embedding.weight, embedding.weight[marks]]))
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


def changed(model, part: str, seed: int):
    """The model with the tower's weights moved, the text's, or both."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if part == "both" or (".visual." in name) == (part == "tower"):
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def publishes(path: str) -> dict:
    """Log-probs and read-back before any publish and after each of four."""
    case = Case(path)
    engine, model = case.engine(), case.model
    outputs = drain(engine, case.requests())
    out = {"start": {"error": case.error(outputs, model), "wrong": wrongly_loaded(engine, model)}}
    for version, part in enumerate(CHANGES, start=1):
        old, model = model, changed(model, part, version)
        engine.update(model.named_parameters(), version)
        outputs = drain(engine, case.requests())
        out[f"{version} {part}"] = {
            "error": case.error(outputs, model),
            "error against the old model": case.error(outputs, old),
            "wrong": wrongly_loaded(engine, model),
            "versions": sorted({v for o in outputs.values() for v in o.versions}),
        }
    out["names"] = [name for name, _ in model.named_parameters()]
    out["odd"] = odd_images(case, engine, model)
    out["marks"] = marks_in_responses(case, engine, model)
    out["shared"] = shared_prefix(case, engine, model)
    return out


def odd_images(case, engine, model) -> dict:
    """Files of every kind, and two of them in one prompt, against transformers' forward of what is seen of them."""
    odd = odd_files()
    kinds = {kind: [kind] for kind in odd} | {"two": ["animated", "turned by EXIF"]}
    given, seen = (
        [prompt_with_images(case.path, "what?", [odd[kind][which] for kind in of]) for of in kinds.values()] for which in (0, 1)
    )
    outputs = drain(engine, case.requests(given, n=1))
    return {kind: case.error({(i, 0): outputs[i, 0]}, model, seen) for i, kind in enumerate(kinds)}


def mixture(path: str) -> dict:
    """A mixture of experts, whose weights come with the first publish, and whose experts are reported (R3)."""
    case, out = Case(path), {}
    engine, model = case.engine(load_format="dummy", router_replay="R3"), case.model
    for version, part in enumerate(("both", "tower", "text")):
        model = changed(model, part, version)
        engine.update(model.named_parameters(), version)
        outputs = drain(engine, case.requests())
        out[part] = {"error": case.error(outputs, model), "wrong": wrongly_loaded(engine, model)}
        out[part]["elsewhere"] = sum(wrong_routes(model, case.prompts[i], output) for (i, _), output in outputs.items())
    return out


def wrong_routes(model, of, output) -> int:
    """The number of (token, layer) pairs that the engine says went to other experts than in transformers' forward."""
    seen, layers = [], model.model.language_model.layers
    hooks = [layer.mlp.gate.register_forward_hook(lambda _, __, out: seen.append(out[2])) for layer in layers]
    log_probs(model, of, output.token_ids)
    for hook in hooks:
        hook.remove()
    expected = torch.stack(seen, dim=1)[:-1].sort(-1).values  # the last token was never fed
    found = torch.from_numpy(output.routes).long().sort(-1).values
    return int((found != expected).any(-1).sum()) if found.shape == expected.shape else expected.numel()


def marks_in_responses(case, engine, model) -> dict:
    """Responses that contain image and video tokens, which are text there: they continue from such a beginning."""
    marks = [model.config.image_token_id, model.config.video_token_id]
    begun = [7, *marks, 9, marks[0], marks[0]]
    requests = []
    for request in case.requests(n=1, max_tokens=len(begun) + 6, ignore_eos=True):
        so_far = Output(request.id, begun, [0.0] * len(begun), [4] * len(begun), "unfinished")
        requests.append(Request(request.id, request.prompt_ids, request.sampling, request.seed, so_far, request.images))
    worst = 0.0
    for (i, _), output in drain(engine, requests).items():
        expected = log_probs(model, case.prompts[i], output.token_ids)[len(begun) :]
        worst = max(worst, (torch.tensor(output.log_probs[len(begun) :]) - expected).abs().max().item())
    return {"error": worst}


def shared_prefix(case, engine, model) -> dict:
    """Equal ids of more than a KV block with different images, one after the other; the second time both are cached."""
    out = {}
    for name in ("first", "again"):
        errors = [case.error(drain(engine, [r]), model, case.long) for r in case.requests(case.long, n=1)]
        out[name] = max(errors)
    out["apart"] = float((log_probs(model, case.long[0], [5, 6, 7]) - log_probs(model, case.long[1], [5, 6, 7])).abs().max())
    return out


def in_flight(path: str) -> dict:
    case = Case(path)
    engine, old, out = case.engine(max_num_seqs=3), case.model, {}
    for part in ("tower", "both"):
        for recompute in (False, True):
            out[f"{part}, {'recomputed' if recompute else 'kept'}"] = swap(case, engine, old, changed(old, part, 1), recompute)
    return out


def swap(case, engine, old, new, recompute: bool) -> dict:
    """A publish while three prompts' responses run and one waits."""
    engine.update(old.named_parameters(), version=0)
    for request in case.requests(n=1, max_tokens=12, ignore_eos=True):
        engine.add(request)
    for _ in range(5):
        engine.step()
    engine.update(new.named_parameters(), version=1, recompute_kv=recompute)
    errors = {"before": 0.0, "after": 0.0, "waited": 0.0}
    versions = []
    for (i, _), output in drain(engine, []).items():
        got, kept = torch.tensor(output.log_probs), output.versions.count(0)
        versions.append(output.versions)
        if not kept:
            errors["waited"] = max(
                errors["waited"], float((got - log_probs(new, case.prompts[i], output.token_ids)).abs().max())
            )
            continue
        before = log_probs(old, case.prompts[i], output.token_ids)[:kept]
        after = log_probs(new, case.prompts[i], output.token_ids, None if recompute else old, kept)
        errors["before"] = max(errors["before"], float((got[:kept] - before).abs().max()))
        errors["after"] = max(errors["after"], float((got[kept:] - after).abs().max()))
    return errors | {"versions": sorted(versions)}


def tensor_parallel(path: str) -> dict:
    """On each of two ranks; the first one reports."""
    from rl.ranks import dist

    ranks, case = dist.init(), Case(path)
    engine, out = case.engine(rollout_tp=2), {}
    new = changed(case.model, "both", 1)
    out["before"] = case.error(drain(engine, case.requests()), case.model)
    engine.update(new.named_parameters(), version=1)
    outputs = drain(engine, case.requests())
    out["after"] = case.error(outputs, new)
    mine = json.dumps(sorted([list(k), o.token_ids, o.log_probs] for k, o in outputs.items())).encode()
    out["ranks agree"] = len(set(map(bytes, dist.all_gather_bytes(mine)))) == 1
    return out if ranks.is_main else {}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), globals())
