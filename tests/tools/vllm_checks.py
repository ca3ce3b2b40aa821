"""Checks that tests/generation/test_engine_vllm.py runs in separate processes, because vLLM patches its process.

    python tests/tools/vllm_checks.py '{"tied": ["after_update", "models/tied", 1]}' results

Each function starts one engine, measures, and returns numbers; the judgement is in the test file. Importing vLLM takes longer
than measuring, so it is imported once and every function runs in a fork: name -> [function, model directory, ranks].
"""

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
import torch.distributed
import vllm
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generation"))

from helpers import free_port
from test_engine import PROMPTS, changed, drain, mixed_reference, reference_log_probs, requests_for
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner

from rl.errors import UserError
from rl.generation.engine import EngineArgs, Output, Request, SamplingParams, request_seed
from rl.generation.vllm import engine as vllm_engine
from rl.generation.vllm.engine import VLLMEngine
from rl.model.sampling_mask import TIES, apart

LONG = [5 + i % 20 for i in range(140)]  # more than a KV block of a CPU, 128 tokens: less is never shared
MAX_LENGTH = 200


@dataclass
class OfTurns(EngineArgs):
    """As of a run with --env."""

    has_environment = True


def start(path: str, dtype: torch.dtype = torch.float32, Args=EngineArgs, **flags) -> VLLMEngine:
    args = Args(**{"max_num_seqs": 8, "max_num_batched_tokens": 2048, **flags})  # fewer slots than requests
    return VLLMEngine(path, args, MAX_LENGTH, dtype)


def error(outputs, model, temperature: float = 1.0, prompts=PROMPTS) -> float:
    """The largest difference between the outputs' log-probs and a forward pass of the model."""
    worst = 0.0
    for (i, *_), output in outputs.items():
        expected = reference_log_probs(model, prompts[i], output.token_ids, temperature)
        worst = max(worst, (torch.tensor(output.log_probs) - expected).abs().max().item())
    return worst


def wrongly_loaded(engine, model) -> list[str]:
    """Return the weights that the engine's copies do not equal bit for bit."""
    return [
        name
        for name, weight in model.named_parameters()
        if (live := engine.read_back(name)) is None or not torch.equal(live, weight.data.to(live.dtype))
    ]


def refusal(act) -> str:
    try:
        act()
    except (ValueError, RuntimeError, UserError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return "nothing was raised"


def after_update(path: str, engine: VLLMEngine | None = None) -> dict:
    """Any kind of model: log-probs and read-back before an update and after."""
    engine, old, new = engine or start(path), AutoModelForCausalLM.from_pretrained(path), changed(path)
    out = {"error before": error(drain(engine, requests_for(n=2)), old), "wrong before": wrongly_loaded(engine, old)}
    engine.update(new.named_parameters(), version=4)
    outputs = drain(engine, requests_for(n=2))
    out |= {"error after": error(outputs, new), "wrong after": wrongly_loaded(engine, new)}
    out["versions"] = sorted({v for o in outputs.values() for v in o.versions})
    out["without the workaround"] = without_workaround(engine, path)
    return out


def without_workaround(engine, path: str) -> dict:
    """The same once more with each repair of a CPU's silent faults left out."""
    found = {}
    for repair in ("_repack_heads", "_forget_packed_experts"):
        torch.manual_seed(len(repair))
        model = AutoModelForCausalLM.from_pretrained(path)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        setattr(engine.weights, repair, lambda: None)
        engine.update(model.named_parameters(), version=5)
        delattr(engine.weights, repair)
        found[repair] = {"error": error(drain(engine, requests_for(n=2)), model), "wrong": wrongly_loaded(engine, model)}
        engine.update(model.named_parameters(), version=6)
        found[repair]["error when repaired"] = error(drain(engine, requests_for(n=2)), model)
    return found


def everything(path: str) -> dict:
    """All that one engine can show; the tied model."""
    engine, old, new = start(path), AutoModelForCausalLM.from_pretrained(path), changed(path)
    out = {"sampling": sampling(engine, old)}
    out["kept"], out["recomputed"] = (in_flight(engine, old, new, recompute) for recompute in (False, True))
    out["elsewhere"] = elsewhere(engine, new)
    out["prefix"] = prefix_cache(engine, old, new)
    out["refusals"] = refusals(engine, old)
    return out


def updates(path: str) -> dict:
    """The tied model: as after_update, and then 200 updates more."""
    engine, model = start(path, Args=OfTurns), AutoModelForCausalLM.from_pretrained(path)
    out = after_update(path, engine) | {"turns": turns(engine, path)}
    return out | {"memory": memory(engine, model), "sleeping": sleeping(engine, model)}


def sampling(engine, model) -> dict:
    out = {}
    for temperature in (1.0, 0.7, 0.0):
        outputs = drain(engine, requests_for(temperature))
        out[f"error at {temperature}"] = error(outputs, model, temperature or 1.0)
        out[f"reasons at {temperature}"] = sorted({o.finish_reason for o in outputs.values()})
        ends = [(o.token_ids[-1] == 1) == (o.finish_reason == "stop") and 1 not in o.token_ids[:-1] for o in outputs.values()]
        out[f"ends at {temperature}"] = all(ends)
    wide, alone, again = drain(engine, requests_for()), drain(engine, requests_for()[5:6]), drain(engine, requests_for()[::-1])
    out["alone"] = alone[(1, 1)].token_ids == wide[(1, 1)].token_ids
    out["in another order"] = all(again[k].token_ids == wide[k].token_ids for k in wide)
    out["different responses"] = len({tuple(o.token_ids) for o in wide.values()})
    few = drain(engine, requests_for(top_k=3))
    out["top-k, smallest sum"], out["top-k error"] = truncated(few, model, k=3)
    support = drain(engine, requests_for(top_k=3, top_p=0.9, support=3 + TIES, support_log_probs=True))
    out["support error"], out["support sizes"] = restricted(support, model)
    out["tokens of a request that ignores the end"] = sorted(
        {len(o.token_ids) for o in drain(engine, requests_for(ignore_eos=True)).values()}
    )
    return out


def truncated(outputs, model, k: int) -> tuple[bool, float]:
    """(Whether every token was among the k likeliest, the largest error against the log-probs renormalised over them)."""
    inside, worst = True, 0.0
    for (i, _), output in outputs.items():
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[i] + output.token_ids])).logits[0][len(PROMPTS[i]) - 1 : -1]
        values, tokens = logits.topk(k)
        hit = tokens == torch.tensor(output.token_ids)[:, None]
        inside &= bool(hit.any(-1).all())
        worst = max(worst, (values.log_softmax(-1)[hit] - torch.tensor(output.log_probs)).abs().max().item())
    return inside, worst


def restricted(outputs, model) -> tuple[float, list[int]]:
    """The largest error of the log-probs, and of those that are recorded, against those over the recorded support, and how
    many tokens it had."""
    worst, sizes = 0.0, set()
    for (i, _), output in outputs.items():
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[i] + output.token_ids])).logits[0][len(PROMPTS[i]) - 1 : -1]
        tokens, sampler = apart(torch.from_numpy(output.support), with_log_probs=True)
        places = zip(logits, output.token_ids, output.log_probs, tokens, sampler, strict=True)
        for of_place, token, log_prob, row, of_row in places:
            kept = row[row >= 0].tolist()
            expected = of_place[kept].log_softmax(0)
            worst = max(worst, abs(float(expected[kept.index(token)]) - log_prob))
            worst = max(worst, float((of_row[row >= 0] - expected).abs().max()))
            sizes.add(len(kept))
    return worst, sorted(sizes)


def in_flight(engine, old, new, recompute: bool) -> dict:
    """A swap in the middle of responses, against the exact references of tests/generation/test_engine.py."""
    engine.update(old.named_parameters(), version=0)
    for request in requests_for(n=1, max_tokens=20, ignore_eos=True):
        engine.add(request)
    early = [output for _ in range(6) for output in engine.step()]
    engine.update(new.named_parameters(), version=1, recompute_kv=recompute)
    outputs, errors = drain(engine, []), {"old": 0.0, "new": 0.0}
    for (i, _), output in outputs.items():
        before, after = output.token_ids[:6], output.token_ids[6:]
        got = torch.tensor(output.log_probs)
        if recompute:
            expected = reference_log_probs(new, PROMPTS[i] + before, after, 1.0)
        else:
            expected = mixed_reference(old, new, PROMPTS[i] + before, after)
        first = reference_log_probs(old, PROMPTS[i], before, 1.0)
        errors["old"] = max(errors["old"], (got[:6] - first).abs().max().item())
        errors["new"] = max(errors["new"], (got[6:] - expected).abs().max().item())
    versions = all(output.versions == [0] * 6 + [1] * 14 for output in outputs.values())
    return errors | {"finished early": len(early), "finished": len(outputs), "versions": versions}


def elsewhere(engine, model) -> dict:
    """Responses that are interrupted, some before they have begun, and continue as new requests."""
    engine.update(model.named_parameters(), version=3)
    requests = requests_for(n=3, max_tokens=20, ignore_eos=True)  # 12 of them, and 8 slots
    for request in requests:
        engine.add(request)
    for _ in range(6):
        engine.step()
    so_far = {output.id: output for output in engine.unfinished()}
    drain(engine, [])
    engine.update(model.named_parameters(), version=4)
    again = [dataclasses.replace(r, so_far=so_far[r.id] if so_far[r.id].token_ids else None) for r in requests]
    outputs = drain(engine, again)
    kept = [len(so_far[r.id].token_ids) for r in requests]
    return {
        "kept": sorted(set(kept)),
        "error": error(outputs, model),
        "begins the same": all(outputs[k].token_ids[: len(s.token_ids)] == s.token_ids for k, s in so_far.items()),
        "log-probs": all(outputs[k].log_probs[: len(s.token_ids)] == s.log_probs for k, s in so_far.items()),
        "versions": all(outputs[r.id].versions == [3] * n + [4] * (20 - n) for r, n in zip(requests, kept, strict=True)),
    }


def prefix_cache(engine, old, new) -> dict:
    """A prompt long enough to be cached: before an update, waiting while it happens, and after it."""
    engine.update(old.named_parameters(), version=0)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [Request((0, j), LONG, params, j) for j in range(11)]  # 8 slots: 3 wait
    out = {"before": error(drain(engine, requests[:8]), old, prompts=[LONG])}
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    engine.update(new.named_parameters(), version=1)
    outputs = drain(engine, [])
    waited = {k: o for k, o in outputs.items() if k[1] >= 8}
    out["waited"], out["waited, versions"] = (
        error(waited, new, prompts=[LONG]),
        sorted({v for o in waited.values() for v in o.versions}),
    )
    out["after"] = error(drain(engine, requests), new, prompts=[LONG])
    return out


def turns(engine, path: str) -> dict:
    """A further turn after an update, whose KV cache is to be kept or not; and requests that came last and are to go first."""
    out, weights = {}, changed(path)
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


def refusals(engine, model) -> dict:
    weights, name = dict(model.named_parameters()), "model.layers.0.mlp.up_proj.weight"
    engine.sleep()  # does nothing on a CPU
    engine.add(requests_for()[0])
    out = {"sleep": refusal(engine.sleep)}
    drain(engine, [])
    out["indivisible"] = refusal(lambda: start("any model", rollout_tp=2))
    out["small batch"] = refusal(lambda: start("any model", max_num_batched_tokens=100))
    out["too hot"] = refusal(lambda: start("any model", val_temperature=3.0))
    out["freed meanwhile"] = refusal(lambda: start_while_memory_is_freed(model.name_or_path))
    out["too long"] = refusal(lambda: engine.add(Request(0, [3] * 190, SamplingParams(max_tokens=11), 0)))
    out["missing"] = refusal(lambda: engine.update([(k, v) for k, v in weights.items() if k != name], version=1))
    out["misnamed"] = refusal(lambda: engine.update([*weights.items(), ("model.misnamed", weights[name])], version=1))
    out["other shape"] = refusal(lambda: engine.update([(name, weights[name].T)], version=1))
    engine.update(weights.items(), version=2)
    out["a whole update mends it"] = error(drain(engine, requests_for()), model)
    return out


def start_while_memory_is_freed(path: str) -> None:
    """Start vLLM, whose profiling finds more free memory at its end than at its beginning."""
    given = vllm.LLMEngine.from_engine_args

    def from_engine_args(_):
        raise AssertionError("Error in memory profiling. Initial free memory 20.1 GiB, current free memory 33.0 GiB.")

    vllm.LLMEngine.from_engine_args = from_engine_args
    try:
        start(path)
    finally:
        vllm.LLMEngine.from_engine_args = given


def sleeping(engine, model) -> list:
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
    engine.update(model.named_parameters(), version=9)
    return [*calls, error(drain(engine, requests_for(n=1)), model) < 1e-4]


def wakes_with_turned_experts(path: str) -> dict:
    """A model with experts, whose worker wakes up as vllm-ascend 0.23's does: experts are parameters turned to [E, out, in]."""
    engine, old, new = start(path), AutoModelForCausalLM.from_pretrained(path), changed(path)
    inner, model, turned = engine.engine, engine.weights.model, []

    def wake_up(tags: list[str]) -> None:
        for name, parameter in list(model.named_parameters()) if "weights" in tags else ():
            if "w13_weight" in name or "w2_weight" in name:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, torch.nn.Parameter(parameter.transpose(1, 2), requires_grad=False))
                turned.append(name)

    inner.sleep, inner.wake_up, engine.sleeps = lambda level: None, wake_up, True
    errors = []
    for version, weights in enumerate((new, old)):
        engine.sleep()
        engine.update(weights.named_parameters(), version)
        errors.append(error(drain(engine, requests_for(n=1)), weights))
    return {"turned": len(turned), "errors": errors}


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
    given = gpu_model_runner.Sampler
    gpu_model_runner.Sampler = DeafSampler
    out = {"deaf": refusal(lambda: start(path))}
    gpu_model_runner.Sampler, vllm_engine.seeds_are_slow = ForgetfulSampler, lambda: True
    engine, model = start(path), AutoModelForCausalLM.from_pretrained(path)
    gpu_model_runner.Sampler = given
    assert engine.engine.model_executor.driver_worker.worker.model_runner.sampler.__class__ is ForgetfulSampler
    outputs = drain(engine, requests_for(0.6))
    again = drain(engine, requests_for(0.6))
    out["error at 0.6"] = error(outputs, model, 0.6)
    out["repeated"] = sum(outputs[key].token_ids == again[key].token_ids for key in outputs) / len(outputs)
    out["streams"] = streams(engine, model)
    return out


def streams(engine, model) -> dict[str, list]:
    """What engines without seeds sample from equal random numbers of the process: name -> tokens of each response."""

    def sampled(seed: int, version: int, tickets: int = 0, so_far: int = 0) -> list[list[int]]:
        torch.manual_seed(5)
        engine.update(model.named_parameters(), version)
        for request in requests_for(n=1, ignore_eos=True):
            number = request.id[0]
            before = Output(request.id, [5] * so_far, [-1.0] * so_far, [0] * so_far, "unfinished") if so_far else None
            # The prompts are equal, so that only the random numbers can differ.
            engine.add(
                dataclasses.replace(request, prompt_ids=PROMPTS[0], seed=request_seed(seed, tickets + number, 0), so_far=before)
            )
        outputs = drain(engine, [])
        return [outputs[key].token_ids[so_far:] for key in sorted(outputs)]

    out = {"run": sampled(7, 3)}
    state = torch.get_rng_state()
    out["the same step of a resumed run"] = sampled(7, 3)
    out["another --seed"] = sampled(8, 3)
    out["another engine"] = sampled(7, 3, tickets=100)
    out["another step"] = sampled(7, 4)
    out["unfinished responses"] = sampled(7, 3, so_far=2)
    torch.manual_seed(5)
    out["random state untouched"] = torch.equal(state, torch.get_rng_state())
    return out


def memory(engine, model) -> dict:
    """Resident memory over 200 updates; a response continues through each."""
    process, resident = psutil.Process(), []
    for version in range(220):
        engine.add(requests_for(max_tokens=2, ignore_eos=True)[version % 16])
        engine.step()
        engine.update(model.named_parameters(), version)
        drain(engine, [])
        resident.append(process.memory_info().rss / 2**20)
    model_mb = sum(p.numel() * 4 for p in model.parameters()) / 2**20
    return {"model MB": model_mb, "after 20 updates": resident[19], "after 220": resident[-1]}


def bfloat16(path: str) -> dict:
    engine, old, new = start(path, torch.bfloat16), AutoModelForCausalLM.from_pretrained(path), changed(path)
    differences = []
    for model, version in ((old, 0), (new, 1)):
        engine.update(model.named_parameters(), version)
        for (i, _), output in drain(engine, requests_for(n=2)).items():
            expected = reference_log_probs(model.bfloat16(), PROMPTS[i], output.token_ids, 1.0)
            differences += (torch.tensor(output.log_probs) - expected).abs().tolist()
    out = {"mean": sum(differences) / len(differences), "max": max(differences), "wrong": wrongly_loaded(engine, new)}
    engine.engine.engine_core.shutdown()
    return out


def tensor_parallel(path: str) -> dict:
    """On each of two ranks under torchrun; the first one reports, after comparing with the other."""
    from rl.ranks import dist

    ranks = dist.init()
    engine, old, new = start(path, rollout_tp=2), AutoModelForCausalLM.from_pretrained(path), changed(path)
    out = {"error before": error(drain(engine, requests_for()), old)}
    out["kept"], out["recomputed"] = (in_flight(engine, old, new, recompute) for recompute in (False, True))
    outputs = drain(engine, requests_for(0.7))
    out["error after"] = error(outputs, new, 0.7)
    learned = dict(new.named_parameters())
    same = {name: torch.equal(engine.own_part(name, tensor), engine.read_back(name)) for name, tensor in learned.items()}
    out["wrong"] = [name for name, is_same in same.items() if not is_same]
    out["parts"] = sum(engine.read_back(name).numel() for name in learned) / sum(p.numel() for p in learned.values())
    # of this engine, whatever other jobs have left: what is mapped here, and still has a name
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "cpushm" in line}
    out["shared memory"] = {"mapped": len(mapped), "named": [name for name in mapped if not name.endswith("(deleted)")]}
    mine = json.dumps(sorted([list(k), o.token_ids, o.log_probs] for k, o in outputs.items())).encode()
    out["ranks agree"] = len(set(map(bytes, dist.all_gather_bytes(mine)))) == 1
    return out if ranks.is_main else {}


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
            running |= {
                run_in_fork(name, functions[function], path, results, place(r, ranks, port)): name for r in range(ranks)
            }
        child, status = os.wait()
        name = running.pop(child)
        if status:
            (results / f"{name}.failed").write_text((results / f"{name}.log").read_text()[-6000:])
        elif name not in running.values() and (results / f"{name}.part").exists():
            (results / f"{name}.part").rename(results / f"{name}.json")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), globals())
