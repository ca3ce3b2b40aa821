"""Records, packing and masks: no token is lost, no sequence is split, no micro-batch exceeds the budget, and logits are of the
mask alone."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from helpers import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.learning.batch import Batch, Division, MicroBatch, micro_batches, pack
from rl.model.attention import SHORT, Packed
from rl.ranks.dist import Ranks
from rl.samples.group import Group, join_records, split_records


def same(a, b) -> bool:
    """Whether two groups are equal, down to each field of their responses."""
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, of.name), getattr(b, of.name)) for of in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=5), st.integers(0, 2**40))
def test_records_survive_the_journey(groups, ticket):
    how = {"unscored": (0, 2), "masked": True}
    made = [make_group(ticket + i, sizes, rng=np.random.default_rng(i), **how) for i, sizes in enumerate(groups)]
    for group in made:  # what could be sampled is known of one response
        some = np.arange(3 * len(group.responses[-1].token_ids), dtype=np.int32).reshape(-1, 3)
        group.responses[-1] = dataclasses.replace(group.responses[-1], support=some)
    joined = join_records([g.to_bytes() for g in made])
    back = [Group.from_bytes(record) for record in split_records(joined)]
    assert len(back) == len(made) and all(same(a, b) for a, b in zip(made, back, strict=True))


@settings(max_examples=200)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 9), st.integers(50, 300), st.integers(1, 4))
def test_pack_places_each_sequence_once_within_the_budget(lengths, n, budget, ranks):
    groups, prompts = [i // n for i in range(len(lengths))], [length // 3 for length in lengths]
    plan = pack(lengths, prompts, groups, budget, ranks)
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1, "ranks with unequal micro-batches would hang in a collective"
    loads = [sum(lengths[i] for i in micro) for rank in plan for micro in rank]
    assert max(loads) <= budget


def test_pack_refuses_what_no_micro_batch_holds():
    with pytest.raises(ValueError, match="a sequence of 65 tokens does not fit in a micro-batch of 64"):
        pack([3, 65, 64], [1, 1, 1], [0, 0, 0], 64, 2)


def test_pack_keeps_the_responses_to_a_prompt_together():
    groups = [i // 8 for i in range(64)]
    of_rank = [{groups[i] for micro in rank for i in micro} for rank in pack([20] * 64, [5] * 64, groups, 1000, 2)]
    assert len(of_rank[0]) == len(of_rank[1]) == 4 and not of_rank[0] & of_rank[1]


def lengths_of(responses: int, mean: int, ragged: bool, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [min(8 * mean, 1 + int(chance.lognormvariate(0, 0.75) * mean)) if ragged else mean for _ in range(responses)]


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_ranks_wait_for_the_slowest_no_longer_than_with_small_runs(ranks):
    """Compared with longest-first placement of single responses, which balances best and shares no prompt on purpose."""
    for seed in range(20):
        responses = lengths_of(24 * 8, 300, True, seed)
        lengths, group = [100 + r for r in responses], [i // 8 for i in range(24 * 8)]
        plan = pack(lengths, [100] * len(lengths), group, 8192, ranks)
        row = lambda micro: sum(responses[i] for i in micro) + 100 * len({group[i] for i in micro})  # noqa: B023, E731
        slowest = sum(max(map(row, of_ranks)) for of_ranks in zip(*plan, strict=True))
        bins = [[] for _ in range(ranks * len(plan[0]))]
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            min(bins, key=lambda b: sum(lengths[j] for j in b)).append(i)
        alone = sum(max(map(row, bins[at : at + ranks])) for at in range(0, len(bins), ranks))
        assert slowest <= alone


def test_each_mini_batch_of_a_batch_is_planned_once(monkeypatch):
    """The nodes, the batch and the step share one plan."""
    planned, whole = [], Batch.of(groups := [make_group(ticket, range(1, 9)) for ticket in range(7)])
    monkeypatch.setattr("rl.learning.batch.pack", lambda lengths, *rest: planned.append(len(lengths)) or pack(lengths, *rest))
    for rank in range(3):
        ranks = Ranks(rank, 3, rank, torch.device("cpu"))
        division = Division(3, 20, ranks)
        owners = division.owners(whole.total_lengths, whole.prompt_lengths, whole.group, whole.flat)
        batch = Batch.of(groups, division)
        micros = [micro for mini in batch.mini_batches(3) for micro in micro_batches(batch, mini, 20, ranks)]
        assert [len(mini) for mini in batch.mini_batches(3)] == planned == [24, 24, 8]
        assert [n > 0 for n in batch.local_lengths.tolist()] == [owner == rank for owner in owners]
        assert torch.cat([micro.index for micro in micros]).sort().values.tolist() == list(range(len(batch.token)))
        assert max(micro.layout.tokens for micro in micros) <= 20
        planned.clear()
        longer = Batch.of([make_group(ticket, range(2, 10)) for ticket in range(7)], division)
        assert torch.equal(longer.lengths, whole.lengths + 1) and planned == [24, 24, 8], "another batch is another plan"
        planned.clear()


FIELDS = ("token", "seq", "group", "score", "version", "rollout_log_prob", "lengths", "mask", "truncated")


def test_batch_does_not_depend_on_the_order_of_arrival():
    groups = [make_group(t, [3, 1, 5]) for t in (4, 2, 9)]
    a, b = Batch.of(groups), Batch.of(groups[::-1])
    for name in FIELDS:
        assert torch.equal(getattr(a, name), getattr(b, name))
    assert a.group.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert a.seq.tolist() == [i for i, n in enumerate([3, 1, 5] * 3) for _ in range(n)]
    assert [m.tolist() for m in a.mini_batches(2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]


def test_what_could_not_be_scored_is_not_in_the_batch():
    """The batch equals one without those responses, except for their count and their errors."""
    sizes = {4: [3, 1, 5], 2: [2, 2, 2], 9: [4]}
    whole = [make_group(t, n, unscored=(1,) if t == 4 else (0, 1, 2) if t == 2 else ()) for t, n in sizes.items()]
    for group in whole:
        group.responses[:] = [r for r in group.responses if r.error is None] + [r for r in group.responses if r.error]
    kept = [dataclasses.replace(g, responses=[r for r in g.responses if r.error is None]) for g in whole]
    a, b = Batch.of(whole), Batch.of(kept)
    for name in FIELDS:
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.tickets == [2, 4, 9] and a.unscored == 4 and a.errors == ["timeout: no score after 10 s"] * 4
    assert [m.tolist() for m in a.mini_batches(1)] == [[], [0, 1], [2]]
    assert not a.is_unscored and not Batch.of([make_group(1, [3])]).is_unscored
    nothing = Batch.of(whole[1:2])
    assert len(nothing.token) == len(nothing.score) == 0 and [m.tolist() for m in nothing.mini_batches(1)] == [[]]
    assert nothing.is_unscored and nothing.errors == ["timeout: no score after 10 s"] * 3
    assert [group.ticket for group in whole if group.is_unscored] == [2]


def test_unscored_responses_give_a_group_no_signal():
    assert make_group(0, [1, 1, 1]).differs and not make_group(0, [1, 1, 1], unscored=(0, 2)).differs
    assert not make_group(0, [1, 1], unscored=(0, 1)).differs and not make_group(0, [1, 1], score=1).differs


PROMPTS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), max_size=4)), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=40)
@given(PROMPTS, st.sampled_from([(4, 4), (4, 2), (4, 1)]), st.integers(0, 99))
def test_packed_attention_equals_one_sequence_at_a_time(prompts, heads, seed):
    """Values and gradients against softmax(q k^T) v written out, in double precision; responses continue their prompt."""
    segments, after = [], []
    for prompt, responses in prompts:
        after += [-1, *[len(segments)] * len(responses)]
        segments += [prompt, *responses]
    h, h_kv = heads
    generator = torch.Generator().manual_seed(seed)
    make = lambda n: torch.randn(sum(segments), n, 8, dtype=torch.float64, generator=generator, requires_grad=True)  # noqa: E731
    q, k, v = make(h), make(h_kv), make(h_kv)
    layout = Packed(segments, after=after)
    out = layout.attend(0, q, k, v, scaling=0.3)
    own = torch.arange(sum(segments)).split(segments)
    expected = []
    for tokens, before in zip(own, after, strict=True):
        seen = own[before].tolist() if before >= 0 else []
        for t in tokens.tolist():
            seen, row = [*seen, t], []
            for head in range(h):
                kv = head // (h // h_kv)
                weights = torch.softmax(0.3 * (k[seen, kv] @ q[t, head]), 0)
                row.append(weights @ v[seen, kv])
            expected.append(torch.stack(row))
    expected = torch.stack(expected)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    for got, want in zip(
        torch.autograd.grad((out * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("length", [1, 5, SHORT, SHORT + 70])
def test_attention_in_bf16_and_its_gradient_are_those_of_double_precision_to_rounding(length):
    lengths, made = [length, length // 2 + 1, length], torch.Generator().manual_seed(length)
    query, key, value, given_back = (torch.randn(sum(lengths), 2, 8, generator=made) for _ in range(4))
    inputs = [x.bfloat16().requires_grad_() for x in (query, key, value)]
    out = Packed(lengths).attend(0, *inputs, 0.3)
    out.backward(given_back.bfloat16())
    exact = [x.detach().double().requires_grad_() for x in inputs]
    parts = []
    for q, k, v in zip(*(x.split(lengths) for x in exact), strict=True):  # [L, H, D] each
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v))
    torch.cat(parts).backward(given_back.bfloat16().double())
    assert out.dtype == torch.bfloat16
    for found, right in [(out, torch.cat(parts)), *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True))]:
        assert (found.double() - right).norm() <= 0.01 * right.norm() + 1e-6


MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6)


def group_of(ticket: int, masks: list[list[bool] | None], n: int = 4, prompt: int = 4) -> Group:
    """A group with a response for each mask; of `n` tokens where there is none."""
    group = make_group(ticket, [n if mask is None else len(mask) for mask in masks], prompt)
    arrays = [None if mask is None else np.array(mask, bool) for mask in masks]
    responses = [dataclasses.replace(r, mask=mask) for r, mask in zip(group.responses, arrays, strict=True)]
    return dataclasses.replace(group, responses=responses)


@given(MASKS, st.randoms())
def test_a_micro_batch_asks_for_logits_of_the_mask_alone(masks, random):
    """The row has all tokens, and each label is predicted by the token before it, whoever added that."""
    batch = Batch.of([group_of(ticket, [mask, None], prompt=1 + ticket % 4) for ticket, mask in enumerate(masks)])
    chosen = random.sample(range(len(batch.lengths)), k=random.randint(1, len(batch.lengths)))
    micro, (places, row) = MicroBatch.of(batch, chosen, torch.device("cpu")), (None, None)
    places, (row,) = micro.layout.gather_index.split(micro.layout.lengths), micro.inputs["input_ids"]
    expected = []
    for i, of_one in zip(chosen, places, strict=True):
        tokens = [*batch.prompts[i], *batch.token[batch.seq == i].tolist()]
        assert row[of_one].tolist() == tokens
        assert micro.inputs["position_ids"][0, of_one].tolist() == list(range(len(of_one)))
        mask = batch.mask[batch.seq == i].tolist()
        expected += [
            (of_one[len(batch.prompts[i]) + t - 1], tokens[len(batch.prompts[i]) + t]) for t, m in enumerate(mask) if m
        ]
    assert list(zip(micro.predict.tolist(), micro.labels.tolist(), strict=True)) == expected
    assert batch.mask[micro.index].all() and torch.equal(batch.token[micro.index].long(), micro.labels)
    prompts = {int(batch.group[i]): len(batch.prompts[i]) for i in chosen}
    assert len(row) == sum(prompts.values()) + int(batch.lengths[chosen].sum()), "each prompt is in the row once"
    assert micro.has_responses and micro.real_tokens == len(row)
    of_mask = [i for i in chosen for _ in range(int(batch.mask[batch.seq == i].sum()))]
    assert batch.seq[micro.index].tolist() == of_mask
