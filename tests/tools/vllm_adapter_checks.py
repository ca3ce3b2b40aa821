"""Checks of vLLM's adapters that test_engine_vllm_adapters.py runs in separate processes, like vllm_checks.py."""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generation"))

from test_engine import PROMPTS, drain, mixed_reference, reference_log_probs, requests_for
from vllm_checks import LONG, MAX_LENGTH, error, main, refusal, start

from rl.generation.engine import EngineArgs, Request, SamplingParams
from rl.generation.vllm import adapters as vllms
from rl.generation.vllm.adapters import AdaptedVLLMEngine
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.model.shards import Block, local
from rl.ranks import dist
from rl.weights.local import LocalWeights

RANK, ALPHA = 4, 12.0  # vLLM has room for 8; a scale of 3 is no power of 2


class Side:
    """A learner, an engine of its adapters alone, and transformers' model with W + 3 B A for a weight."""

    def __init__(self, path: str, ranks, dtype: str = "float32", **flags):
        args = LearnerArgs(lora_rank=RANK, lora_alpha=ALPHA, publish="adapter", dtype=dtype)
        engine_args = EngineArgs(**{"max_num_seqs": 8, "max_num_batched_tokens": 2048, **flags})
        self.path, self.learner = path, Learner(path, args, ranks, 10)
        self.engine = AdaptedVLLMEngine(path, engine_args, MAX_LENGTH, getattr(torch, dtype), adapters=args)
        self.publishes = LocalWeights(self.learner, self.engine, getattr(torch, dtype))

    @torch.no_grad()
    def change(self, seed: int, size: float = 0.1):
        """Gives the learner other B; returns transformers' model that computes the same."""
        model = AutoModelForCausalLM.from_pretrained(self.path)
        generator, own = torch.Generator().manual_seed(seed), dict(self.learner.policy.model.named_parameters())
        a = self.learner.adapters.whole_a({n: own[n] for n in self.learner.adapters.tensors}, "cpu")
        for name in self.learner.adapters.names:
            weight = model.get_parameter(f"{name}.weight")
            b = size * torch.randn(len(weight), RANK, generator=generator)
            for held in (own[f"{name}.lora_B"].data, self.learner.masters.get(f"{name}.lora_B")):
                if held is not None:
                    local(held).copy_(b[Block.of(held).slices()])
            weight += 3.0 * b @ a[f"{name}.lora_A"].float()
        return model

    def apart(self, frozen: bool = False) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.clone()) for name, tensor in self.learner.apart(frozen=frozen)]


def in_flight(side: Side, recompute: bool) -> dict:
    """A swap in the middle of responses, against plain forward passes."""
    engine, old = side.engine, side.change(3)
    engine.update(side.apart(), version=10)
    for request in requests_for(n=1, max_tokens=20, ignore_eos=True):
        engine.add(request)
    for _ in range(6):
        engine.step()
    new = side.change(4)
    engine.update(side.apart(), version=11, recompute_kv=recompute)
    outputs, errors = drain(engine, []), {"old": 0.0, "new": 0.0}
    for (i, _), output in outputs.items():
        before, after, got = output.token_ids[:6], output.token_ids[6:], torch.tensor(output.log_probs)
        context = PROMPTS[i] + before
        expected = reference_log_probs(new, context, after, 1.0) if recompute else mixed_reference(old, new, context, after)
        first = reference_log_probs(old, PROMPTS[i], before, 1.0)
        errors["old"] = max(errors["old"], (got[:6] - first).abs().max().item())
        errors["new"] = max(errors["new"], (got[6:] - expected).abs().max().item())
    return errors | {"versions": all(output.versions == [10] * 6 + [11] * 14 for output in outputs.values())}


def adapters(path: str) -> dict:
    """All that one engine can show."""
    side = Side(path, dist.init())
    engine, base = side.engine, AutoModelForCausalLM.from_pretrained(path)
    side.publishes.publish(0)
    out = {"at first": error(drain(engine, requests_for(n=2)), base)}
    model = side.change(1)
    sent = side.apart()
    engine.update(iter(sent), version=1)
    out["sender's tensors"] = all(torch.equal(a, b) for (_, a), (_, b) in zip(sent, side.apart(), strict=True))
    outputs = drain(engine, requests_for(0.7))
    out["unmerged"], out["without"] = error(outputs, model, 0.7), error(outputs, base, 0.7)
    ids = LONG[:40]
    expected = reference_log_probs(model, ids[:1], ids[1:], 1.0)
    out["log-probs"] = (torch.tensor(engine.log_probs_of(ids)) - expected).abs().max().item()
    out["prefix"] = prefix_cache(side)
    out["kept"], out["recomputed"] = (in_flight(side, recompute) for recompute in (False, True))
    out["refusals"] = refusals(side)
    out["faults"] = faults(side)
    plain, model = start(path), side.change(40)
    plain.update(side.learner.weights(), version=1)
    return out | {"merged": error(drain(plain, requests_for(0.7)), model, 0.7)}


def prefix_cache(side: Side) -> dict:
    """A prompt long enough to be shared, of responses before a publish, waiting while it is proven, and after it."""
    engine, params = side.engine, SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [Request((0, j), LONG, params, j) for j in range(11)]  # 8 slots: 3 wait
    drain(engine, requests[:8])
    for request in requests:
        engine.add(request)
    for _ in range(11):
        engine.step()
    model = side.change(2)
    side.publishes.publish(5)  # its probe takes the last step of those that run
    out = {"ended meanwhile": len(engine.unfinished()) - 3}
    outputs = drain(engine, [])
    waited = {k: o for k, o in outputs.items() if k[1] >= 8}
    out |= {"waited": error(waited, model, prompts=[LONG]), "versions": [o.versions for o in waited.values()]}
    return out | {"all": len(outputs), "after": error(drain(engine, requests[:4]), model, prompts=[LONG])}


def refusals(side: Side) -> dict:
    engine, whole = side.engine, side.apart(frozen=True)
    own = [item for item in whole if item[0] in side.learner.adapters.tensors]
    out = {"the model again": refusal(lambda: engine.update(whole, 20))}
    out["missing"] = refusal(lambda: engine.update(own[1:], 20))
    out["other shape"] = refusal(lambda: engine.update([(own[0][0], own[1][1])], 20))
    with mock.patch.object(vllms, "RANKS", (1, 8)):  # the tiny model has no layer whose adapter may have vLLM's 512
        out["rank"] = refusal(lambda: AdaptedVLLMEngine(side.path, EngineArgs(), 64, adapters=LearnerArgs(lora_rank=9)))
    for kind in ("moe", "qwen3_5", "images"):
        path, few = str(Path(side.path).parent / kind), LearnerArgs(lora_rank=4, lora_target=("q_proj",))
        out[kind] = refusal(lambda path=path, few=few: AdaptedVLLMEngine(path, EngineArgs(), 64, adapters=few))
    engine.update(own, 20)
    return out


def faults(side: Side) -> dict:
    """What a publish says of an engine with a planted fault; each is found at the first publish."""
    engine, adapter, out = side.engine, side.engine.adapter, {}

    def of(name: str, seed: int) -> None:
        side.change(seed)
        out[name] = refusal(lambda: side.publishes.publish(seed))

    of("none", 30)
    ask = engine._ask
    engine._ask = lambda key, prompt, params, priority: engine.engine.add_request(key, prompt, params)
    of("not applied", 31)
    engine._ask = ask
    swap = adapter.swap
    adapter.swap = lambda: adapter._new.clear()
    of("never swapped in", 32)
    adapter.swap = swap
    setting = adapter.adapters.setting
    adapter.adapters.setting = type(setting)(setting.rank, 2 * setting.alpha, setting.target)
    of("twice the scale", 33)
    adapter.adapters.setting = setting
    of("none again", 34)
    return out


def bfloat16(path: str) -> dict:
    side = Side(path, dist.init(), "bfloat16")
    side.publishes.publish(0)
    model = side.change(1, 0.05)
    side.publishes.publish(1)
    outputs, base = drain(side.engine, requests_for(n=2)), AutoModelForCausalLM.from_pretrained(path)
    return {"unmerged": error(outputs, model), "without": error(outputs, base)}


def tensor_parallel(path: str) -> dict:
    """On each of two ranks, which are two learners and one engine; the first one reports."""
    ranks = dist.init()
    side = Side(path, ranks, rollout_tp=2)
    side.publishes.publish(0)
    model = side.change(1)
    side.publishes.publish(1)
    outputs = drain(side.engine, requests_for())
    out = {"unmerged": error(outputs, model)}
    out["parts"] = {
        name: side.engine.read_back(name).numel() / dict(side.apart())[name].numel()
        for name in side.learner.adapters.tensors
        if "layers.0" in name
    }
    mine = json.dumps(sorted([list(k), o.token_ids, o.log_probs] for k, o in outputs.items())).encode()
    out["ranks agree"] = len(set(map(bytes, dist.all_gather_bytes(mine)))) == 1
    swap = side.engine.adapter.swap
    side.engine.adapter.swap = lambda: side.engine.adapter._new.clear()
    side.change(2)
    out["never swapped in"] = refusal(lambda: side.publishes.publish(2))
    side.engine.adapter.swap = swap
    return out if ranks.is_main else {}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), globals())
