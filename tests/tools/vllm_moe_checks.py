"""Checks of vLLM's experts that test_engine_vllm_moe.py runs in separate processes, like vllm_checks.py."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generation"))

from test_engine import PROMPTS, changed, drain, requests_for
from vllm_checks import error, in_flight, main, start

from rl.model.router import check_record


def experts_of(model, ids: list[int]) -> np.ndarray:
    """The experts [T, L, K], each token's in ascending order, of a plain forward pass of transformers' model."""
    seen = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda _, __, out: seen.append(out[2])) for gate in gates]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).sort(-1).values.numpy()


def wrong_routes(outputs, model) -> int:
    """The number of (token, layer) pairs that vLLM says went elsewhere than in the model; of too few or too many tokens all."""
    wrong = 0
    for (i, *_), output in outputs.items():
        expected = experts_of(model, [*PROMPTS[i], *output.token_ids[:-1]])
        check_record(output.routes)
        found = np.sort(output.routes, axis=-1)
        wrong += int((found != expected).any(-1).sum()) if found.shape == expected.shape else expected.shape[0] * 2
    return wrong


def routes(path: str) -> dict:
    """One engine with its routes: log-probs and experts over an update, with swaps in flight, and of continued responses."""
    engine, old, new = start(path, router_replay="R3"), AutoModelForCausalLM.from_pretrained(path), changed(path)
    out = {"before": wrong_routes(drain(engine, requests_for()), old)}
    out["kept"], out["recomputed"] = (in_flight(engine, old, new, recompute) for recompute in (False, True))
    outputs = drain(engine, requests_for())
    out |= {"after": wrong_routes(outputs, new), "error": error(outputs, new), "dtype": str(outputs[0, 0].routes.dtype)}
    out["swapped"] = swapped(engine, old, new)
    out["elsewhere"] = elsewhere(engine, new)
    return out


def swapped(engine, old, new) -> dict:
    """A swap with the KV recomputed: the tokens before it keep the old model's experts, the others have the new one's."""
    engine.update(old.named_parameters(), version=0)
    for request in requests_for(n=1, max_tokens=20, ignore_eos=True):
        engine.add(request)
    for _ in range(6):
        engine.step()
    engine.update(new.named_parameters(), version=1, recompute_kv=True)
    wrong = {"old": 0, "new": 0}
    for (i, _), output in drain(engine, []).items():
        tokens, found = [*PROMPTS[i], *output.token_ids[:-1]], np.sort(output.routes, axis=-1)
        fed = len(PROMPTS[i]) + 5  # the sixth sampled token is fed to the new model
        wrong["old"] += int((found[:fed] != experts_of(old, tokens)[:fed]).any(-1).sum())
        wrong["new"] += int((found[fed:] != experts_of(new, tokens)[fed:]).any(-1).sum())
    return wrong


def elsewhere(engine, model) -> dict:
    """Responses that are interrupted and continue as new requests have the routes of those that were not."""
    requests = requests_for(n=1, max_tokens=20, ignore_eos=True)
    engine.update(model.named_parameters(), version=3)
    for request in requests:
        engine.add(request)
    for _ in range(6):
        engine.step()
    so_far = {output.id: output for output in engine.unfinished()}
    drain(engine, [])
    again = drain(engine, [dataclasses.replace(r, so_far=so_far[r.id]) for r in requests])
    kept = all(len(s.routes) == len(PROMPTS[i]) + 5 for (i, _), s in so_far.items())
    return {"so far": kept, "wrong": wrong_routes(again, model)}


def bfloat16(path: str) -> dict:
    """Return samples of a bf16 engine for a learner in fp32: (prompt, tokens, log-probs, routes) of each response."""
    engine, model = start(path, torch.bfloat16, router_replay="R3"), AutoModelForCausalLM.from_pretrained(path)
    engine.update(model.named_parameters(), version=1)
    outputs = drain(engine, requests_for(n=8))
    return {"responses": [[PROMPTS[i], o.token_ids, o.log_probs, o.routes.tolist()] for (i, _), o in outputs.items()]}


def tensor_parallel(path: str) -> dict:
    """On each of two ranks: as `after_update` and `in_flight`, with routes; the first one reports."""
    from rl.ranks import dist

    ranks = dist.init()
    engine = start(path, rollout_tp=2, router_replay="R3")
    old, new = AutoModelForCausalLM.from_pretrained(path), changed(path)
    before = drain(engine, requests_for())
    out = {"error before": error(before, old), "wrong before": wrong_routes(before, old)}
    out["kept"], out["recomputed"] = (in_flight(engine, old, new, recompute) for recompute in (False, True))
    outputs = drain(engine, requests_for())
    out |= {"error after": error(outputs, new), "wrong after": wrong_routes(outputs, new)}
    mine = json.dumps(sorted([list(k), o.token_ids, o.routes.tolist()] for k, o in outputs.items())).encode()
    out["ranks agree"] = len(set(map(bytes, dist.all_gather_bytes(mine)))) == 1
    return out if ranks.is_main else {}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), globals())
