"""Checks that tests/generation/test_engine_vllm.py runs in separate processes, because vLLM patches its process.

    python tests/tools/vllm_checks.py '{"tied": ["after_update", "models/tied", 1]}' results

Each function starts one engine, measures, and returns numbers; the judgement is in the test file. Importing vLLM takes longer
than measuring, so it is imported once and every function runs in a fork: name -> [function, model directory, ranks]. Other
kinds of models are in vllm_kinds.py.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch
import torch.distributed
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generation"))

from helpers import free_port
from test_engine import PROMPTS, changed, drain, mixed_reference, reference_log_probs
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner

from rl.errors import UserError
from rl.generation.engine import EngineArgs, Output, Request, SamplingParams, request_seed
from rl.generation.vllm import engine as vllm_engine
from rl.generation.vllm.engine import VLLMEngine
from rl.model.sampling_mask import TIES

LONG = [5 + i % 20 for i in range(140)]  # more than a KV block of a CPU, 128 tokens: less is never shared
MAX_LENGTH = 200


class Texts:
    """A model, its prompts (ids, images), and what transformers computes of them."""

    def __init__(self, path: str):
        self.path, self.model = path, AutoModelForCausalLM.from_pretrained(path)
        self.prompts = [(ids, None) for ids in PROMPTS]
        self.long = [(LONG, None)]

    def changed(self):
        return changed(self.path)

    def engine(self, dtype: torch.dtype = torch.float32, by_priority: bool = False, **flags) -> VLLMEngine:
        args = EngineArgs(**{"max_num_seqs": 8, "max_num_batched_tokens": 2048, **flags})  # fewer slots than requests
        return VLLMEngine(self.path, args, MAX_LENGTH, dtype, by_priority=by_priority)

    def requests(self, n: int = 4, max_tokens: int = 24, prompts=None, **sampling) -> list[Request]:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        prompts = list(enumerate(prompts or self.prompts))
        return [Request((i, j), p, params, request_seed(7, i, j), images=of) for i, (p, of) in prompts for j in range(n)]

    def log_probs(self, model, prompt, tokens: list[int], old=None, kept: int = 0, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs of the tokens from `kept` on; with `old`, the keys and values before them are that model's."""
        ids, _ = prompt
        if old is None:
            return reference_log_probs(model, ids, tokens, temperature)[kept:]
        return mixed_reference(old, model, ids + tokens[:kept], tokens[kept:])

    def errors(self, outputs, model, prompts=None, **how) -> torch.Tensor:
        """The differences between the outputs' log-probs and a forward pass of the model."""
        pairs = [((prompts or self.prompts)[id[0]], output) for id, output in outputs.items()]
        return torch.cat([(torch.tensor(o.log_probs) - self.log_probs(model, p, o.token_ids, **how)).abs() for p, o in pairs])

    def error(self, *what, **how) -> float:
        return float(self.errors(*what, **how).max())


def wrongly_loaded(engine, model) -> list[str]:
    """Return the weights that the engine's copies do not equal bit for bit, except the packed experts of a CPU."""
    live = {name: (engine.read_back(name), weight.data) for name, weight in model.named_parameters()}
    live = {name: pair for name, pair in live.items() if ".experts." not in name or pair[0] is not None}
    return [name for name, (held, own) in live.items() if held is None or not torch.equal(held, own.to(held.dtype))]


def refusal(act) -> str:
    try:
        act()
    except (ValueError, RuntimeError, UserError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return "nothing was raised"


def sends(engine, model) -> Callable:
    """Return a publish (version, recompute) of the model's weights, which returns the model."""

    def publish(version: int, recompute: bool = False):
        engine.update(model.named_parameters(), version, recompute)
        return model

    return publish


def in_flight(case, engine, first: Callable, second: Callable, recompute: bool, tokens: int = 20, average=torch.max) -> dict:
    """Publish the second amid responses of the first. Errors of the tokens before, of those after, and of these if the KV cache
    had been treated the other way; and of requests that waited."""
    old = first(0)
    for request in case.requests(n=1, max_tokens=tokens, ignore_eos=True):
        engine.add(request)
    for _ in range(6):
        assert engine.step() == []
    new = second(1, recompute)
    found = {"old": [], "new": [], "other": [], "waited": [torch.zeros(1)]}
    outputs = drain(engine, [])
    for (i, _), output in outputs.items():
        kept, got, what = output.versions.count(0), torch.tensor(output.log_probs), (case.prompts[i], output.token_ids)
        if not kept:
            found["waited"].append((got - case.log_probs(new, *what)).abs())
            continue
        found["old"].append((got[:kept] - case.log_probs(old, *what)[:kept]).abs())
        fresh, mixed = case.log_probs(new, *what, kept=kept), case.log_probs(new, *what, old=old, kept=kept)
        for name, expected in zip(("new", "other"), (fresh, mixed) if recompute else (mixed, fresh), strict=True):
            found[name].append((got[kept:] - expected).abs())
    versions = sorted(output.versions for output in outputs.values())
    return {name: float(average(torch.cat(gaps))) for name, gaps in found.items()} | {"versions": versions}


def both_ways(case, engine, first: Callable, second: Callable, **how) -> dict:
    return {name: in_flight(case, engine, first, second, name == "recomputed", **how) for name in ("kept", "recomputed")}


def interrupted(engine, requests: list[Request], steps: int = 6) -> tuple[dict, dict]:
    """Return the responses after these steps, and as they end when they continue as new requests."""
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        engine.step()
    so_far = {output.id: output for output in engine.unfinished()}
    engine.abort()
    again = [replace(r, so_far=so_far[r.id] if so_far[r.id].token_ids else None) for r in requests]
    return so_far, drain(engine, again)


def after_update(path: str, case=None, engine=None, dtype=torch.float32, **flags) -> dict:
    """Any kind of model: log-probs and read-back before an update and after."""
    case = case or Texts(path)
    engine, new = engine or case.engine(dtype, **flags), case.changed()
    out = {"before": case.error(drain(engine, case.requests(n=2)), case.model), "wrong": wrongly_loaded(engine, case.model)}
    engine.update(new.named_parameters(), version=4)
    outputs = drain(engine, case.requests(n=2))
    out |= {"after": case.error(outputs, new), "wrong after": wrongly_loaded(engine, new)}
    return out | {"versions": sorted({v for o in outputs.values() for v in o.versions})}


# ------------------------------------------------------------------------------------------------ what one engine shows


def everything(path: str) -> dict:
    """The tied model."""
    case = Texts(path)
    engine, old, new = case.engine(), case.model, case.changed()
    out = {"sampling": sampling(case, engine), **both_ways(case, engine, sends(engine, old), sends(engine, new))}
    engine.update(new.named_parameters(), version=3)
    so_far, outputs = interrupted(engine, case.requests(n=3, max_tokens=20, ignore_eos=True))  # 12 of them, and 8 slots
    out["elsewhere"] = {
        "kept": sorted({len(output.token_ids) for output in so_far.values()}),
        "error": case.error(outputs, new),
        "begins the same": all(outputs[k].token_ids[: len(s.token_ids)] == s.token_ids for k, s in so_far.items()),
        "log-probs": all(outputs[k].log_probs[: len(s.token_ids)] == s.log_probs for k, s in so_far.items()),
    }
    out["prefix"] = prefix_cache(case, engine, sends(engine, old), sends(engine, new))
    out["refusals"] = refusals(case, engine)
    return out


def updates(path: str) -> dict:
    """The tied model: as after_update, and then 200 updates more."""
    case = Texts(path)
    engine = case.engine(by_priority=True)
    out = after_update(path, case, engine) | {"turns": turns(case, engine)}
    return out | {"memory": memory(case, engine), "sleeping": sleeping(case, engine)}


def sampling(case, engine) -> dict:
    out, model = {}, case.model
    for temperature in (1.0, 0.7, 0.0):
        outputs = drain(engine, case.requests(temperature=temperature))
        out[f"error at {temperature}"] = case.error(outputs, model, temperature=temperature or 1.0)
        out[f"reasons at {temperature}"] = sorted({o.finish_reason for o in outputs.values()})
        ends = [(o.token_ids[-1] == 1) == (o.finish_reason == "stop") and 1 not in o.token_ids[:-1] for o in outputs.values()]
        out[f"ends at {temperature}"] = all(ends)
    wide, alone, again = (
        drain(engine, requests) for requests in (case.requests(), case.requests()[5:6], case.requests()[::-1])
    )
    out["alone"] = alone[(1, 1)].token_ids == wide[(1, 1)].token_ids
    out["in another order"] = all(again[k].token_ids == wide[k].token_ids for k in wide)
    out["different responses"] = len({tuple(o.token_ids) for o in wide.values()})
    out["top-k"] = restricted(drain(engine, case.requests(top_k=3)), model)
    out["support"] = restricted(drain(engine, case.requests(top_k=3, top_p=0.9, support=3 + TIES)), model)
    return out


def restricted(outputs, model) -> dict:
    """The largest error of the log-probs against those over the recorded tokens, or the three likeliest; and their numbers."""
    worst, sizes = 0.0, set()
    for (i, _), output in outputs.items():
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[i] + output.token_ids])).logits[0][len(PROMPTS[i]) - 1 : -1]
        recorded = logits.topk(3).indices if output.support is None else torch.from_numpy(output.support)
        for row, token, log_prob, tokens in zip(logits, output.token_ids, output.log_probs, recorded, strict=True):
            kept = tokens[tokens >= 0].tolist()
            worst = max(worst, abs(float(row[kept].log_softmax(0)[kept.index(token)]) - log_prob))
            sizes.add(len(kept))
    return {"error": worst, "sizes": sorted(sizes)}


def prefix_cache(case, engine, first: Callable, second: Callable) -> dict:
    """A prompt long enough to be cached: before an update, waiting while it happens, and after it."""
    old = first(0)
    requests = case.requests(n=11, max_tokens=12, prompts=case.long[:1], ignore_eos=True)  # 8 slots: 3 wait
    out = {"before": case.error(drain(engine, requests[:8]), old, case.long)}
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    new = second(1)
    waited = {k: o for k, o in drain(engine, []).items() if k[1] >= 8}
    out |= {"waited": case.error(waited, new, case.long), "versions": [o.versions for o in waited.values()]}
    return out | {"after": case.error(drain(engine, requests), new, case.long)}


def turns(case, engine) -> dict:
    """A further turn after an update, whose KV cache is to be kept or not; and requests that came last and are to go first."""
    out, weights = {}, case.changed()
    for name, keeps in {"kept": True, "not kept": False}.items():
        first = Request((0, 0), LONG, SamplingParams(max_tokens=20, ignore_eos=True), 1)
        output = drain(engine, [first])[0, 0]
        engine.update(weights.named_parameters(), version=engine.version + 1)
        added = [*output.token_ids, 5, 6]
        so_far = Output(first.id, added, [0.0] * 22, [output.versions[0]] * 22, "unfinished")
        second = replace(first, sampling=SamplingParams(max_tokens=40, ignore_eos=True), so_far=so_far)
        out[name] = drain(engine, [replace(second, kv_version=output.versions[0] if keeps else None)])[0, 0].cached
    ended, waiting = [], [3, 1, 2]
    for i in range(8):  # all slots
        engine.add(Request((i, 0), PROMPTS[0], SamplingParams(max_tokens=5 + i, ignore_eos=True), i, priority=i))
    engine.step()
    for priority in waiting:
        engine.add(Request((priority, 1), PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True), 1, priority=priority))
    while engine.num_unfinished:
        ended += [output.id for output in engine.step()]
    return out | {"order": [priority for priority, is_late in ended if is_late]}


def refusals(case, engine) -> dict:
    weights, name = dict(case.model.named_parameters()), "model.layers.0.mlp.up_proj.weight"
    engine.sleep()  # does nothing on a CPU
    engine.add(case.requests()[0])
    out = {"sleep": refusal(engine.sleep)}
    drain(engine, [])
    out["indivisible"] = refusal(lambda: case.engine(rollout_tp=2))
    out["small batch"] = refusal(lambda: case.engine(max_num_batched_tokens=100))
    out["too hot"] = refusal(lambda: case.engine(val_temperature=3.0))
    out["too long"] = refusal(lambda: engine.add(Request(0, [3] * 190, SamplingParams(max_tokens=11), 0)))
    out["missing"] = refusal(lambda: engine.update([(k, v) for k, v in weights.items() if k != name], version=1))
    out["misnamed"] = refusal(lambda: engine.update([*weights.items(), ("model.misnamed", weights[name])], version=1))
    out["other shape"] = refusal(lambda: engine.update([(name, weights[name].T)], version=1))
    engine.update(weights.items(), version=2)
    out["a whole update mends it"] = case.error(drain(engine, case.requests()), case.model)
    return out


def sleeping(case, engine) -> list:
    """Return the calls, in order, that a device with a sleep mode would receive. This one has none."""
    inner, calls, load = engine.engine, [], engine.weights.load
    inner.sleep = lambda level: calls.append(f"sleep {level}")
    inner.wake_up = lambda tags: calls.append(f"wake {tags}")
    engine.weights.load = lambda weights: (calls.append("load"), load(weights))
    vllm_engine.empty_cache = lambda: calls.append("empty cache")
    engine.sleeps = True
    engine.sleep()
    engine.sleep()
    calls.append(refusal(engine.step))
    engine.update(case.model.named_parameters(), version=9)
    return [*calls, case.error(drain(engine, case.requests(n=1)), case.model) < 1e-4]


def memory(case, engine) -> dict:
    """Resident memory over 200 updates; a response continues through each."""
    process, resident = psutil.Process(), []
    for version in range(220):
        engine.add(case.requests(max_tokens=2, ignore_eos=True)[version % 16])
        engine.step()
        engine.update(case.model.named_parameters(), version)
        drain(engine, [])
        resident.append(process.memory_info().rss / 2**20)
    model_mb = sum(p.numel() * 4 for p in case.model.parameters()) / 2**20
    return {"model MB": model_mb, "after 20 updates": resident[19], "after 220": resident[-1]}


class ForgetfulSampler(Sampler):
    """A sampler like vllm-ascend 0.23's, which drops the setting made at the start."""

    def __init__(self, **_):
        super().__init__(logprobs_mode="raw_logprobs")


class DeafSampler(ForgetfulSampler):
    """Another sampler, which never follows the setting."""

    def __init__(self, **_):
        super().__init__()
        self.topk_topp_sampler.forward = lambda logits, *_: (logits.argmax(-1), None)


def samplers(path: str) -> dict:
    """Engines whose samplers do not take the setting, and one whose requests have no seeds, as on an NPU."""
    case, given = Texts(path), gpu_model_runner.Sampler
    gpu_model_runner.Sampler = DeafSampler
    out = {"deaf": refusal(case.engine)}
    gpu_model_runner.Sampler, vllm_engine.seeds_are_slow = ForgetfulSampler, lambda: True
    engine = case.engine()
    gpu_model_runner.Sampler = given
    outputs, again = (drain(engine, case.requests(temperature=0.6)) for _ in range(2))
    out["error at 0.6"] = case.error(outputs, case.model, temperature=0.6)
    out["repeated"] = sum(outputs[key].token_ids == again[key].token_ids for key in outputs) / len(outputs)

    def sampled(seed: int, version: int, tickets: int = 0) -> list[list[int]]:
        torch.manual_seed(5)
        engine.update(case.model.named_parameters(), version)
        requests = case.requests(n=1, prompts=case.prompts[:1] * 4, ignore_eos=True)
        seeds = (request_seed(seed, tickets + request.id[0], 0) for request in requests)
        outputs = drain(engine, [replace(request, seed=own) for request, own in zip(requests, seeds, strict=True)])
        return [outputs[key].token_ids for key in sorted(outputs)]

    out["streams"] = {"run": sampled(7, 3)}
    state = torch.get_rng_state()
    out["streams"] |= {"the same step of a resumed run": sampled(7, 3), "another --seed": sampled(8, 3)}
    out["streams"] |= {"another engine": sampled(7, 3, tickets=100), "another step": sampled(7, 4)}
    torch.manual_seed(5)
    return out | {"random state untouched": torch.equal(state, torch.get_rng_state())}


def bfloat16(path: str) -> dict:
    case = Texts(path)
    engine, new = case.engine(torch.bfloat16), case.changed().bfloat16()
    engine.update(new.named_parameters(), 1)
    mean = float(case.errors(drain(engine, case.requests(n=2)), new).mean())
    return {"mean": mean, "wrong": wrongly_loaded(engine, new)}


def tensor_parallel(path: str) -> dict:
    """On each of two ranks under torchrun; the first one reports, after comparing with the other."""
    from rl.ranks import dist

    ranks, case = dist.init(), Texts(path)
    engine, old, new = case.engine(rollout_tp=2), case.model, case.changed()
    out = {"before": case.error(drain(engine, case.requests()), old)}
    out |= both_ways(case, engine, sends(engine, old), sends(engine, new))
    outputs = drain(engine, case.requests(temperature=0.7))
    out["after"] = case.error(outputs, new, temperature=0.7)
    learned = dict(new.named_parameters())
    out["wrong"] = [n for n, tensor in learned.items() if not torch.equal(engine.own_part(n, tensor), engine.read_back(n))]
    out["parts"] = sum(engine.read_back(name).numel() for name in learned) / sum(p.numel() for p in learned.values())
    # of this engine, whatever other jobs have left: what is mapped here, and still has a name
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "cpushm" in line}
    out["shared memory"] = {"mapped": len(mapped), "named": [name for name in mapped if not name.endswith("(deleted)")]}
    out["ranks agree"] = agree(outputs)
    return out if ranks.is_main else {}


def agree(outputs) -> bool:
    """Whether all ranks have the same responses. Collective."""
    from rl.ranks import dist

    routes = {key: None if o.routes is None else o.routes.tolist() for key, o in outputs.items()}
    mine = json.dumps(sorted([list(k), o.token_ids, o.log_probs, routes[k]] for k, o in outputs.items())).encode()
    return len(set(map(bytes, dist.all_gather_bytes(mine)))) == 1


# ------------------------------------------------------------------------------------------------------------ processes


def run_in_fork(name: str, function: Callable[[str], dict], path: str, results: Path, environment: dict[str, str]) -> int:
    """Starts the function in a child, whose output goes to <name>.log and result to <name>.json; returns its process id."""
    if child := os.fork():
        return child
    log = os.open(results / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ.update(environment)
    code = 0
    try:
        if numbers := function(path):
            (results / f"{name}.part").write_text(json.dumps(numbers))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Set the variables that torchrun would set."""
    if ranks == 1:
        return {}
    counts = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, GROUP_RANK=0, GROUP_WORLD_SIZE=1)
    return {name: str(value) for name, value in counts.items()} | dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def main(runs: dict[str, tuple[str, str, int]], results: Path, functions: dict[str, Callable]) -> None:
    """Two processes at a time. A finished run leaves <name>.json, or <name>.failed with the end of its log."""
    waiting, running = list(runs.items()), {}  # process id -> name
    while waiting or running:
        while waiting and len(running) + waiting[0][1][2] <= 2:
            name, (function, path, ranks) = waiting.pop(0)
            port = free_port()
            places = [place(rank, ranks, port) for rank in range(ranks)]
            running |= {run_in_fork(name, functions[function], path, results, of_rank): name for of_rank in places}
        child, status = os.wait()
        name = running.pop(child)
        if status:
            (results / f"{name}.failed").write_text((results / f"{name}.log").read_text()[-6000:])
        elif name not in running.values() and (results / f"{name}.part").exists():
            (results / f"{name}.part").rename(results / f"{name}.json")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), globals())
