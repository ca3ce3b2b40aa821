"""The embedded engine, compared with transformers' own forward pass, the contract that every engine keeps, and --engine."""

import sys
import types

import pytest
import torch
from helpers import drain
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rl.errors import UserError
from rl.generation.embedded import TransformersEngine, sample
from rl.generation.engine import EngineArgs, Request, SamplingParams, request_seed
from rl.generation.make import choose_engine, make_engine

HYBRIDS = ("qwen3_5", "qwen3_next")  # these decode by a recurrence what a forward pass computes in chunks
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [3, 4, 5, 6], [20] * 9]


def reference_log_probs(model, prompt, tokens, temperature):
    """Log-probs of `tokens` after `prompt`, by one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0] / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(tokens)), torch.tensor(tokens)]


def close(output, start: int, expected, kind: str) -> None:
    """The output's log-probs from token `start` are these."""
    found = torch.tensor(output.log_probs[start : start + len(expected)])
    torch.testing.assert_close(found, expected, atol=1e-3 if kind in HYBRIDS else 1e-4, rtol=0)


def requests_for(temperature=1.0, n=4, max_tokens=24, **sampling):
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, **sampling)
    return [Request((i, j), p, params, request_seed(7, i, j)) for i, p in enumerate(PROMPTS) for j in range(n)]


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen2-untied", "qwen3", *HYBRIDS])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_agree_with_a_forward_pass(models, kind, temperature):
    engine = TransformersEngine(models[kind], max_length=64, max_num_seqs=5)  # fewer slots than requests
    reference = AutoModelForCausalLM.from_pretrained(models[kind])
    outputs = drain(engine, requests_for(temperature))
    assert len(outputs) == 16 and {o.finish_reason for o in outputs.values()} == {"stop", "length"}
    for (i, _), output in outputs.items():
        close(output, 0, reference_log_probs(reference, PROMPTS[i], output.token_ids, temperature), kind)
        assert (output.token_ids[-1] == 1) == (output.finish_reason == "stop")
        assert 1 not in output.token_ids[:-1]


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3_5"])
def test_greedy_equals_generate(models, kind):
    engine = TransformersEngine(models[kind], max_length=64)
    model = AutoModelForCausalLM.from_pretrained(models[kind])
    outputs = drain(engine, requests_for(temperature=0.0, n=1))
    for (i, _), output in outputs.items():
        ids = torch.tensor([PROMPTS[i]])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert output.token_ids == expected[0, len(PROMPTS[i]) :].tolist()


def test_tokens_are_read_while_responses_grow(models):
    engine = TransformersEngine(models["qwen2-tied"], max_length=64, max_num_seqs=5)
    for request in requests_for():
        engine.add(request)
    some = {(0, 1), (3, 2)}
    while engine.num_unfinished:
        engine.step()
        grown = {output.id: output.token_ids for output in engine.unfinished() if output.token_ids}
        assert engine.tokens_of(some) == {id: grown[id] for id in some & grown.keys()}


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3_5"])
def test_a_response_depends_on_its_seed_alone(models, kind):
    """Not on the number of slots, the order of arrival, or the other responses."""
    wide = drain(TransformersEngine(models[kind], max_length=64), requests_for())
    narrow_engine = TransformersEngine(models[kind], max_length=64, max_num_seqs=3, max_num_batched_tokens=8)
    narrow = drain(narrow_engine, requests_for()[::-1])
    alone = drain(TransformersEngine(models[kind], max_length=64), requests_for()[5:6])
    assert {k: o.token_ids for k, o in wide.items()} == {k: o.token_ids for k, o in narrow.items()}
    assert alone[(1, 1)].token_ids == wide[(1, 1)].token_ids
    assert len({tuple(o.token_ids) for o in wide.values()}) > 12, "siblings must sample different streams"


def test_seeds_differ_by_seed_ticket_and_number():
    seeds = {request_seed(s, t, r) for s in range(3) for t in range(50) for r in range(8)}
    assert len(seeds) == 3 * 50 * 8 and max(seeds) < 2**63
    assert request_seed(1, 2, 3) == request_seed(1, 2, 3)


def changed(model_path):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen2-untied", *HYBRIDS])
@pytest.mark.parametrize("recompute", [False, True])
def test_update_in_flight(models, kind, recompute):
    """A swap in the middle of responses: with the KV recomputed the rest is the new model's; with the KV kept it is what
    an exact reference computes from the old model's KV and the new model's weights."""
    old, new = AutoModelForCausalLM.from_pretrained(models[kind]), changed(models[kind])
    engine = TransformersEngine(models[kind], max_length=64)
    engine.update(old.named_parameters(), version=0)
    requests = requests_for(n=1, max_tokens=20, ignore_eos=True)
    for request in requests:
        engine.add(request)
    for _ in range(5):  # the first step samples two tokens: prefill's and decode's
        assert engine.step() == []
    engine.update(new.named_parameters(), version=1, recompute_kv=recompute)
    outputs = drain(engine, [])
    for (i, _), output in outputs.items():
        assert output.versions == [0] * 6 + [1] * 14
        before, after = output.token_ids[:6], output.token_ids[6:]
        close(output, 0, reference_log_probs(old, PROMPTS[i], before, 1.0), kind)
        if recompute:
            expected = reference_log_probs(new, PROMPTS[i] + before, after, 1.0)
        else:
            expected = mixed_reference(old, new, PROMPTS[i] + before, after)
        close(output, 6, expected, kind)


def mixed_reference(old, new, context, tokens):
    """The old model fills the KV cache for all but the last token of the context. The new model continues from there, one token
    at a time: transformers before 5.6 forgets a recurrent state before several."""
    with torch.no_grad():
        cache = old(torch.tensor([context[:-1]]), use_cache=True).past_key_values
        fed = [context[-1], *tokens[:-1]]
        logits = torch.cat([new(torch.tensor([[token]]), past_key_values=cache).logits[0] for token in fed])
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


def test_update_refuses_weights_that_are_not_the_models(models):
    engine = TransformersEngine(models["qwen2-untied"], max_length=64)
    weights = dict(AutoModelForCausalLM.from_pretrained(models["qwen2-untied"]).named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"lacks 1 weights, {name}"):
        engine.update([(k, v) for k, v in weights.items() if k != name], version=1)
    with pytest.raises(ValueError, match="does not belong"):
        engine.update([*weights.items(), ("model.misnamed", weights[name])], version=1)
    with pytest.raises(ValueError, match="does not belong"):
        engine.update([(name, weights[name].T)], version=1)


def test_a_request_that_cannot_fit_is_refused(models):
    engine = TransformersEngine(models["qwen2-tied"], max_length=16)
    with pytest.raises(ValueError, match="do not fit in 16"):
        engine.add(Request(0, [3] * 10, SamplingParams(max_tokens=7), 0))


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3_5"])
def test_sleep_frees_the_cache_and_generation_continues(models, kind):
    engine = TransformersEngine(models[kind], max_length=64)
    first = drain(engine, requests_for())
    kept = engine.cache
    engine.sleep()
    assert engine.cache is kept, "a CPU has nothing to give"
    engine.sleeps = True
    engine.sleep()
    assert engine.cache is None
    assert drain(engine, requests_for()) == first
    engine.add(requests_for()[0])
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.sleep()


@settings(max_examples=50)
@given(st.integers(2, 40), st.floats(0.1, 3), st.integers(-1, 6), st.floats(0.1, 1), st.integers(0, 2**31))
def test_sampling_never_leaves_its_support(vocab, temperature, top_k, top_p, seed):
    """For any uniform number, including 0 and the largest below 1: the token is in the top k and the nucleus, and its log-prob
    is that of the truncated distribution."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocab, generator=generator) * 5
    logits[0, ::3] = -torch.inf
    logits[0, 1] = 0.0
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-24])
    settings = SamplingParams(temperature, top_p, top_k)
    token, log_prob, _ = sample(logits.expand(3, -1), uniform, [settings] * 3)

    order = sorted(range(vocab), key=lambda v: -logits[0, v].item())[: top_k if top_k > 0 else vocab]
    weights = [torch.exp(logits[0, v] / temperature - logits[0, order[0]] / temperature).item() for v in order]
    total, mass, kept = sum(weights), 0.0, {}
    for v, w in zip(order, weights, strict=True):
        if mass / total >= top_p + 1e-6:  # rounding may keep one more; at 1 every token may come
            break
        kept[v] = w
        mass += w
    for t, lp in zip(token.tolist(), log_prob.tolist(), strict=True):
        assert t in kept and logits[0, t] > -torch.inf
        if top_p == 1 or abs(mass / total - top_p) > 1e-4:  # not on the edge of the nucleus
            assert lp == pytest.approx(torch.log(torch.tensor(kept[t] / sum(kept.values()))).item(), abs=2e-3)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(-1, 1, 0.1), (3, 1, 0.05), (-1, 0.7, 0.02), (9, 0.9, 0.2), (-1, 1, 1)])
def test_truncation_is_that_of_transformers(top_k, top_p, min_p):
    """In vLLM's order: min-p, then top-k, then the nucleus. A row without truncation is left alone."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 50, generator=generator) * 3
    warpers = [TemperatureLogitsWarper(0.7), MinPLogitsWarper(min_p)]
    warpers += [TopKLogitsWarper(top_k if top_k > 0 else 50), TopPLogitsWarper(float(top_p))]
    expected = LogitsProcessorList(warpers)(None, logits).log_softmax(-1)
    expected[1::2] = (logits[1::2] / 0.7).log_softmax(-1)
    cut, whole = SamplingParams(0.7, top_p, top_k, min_p=min_p), SamplingParams(0.7)
    seen = 0
    for uniform in torch.rand(20, generator=generator).tolist():
        token, log_prob, _ = sample(logits, torch.full((200,), uniform), [cut, whole] * 100)
        torch.testing.assert_close(log_prob, expected.gather(1, token[:, None]).squeeze(1), atol=1e-5, rtol=0)
        seen += len({*token[::2].tolist()})
    assert cut.truncates and seen > 400


def test_sampling_has_the_right_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(40000, -1)
    uniform = torch.rand(40000, generator=torch.Generator().manual_seed(0))
    token, *_ = sample(logits, uniform, [SamplingParams(temperature=0.7)] * 40000)
    expected = (logits[0] / 0.7).softmax(-1)
    torch.testing.assert_close(torch.bincount(token, minlength=4) / 40000, expected, atol=0.01, rtol=0)


CPU, GPU = torch.device("cpu"), torch.device("cuda")
WITH = types.SimpleNamespace(vllm=types.SimpleNamespace(__version__="0.32.0"))


@pytest.mark.parametrize(
    ("wanted", "device", "vllm", "chosen", "said"),
    [
        ("auto", CPU, WITH, "embedded", "engine: embedded (the device is a CPU)"),
        ("auto", GPU, None, "embedded", "engine: embedded (vLLM cannot be imported: "),
        ("auto", GPU, WITH, "vllm", "engine: vllm (version 0.32.0 is installed)"),
        ("embedded", GPU, WITH, "embedded", ""),
        ("vllm", CPU, WITH, "vllm", ""),
    ],
)
def test_auto_says_what_it_takes_and_why(wanted, device, vllm, chosen, said, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rl.generation.vllm.engine", vllm)  # None: importing it raises ImportError
    assert choose_engine(wanted, device) == chosen
    out = capsys.readouterr().out
    assert out.startswith(said) and bool(out) == bool(said)


def test_an_engine_that_cannot_be_is_refused_with_a_remedy(models, monkeypatch):
    with pytest.raises(UserError, match=r"--rollout-tp 2: .* needs --engine vllm"):
        make_engine(models["qwen3"], EngineArgs(engine="embedded", rollout_tp=2), 64, torch.float32, CPU, False)
    monkeypatch.setitem(sys.modules, "rl.generation.vllm.engine", None)
    with pytest.raises(UserError, match=r"--engine vllm: vLLM cannot be imported.*requirements-cuda.txt"):
        choose_engine("vllm", CPU)
