"""Checks of the vLLM engine, for tests/generation/test_engine_vllm.py: in processes of their own, because vLLM patches its
process. Each function starts one engine, and raises AssertionError if a check fails. Other kinds of models: vllm_kinds.py.

    python tests/tools/vllm_checks.py everything models/tied
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generation"))

from test_engine import PROMPTS, changed, drain, mixed_reference, reference_log_probs
from test_stop_strings import LETTERS, STOP, first_end
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner

from rl.errors import UserError
from rl.generation.engine import EngineArgs, Output, Request, SamplingArgs, SamplingParams, request_seed
from rl.generation.stop_strings import StopStrings
from rl.generation.vllm import engine as vllm_engine
from rl.generation.vllm.engine import VLLMEngine
from rl.model.sampling_mask import TIES

LONG = [5 + i % 20 for i in range(140)]  # more than a KV block of a CPU, 128 tokens: less is never shared
MAX_LENGTH = 200
BOUND = 1e-4  # of log-probs in fp32


class Texts:
    """A model, its prompts (ids, images), and what transformers computes of them."""

    slots, length, end_tokens = 8, MAX_LENGTH, None  # fewer slots than requests

    def __init__(self, path: str):
        self.path, self.model = path, AutoModelForCausalLM.from_pretrained(path)
        self.prompts = [(ids, None) for ids in PROMPTS]
        self.long = [(LONG, None)]

    def changed(self):
        return changed(self.path)

    def engine(self, dtype: torch.dtype = torch.float32, how: dict | None = None, **flags) -> VLLMEngine:
        """how: keyword arguments of VLLMEngine; flags: of EngineArgs."""
        args = EngineArgs(**{"max_num_seqs": self.slots, "max_num_batched_tokens": 2048, **flags})
        return VLLMEngine(self.path, args, self.length, dtype, end_tokens=self.end_tokens, **(how or {}))

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

    def check(self, outputs, model, *what, **how) -> None:
        """The outputs' log-probs are those of a forward pass."""
        assert (error := self.error(outputs, model, *what, **how)) < BOUND, error


def check_loaded(engine, model) -> None:
    """The engine's copies equal the model's weights bit for bit, except the packed experts of a CPU."""
    live = {name: (engine.read_back(name), weight.data) for name, weight in model.named_parameters()}
    live = {name: pair for name, pair in live.items() if ".experts." not in name or pair[0] is not None}
    wrong = [name for name, (held, own) in live.items() if held is None or not torch.equal(held, own.to(held.dtype))]
    assert not wrong, wrong


def check_refused(said: str, act) -> None:
    """It raises an error whose kind and message have this in them."""
    try:
        act()
    except (ValueError, RuntimeError, UserError) as caught:
        assert said in (found := f"{type(caught).__name__}: {caught}"), found
    else:
        raise AssertionError(f"nothing was raised: {said}")


def sends(engine, model) -> Callable:
    """Return a publish (version, recompute) of the model's weights, which returns the model."""

    def publish(version: int, recompute: bool = False):
        engine.update(model.named_parameters(), version, recompute)
        return model

    return publish


def check_in_flight(
    case,
    engine,
    first: Callable,
    second: Callable,
    recompute: bool,
    tokens: int = 20,
    slots: int = 4,
    bound=BOUND,
    mean=torch.max,
) -> None:
    """Publish the second, twice, amid responses of the first, which take this many slots. Their tokens before are the first's,
    and those after the second's, over the first's KV or over their own: if the KV had been treated the other way, they would
    not be. Requests that waited are the second's."""
    old = first(0)
    for request in case.requests(n=1, max_tokens=tokens, ignore_eos=True):
        engine.add(request)
    for _ in range(6):
        assert engine.step() == []
    new = second(1, recompute)
    for _ in range(3):
        assert engine.step() == []
    second(2, recompute)
    found = {"old": [], "new": [], "other": []}
    for (i, _), output in drain(engine, []).items():
        kept, got, what = output.versions.count(0), torch.tensor(output.log_probs), (case.prompts[i], output.token_ids)
        assert output.versions == ([0] * 6 + [1] * 3 + [2] * (tokens - 9) if kept else [2] * tokens)
        if not kept:
            found["new"].append((got - case.log_probs(new, *what)).abs())
            continue
        found["old"].append((got[:kept] - case.log_probs(old, *what)[:kept]).abs())
        fresh, mixed = case.log_probs(new, *what, kept=kept), case.log_probs(new, *what, old=old, kept=kept)
        for name, expected in zip(("new", "other"), (fresh, mixed) if recompute else (mixed, fresh), strict=True):
            found[name].append((got[kept:] - expected).abs())
    assert len(found["old"]) == slots
    gaps = {name: float(mean(torch.cat(of_name))) for name, of_name in found.items()}
    assert max(gaps["old"], gaps["new"]) < bound < gaps["other"], gaps


def check_both_ways(*case, **how) -> None:
    for recompute in (False, True):
        check_in_flight(*case, recompute, **how)


def interrupted(engine, requests: list[Request], steps: int = 6) -> tuple[dict, dict]:
    """Return the responses after these steps, and as they end when they continue as new requests."""
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        engine.step()
    so_far = {output.id: output for output in engine.unfinished()}
    check_tokens(engine, so_far)
    engine.abort()
    for r in requests:
        if r.id in so_far:  # the others have ended
            engine.add(replace(r, so_far=so_far[r.id] if so_far[r.id].token_ids else None))
    check_tokens(engine, so_far)
    return so_far, drain(engine, [])


def check_tokens(engine, so_far: dict) -> None:
    """What is passed on to agents is what has been sampled."""
    assert engine.tokens_of(so_far) == {id: output.token_ids for id, output in so_far.items()}
    assert not engine.tokens_of(["another"])


def after_update(path: str, case=None, engine=None) -> None:
    """Any kind of model: log-probs and read-back before an update and after."""
    case = case or Texts(path)
    engine, new = engine or case.engine(), case.changed()
    case.check(drain(engine, case.requests(n=2)), case.model)
    check_loaded(engine, case.model)
    engine.update(new.named_parameters(), version=4)
    outputs = drain(engine, case.requests(n=2))
    case.check(outputs, new)
    check_loaded(engine, new)
    assert {v for o in outputs.values() for v in o.versions} == {4}


# ------------------------------------------------------------------------------------------------ what one engine shows


def everything(path: str) -> None:
    """The tied model."""
    case = Texts(path)
    engine, old, new = case.engine(how={"by_priority": True}), case.model, case.changed()
    after_update(path, case, engine)
    engine.update(old.named_parameters(), version=2)
    sampling(case, engine)
    stop_strings(case, engine)
    check_both_ways(case, engine, sends(engine, old), sends(engine, new))
    engine.update(new.named_parameters(), version=3)
    # a response continues elsewhere, as after a restart: sampled tokens keep their log-probs, and the rest continues from them
    so_far, outputs = interrupted(engine, case.requests(n=3, max_tokens=20, ignore_eos=True))  # 12 of them, and 8 slots
    assert {len(output.token_ids) for output in so_far.values()} == {0, 6}
    case.check(outputs, new)
    for key, begun in so_far.items():
        assert outputs[key].token_ids[: len(begun.token_ids)] == begun.token_ids
        assert outputs[key].log_probs[: len(begun.token_ids)] == begun.log_probs
    prefix_cache(case, engine, sends(engine, old), sends(engine, new))
    refusals(case, engine)
    turns(case, engine)
    sleeping(case, engine)


def sampling(case, engine) -> None:
    """Log-probs at each temperature and of truncated distributions. A response depends on its seed alone."""
    for temperature in (1.0, 0.7, 0.0):
        outputs = drain(engine, case.requests(temperature=temperature))
        case.check(outputs, case.model, temperature=temperature or 1.0)
        for o in outputs.values():
            assert (o.token_ids[-1] == 1) == (o.finish_reason == "stop") and 1 not in o.token_ids[:-1]
        assert temperature != 1.0 or {o.finish_reason for o in outputs.values()} == {"length", "stop"}
    wide, alone, again = (
        drain(engine, requests) for requests in (case.requests(), case.requests()[5:6], case.requests()[::-1])
    )
    assert alone[(1, 1)].token_ids == wide[(1, 1)].token_ids
    assert all(again[k].token_ids == wide[k].token_ids for k in wide)
    assert len({tuple(o.token_ids) for o in wide.values()}) > 12
    assert restricted(drain(engine, case.requests(top_k=3)), case.model) == {3}
    sizes = restricted(drain(engine, case.requests(top_k=3, top_p=0.9, support=3 + TIES)), case.model)
    assert min(sizes) >= 1 and max(sizes) == 3
    outputs = drain(engine, case.requests(temperature=0.7, top_k=9, top_p=0.9, min_p=0.2, support=9 + TIES))
    warpers = [TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.2), TopKLogitsWarper(9), TopPLogitsWarper(0.9)]
    sizes = set()
    for (i, _), output in outputs.items():
        with torch.no_grad():
            logits = case.model(torch.tensor([PROMPTS[i] + output.token_ids])).logits[0][len(PROMPTS[i]) - 1 : -1]
        expected = LogitsProcessorList(warpers)(None, logits).log_softmax(-1)
        for row, token, log_prob, tokens in zip(expected, output.token_ids, output.log_probs, output.support, strict=True):
            assert abs(float(row[token]) - log_prob) < BOUND
            assert {*tokens[tokens >= 0].tolist()} == {*torch.nonzero(row > -torch.inf).flatten().tolist()}
            sizes.add(int((tokens >= 0).sum()))
    assert len(sizes) > 4, sizes


def stop_strings(case, engine) -> None:
    """A response ends with the token that completes a string, also if it continues elsewhere, and if that token is its last.
    Otherwise it is what it is without."""
    own = {"ignore_eos": True, "max_tokens": 20}
    stop = StopStrings(STOP, LETTERS)
    whole, outputs = (drain(engine, case.requests(**own, stop=strings)) for strings in (None, stop))
    case.check(outputs, case.model)
    ends = {id: first_end(output.token_ids) for id, output in whole.items()}
    for id, output in outputs.items():
        assert output.token_ids == whole[id].token_ids[: ends[id]]
        assert output.finish_reason == ("stop" if ends[id] else "length")
    assert len({*ends.values()}) > 4
    last = next(id for id, end in ends.items() if end)
    (request,) = [r for r in case.requests(**own | {"max_tokens": ends[last]}, stop=stop) if r.id == last]
    assert drain(engine, [request])[last].finish_reason == "stop"
    so_far, outputs = interrupted(engine, case.requests(n=6, **own, stop=stop))
    case.check(outputs, case.model)
    for output in outputs.values():
        end = first_end(output.token_ids)
        assert end in (None, len(output.token_ids)) and output.finish_reason == ("stop" if end else "length")
    straddles = [output for id, output in outputs.items() if len(output.token_ids) == len(so_far[id].token_ids) + 1]
    assert any(output.finish_reason == "stop" for output in straddles)
    second = Request((0, 0), PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True, stop=stop), 5)
    so_far = Output((0, 0), [3, 7], [0.0] * 2, [engine.version] * 2, "unfinished")  # a turn of its own, "dd"
    output = drain(engine, [replace(second, so_far=so_far, turn=2)])[0, 0]
    assert first_end(output.token_ids[2:]) in (None, len(output.token_ids) - 2) and len(output.token_ids) > 3
    assert not engine.num_unfinished and not engine._scheduler.requests


def restricted(outputs, model) -> set[int]:
    """The log-probs are those over the recorded tokens, or the three likeliest; return their numbers."""
    sizes = set()
    for (i, _), output in outputs.items():
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[i] + output.token_ids])).logits[0][len(PROMPTS[i]) - 1 : -1]
        recorded = logits.topk(3).indices if output.support is None else torch.from_numpy(output.support)
        for row, token, log_prob, tokens in zip(logits, output.token_ids, output.log_probs, recorded, strict=True):
            kept = tokens[tokens >= 0].tolist()
            assert abs(float(row[kept].log_softmax(0)[kept.index(token)]) - log_prob) < BOUND
            sizes.add(len(kept))
    return sizes


def prefix_cache(case, engine, first: Callable, second: Callable) -> None:
    """No KV of other weights is shared: of a prompt long enough to be cached, before an update, waiting while it happens, and
    after it."""
    old = first(0)
    requests = case.requests(n=11, max_tokens=12, prompts=case.long[:1], ignore_eos=True)  # 8 slots: 3 wait
    case.check(drain(engine, requests[:8]), old, case.long)
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    new = second(1)
    waited = {k: o for k, o in drain(engine, []).items() if k[1] >= 8}
    case.check(waited, new, case.long)
    assert [o.versions for o in waited.values()] == [[1] * 12] * 3
    case.check(drain(engine, requests), new, case.long)


def turns(case, engine) -> None:
    """A further turn after an update, whose KV cache is to be kept or not; and requests that came last and are to go first."""
    weights = case.changed()
    for keeps in (True, False):
        first = Request((0, 0), LONG, SamplingParams(max_tokens=20, ignore_eos=True), 1)
        output = drain(engine, [first])[0, 0]
        engine.update(weights.named_parameters(), version=engine.version + 1)
        added = [*output.token_ids, 5, 6]
        so_far = Output(first.id, added, [0.0] * 22, [output.versions[0]] * 22, "unfinished")
        second = replace(first, sampling=SamplingParams(max_tokens=40, ignore_eos=True), so_far=so_far)
        cached = drain(engine, [replace(second, kv_version=output.versions[0] if keeps else None)])[0, 0].cached
        assert cached >= 128 if keeps else cached == 0, cached
    ended, waiting = [], [3, 1, 2]
    for i in range(8):  # all slots
        engine.add(Request((i, 0), PROMPTS[0], SamplingParams(max_tokens=5 + i, ignore_eos=True), i, priority=i))
    engine.step()
    for priority in waiting:
        engine.add(Request((priority, 1), PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True), 1, priority=priority))
    while engine.num_unfinished:
        ended += [output.id for output in engine.step()]
    assert [priority for priority, is_late in ended if is_late] == [1, 2, 3]


def refusals(case, engine) -> None:
    weights, name = dict(case.model.named_parameters()), "model.layers.0.mlp.up_proj.weight"
    engine.sleep()  # does nothing on a CPU
    engine.add(case.requests()[0])
    check_refused("1 unfinished", engine.sleep)
    drain(engine, [])
    check_refused("UserError: --rollout-tp 2: the 1 generating rank(s)", lambda: case.engine(rollout_tp=2))
    said = "UserError: --max-num-batched-tokens 100 is less than one sequence, 200 tokens"
    check_refused(said, lambda: case.engine(max_num_batched_tokens=100))
    hot = SamplingArgs(val_temperature=3.0)
    check_refused("UserError: --val-temperature 3: vLLM samples at 2 at most", lambda: case.engine(how={"sampling": hot}))
    check_refused("do not fit in 200", lambda: engine.add(Request(0, [3] * 190, SamplingParams(max_tokens=11), 0)))
    few = [(k, v) for k, v in weights.items() if k != name]
    check_refused(f"ValueError: the update lacks 1 weights, {name}", lambda: engine.update(few, version=1))
    many = [*weights.items(), ("model.misnamed", weights[name])]
    check_refused("ValueError: weight model.misnamed", lambda: engine.update(many, version=1))
    said = f"ValueError: weight {name} [64, 128] does not belong"
    check_refused(said, lambda: engine.update([(name, weights[name].T)], version=1))
    engine.update(weights.items(), version=2)  # a whole update mends it
    case.check(drain(engine, case.requests()), case.model)


def sleeping(case, engine) -> None:
    """The calls, in order, that a device with a sleep mode would receive; this one has none. The KV cache returns only after
    the new weights, so both together need not fit next to the learner's peak."""
    inner, calls, load = engine.engine, [], engine.weights.load
    inner.sleep = lambda level: calls.append(f"sleep {level}")
    inner.wake_up = lambda tags: calls.append(f"wake {tags}")
    engine.weights.load = lambda weights: (calls.append("load"), load(weights))
    vllm_engine.empty_cache = lambda: calls.append("empty cache")
    engine.sleeps = True
    engine.sleep()
    engine.sleep()
    said = "RuntimeError: the engine sleeps and has no weights: it must be updated before it generates"
    check_refused(said, engine.step)
    engine.update(case.model.named_parameters(), version=9)
    weights = ["empty cache", "wake ['weights']", "load"]  # what the learner has freed is given back first
    assert calls == ["sleep 2", *weights, "empty cache", "wake ['kv_cache']"], calls
    case.check(drain(engine, case.requests(n=1)), case.model)


class ForgetfulSampler(Sampler):
    """A sampler like vllm-ascend 0.23's, which drops the setting made at the start."""

    def __init__(self, **_):
        super().__init__(logprobs_mode="raw_logprobs")


class DeafSampler(ForgetfulSampler):
    """Another sampler, which never follows the setting."""

    def __init__(self, **_):
        super().__init__()
        self.topk_topp_sampler.forward = lambda logits, *_: (logits.argmax(-1), None)


def samplers(path: str) -> None:
    """Engines whose samplers do not take the setting, and one whose requests have no seeds, as on an NPU: its random numbers
    follow from the run's seed, the requests and the step, whatever the process has drawn before."""
    case, given = Texts(path), gpu_model_runner.Sampler
    gpu_model_runner.Sampler = DeafSampler
    check_refused("UserError: --engine vllm: the sampler of this vLLM", case.engine)
    gpu_model_runner.Sampler, vllm_engine.seeds_are_slow = ForgetfulSampler, lambda: True
    engine = case.engine()
    gpu_model_runner.Sampler = given
    outputs, again = (drain(engine, case.requests(temperature=0.6)) for _ in range(2))
    case.check(outputs, case.model, temperature=0.6)
    assert sum(outputs[key].token_ids == again[key].token_ids for key in outputs) < 0.5 * len(outputs), "they do not repeat"

    def sampled(seed: int, version: int, tickets: int = 0) -> list[list[int]]:
        torch.manual_seed(5)
        engine.update(case.model.named_parameters(), version)
        requests = case.requests(n=1, prompts=case.prompts[:1] * 4, ignore_eos=True)
        seeds = (request_seed(seed, tickets + request.id[0], 0) for request in requests)
        outputs = drain(engine, [replace(request, seed=own) for request, own in zip(requests, seeds, strict=True)])
        return [outputs[key].token_ids for key in sorted(outputs)]

    run, state = sampled(7, 3), torch.get_rng_state()
    assert sampled(7, 3) == run, "the same step of a resumed run"
    for other in (sampled(8, 3), sampled(7, 3, tickets=100), sampled(7, 4)):  # another --seed, another engine, another step
        common = sum(a == b for mine, theirs in zip(other, run, strict=True) for a, b in zip(mine, theirs, strict=False))
        assert common < 0.5 * sum(map(len, run)), common
    torch.manual_seed(5)
    assert torch.equal(state, torch.get_rng_state()), "the script's own draws stay what they are"


def bfloat16(path: str) -> None:
    """The bound is loose, because bf16 logits are coarse. The weights are still exact."""
    case = Texts(path)
    engine, new = case.engine(torch.bfloat16), case.changed().bfloat16()
    engine.update(new.named_parameters(), 1)
    assert (mean := float(case.errors(drain(engine, case.requests(n=2)), new).mean())) < 0.05, mean
    check_loaded(engine, new)


def tensor_parallel(path: str) -> None:
    """On each of two ranks under torchrun."""
    from rl.ranks import dist

    ranks, case = dist.init(), Texts(path)
    engine, old, new = case.engine(rollout_tp=2), case.model, case.changed()
    case.check(drain(engine, case.requests()), old)
    check_both_ways(case, engine, sends(engine, old), sends(engine, new))
    outputs = drain(engine, case.requests(temperature=0.7))
    case.check(outputs, new, temperature=0.7)
    check_agree(outputs)
    check_agree(drain(engine, case.requests(ignore_eos=True, stop=StopStrings(STOP, LETTERS))))
    learned = dict(new.named_parameters())
    assert not [n for n, tensor in learned.items() if not torch.equal(engine.own_part(n, tensor), engine.read_back(n))]
    parts = sum(engine.read_back(name).numel() for name in learned) / sum(p.numel() for p in learned.values())
    assert not ranks.is_main or 0.5 < parts < 0.6, "each rank shows its own part"
    # of this engine, whatever other jobs have left: what is mapped here, and still has a name
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "cpushm" in line}
    assert mapped and all(name.endswith("(deleted)") for name in mapped), mapped


def check_agree(outputs) -> None:
    """All ranks have the same responses. Collective."""
    from rl.ranks import dist

    routes = {key: None if o.routes is None else o.routes.tolist() for key, o in outputs.items()}
    mine = sorted([list(key), o.token_ids, o.log_probs, routes[key]] for key, o in outputs.items())
    first, *others = dist.all_gather_values(mine)
    assert all(other == first for other in others)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
