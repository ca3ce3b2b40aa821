"""--keep-sampling-mask: what could be sampled is recorded, and the learner takes its log-probs over it."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from helpers import SMALL, flat_gradient, log_distributions, make_group, relative
from test_engine import PROMPTS, drain, requests_for
from transformers import AutoModelForCausalLM, Qwen2Config

import losses
from rl.generation.embedded import TransformersEngine
from rl.generation.engine import Output, Request, SamplingParams
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner
from rl.model import policy, sampling_mask
from rl.samples.group import Group

TEMPERATURE, K = 0.7, 6


def recorded(batch_of: list[Group], rng) -> list[Group]:
    """The groups with masks of 1 to K tokens, the sampled one among them; the first response of all has no record."""

    def record(tokens) -> np.ndarray:
        rows = sampling_mask.nothing(len(tokens), K)
        for row, token in zip(rows, tokens, strict=True):
            others = rng.permutation([t for t in range(SMALL["vocab_size"]) if t != token])[: rng.integers(0, K)]
            row[: 1 + len(others)] = rng.permutation([token, *others])
        return rows

    groups = []
    for number, group in enumerate(batch_of):
        has = [number or i for i in range(len(group.responses))]
        responses = [
            dataclasses.replace(r, support=record(r.token_ids)) if there else r
            for r, there in zip(group.responses, has, strict=True)
        ]
        groups.append(dataclasses.replace(group, responses=responses))
    return groups


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    rng = np.random.default_rng(0)
    return recorded([make_group(t, rng.integers(1, 9, 3), prompt=4, rng=rng, masked=True) for t in range(3)], rng)


@pytest.mark.parametrize("at_once", [policy.LOGITS_AT_ONCE, 64])
def test_log_probs_and_gradient_are_those_of_the_restricted_policy(groups, ranks, tmp_path, monkeypatch, at_once):
    """Of transformers in double precision, one response after the other; also where logits are computed two tokens at a time.
    The reference's are restricted, too."""
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", at_once)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**SMALL)).save_pretrained(tmp_path)
    learner, batch = Learner(str(tmp_path), LearnerArgs(), ranks, 10, TEMPERATURE, with_reference=True), Batch.of(groups)
    micros, weight = micro_batches(batch, torch.arange(len(batch.lengths)), 40, ranks), torch.randn(len(batch.token))
    got, entropies = torch.zeros(len(batch.token)), torch.zeros(len(batch.token))
    for micro in micros:
        out = learner.forward(micro, "metric")
        log_prob, entropy = out.log_prob, out.entropy
        (log_prob * weight[micro.index]).sum().backward()
        got[micro.index], entropies[micro.index] = log_prob.detach(), entropy

    model, expected, full = AutoModelForCausalLM.from_pretrained(tmp_path).double(), [], []
    responses = [r for group in groups for r in group.responses]
    for r, of_each in zip(responses, log_distributions(lambda ids: model(ids).logits, batch, TEMPERATURE), strict=True):
        for place, (token, log_p) in enumerate(zip(r.token_ids.tolist(), of_each, strict=True)):
            kept = [t for t in r.support[place].tolist() if t >= 0] if r.support is not None else [*range(len(log_p))]
            trained = bool(r.mask is None or r.mask[place])
            expected.append((log_p[token] - log_p[kept].logsumexp(0)) * trained)
            full.append(-(log_p.exp() * log_p).sum().detach() * trained)
    expected = torch.stack(expected)
    (expected * weight).sum().backward()
    assert len(micros) > 1 and relative(flat_gradient(learner.policy), flat_gradient(model)) < 1e-5
    torch.testing.assert_close(got.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), torch.stack(full), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(learner.log_probs_of("reference", batch, [micros]), got, atol=1e-6, rtol=1e-6)


def test_the_gradient_is_that_of_the_policy_that_sampled():
    """Every token that truncated sampling can give, weighed by its probability, in double precision: with the record the
    gradient of ppo_clip is that of the sampled policy's expected score, also when the weights have moved; over the whole
    vocabulary, and with the mask's mass in the ratio alone, it is not."""
    torch.manual_seed(1)
    logits, moved, score = torch.randn(3, 5, dtype=torch.float64)
    kept = torch.tensor([3, 0, 4])
    sampled_from = logits[kept].log_softmax(0)  # of the three
    theta = (logits + 0.1 * moved).requires_grad_()
    (expected,) = torch.autograd.grad((theta[kept].softmax(0) * score[kept]).sum(), theta)
    record, every, seq = kept.expand(3, 3), torch.ones(3, dtype=torch.bool), torch.arange(3)

    def gradient(log_prob_of) -> torch.Tensor:
        log_prob = log_prob_of(theta.log_softmax(0).expand(3, 5))
        loss, _ = losses.ppo_clip(log_prob, sampled_from, score[kept], every, seq, clip_low=1e9, clip_high=1e9, clip_c=1e9)
        return torch.autograd.grad(-(sampled_from.exp() * loss).sum(), theta)[0]

    restricted = gradient(lambda lp: sampling_mask.restricted(lp.gather(1, sampling_mask.labels(kept, record)), record))
    mass = logits.log_softmax(0)[kept].logsumexp(0)
    torch.testing.assert_close(restricted, expected, atol=1e-12, rtol=0)
    for biased in (lambda lp: lp[0, kept], lambda lp: lp[0, kept] - mass):
        assert (gradient(biased) - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(4, 1.0, 0), (5, 0.6, 0), (100, 0.6, 0), (20, 1.0, 0.3), (9, 0.8, 0.2)])
def test_the_engine_records_what_could_be_sampled(models, top_k, top_p, min_p):
    """Of a model of 32 tokens. Continued elsewhere, a response keeps its record; a request that asks for none has none."""
    path, most = models["qwen3"], top_k + sampling_mask.TIES
    engine = TransformersEngine(path, max_length=64, max_num_seqs=8, end_tokens={1})
    model = AutoModelForCausalLM.from_pretrained(path)
    more = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "max_tokens": 8, "ignore_eos": True, "temperature": TEMPERATURE}
    requests = [dataclasses.replace(r, id=(*r.id, "no")) for r in requests_for(n=1, **more)]
    requests += requests_for(n=1, support=most, **more)
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    begun = {output.id: output for output in engine.unfinished()}
    engine.abort()
    outputs = drain(engine, [dataclasses.replace(request, so_far=begun[request.id]) for request in requests])
    assert all(output.support is None for id, output in outputs.items() if "no" in id)
    for (i, *_), output in [(id, output) for id, output in outputs.items() if "no" not in id]:
        before = begun[output.id].support
        assert output.support.shape == (8, most) and 0 < len(before) < 8
        assert np.array_equal(output.support[: len(before)], before)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[i] + output.token_ids])).logits[0, len(PROMPTS[i]) - 1 : -1] / TEMPERATURE
        for of_place, token, log_prob, row in zip(logits, output.token_ids, output.log_probs, output.support, strict=True):
            order = of_place.argsort(descending=True)[:top_k]
            order = order[of_place[order].exp() >= min_p * of_place.max().exp()]
            ahead = torch.tensor([0.0, *itertools.accumulate(of_place[order].softmax(0).tolist())])[: len(order)]
            kept = order[ahead < top_p].tolist()
            assert row[row >= 0].tolist() == kept and token in kept
            assert log_prob == pytest.approx(float(of_place[token] - of_place[kept].logsumexp(0)), abs=1e-4)


def test_environments_tokens_have_no_record(models):
    engine = TransformersEngine(models["qwen3"], max_length=64, end_tokens={1})
    sampling = SamplingParams(max_tokens=6, top_k=3, support=3 + sampling_mask.TIES, ignore_eos=True)
    before = Output(0, [5, 6], [-1.0, 0.0], [0, 0], "unfinished")  # of a run without records
    (output,) = drain(engine, [Request(0, [3], sampling, 0, so_far=before)]).values()
    assert (output.support[:2] == sampling_mask.NOTHING).all() and (output.support[2:, 0] >= 0).all()
