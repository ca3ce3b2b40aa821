"""An update wastes few FLOPs by default, and the wasted share is reported correctly."""

import random

import packed_kernels as kernels
import pytest
import torch
import torch.nn.functional as F
from helpers import make_group
from torch import nn

from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.division import pack
from rl.learning.flops import Computed
from rl.learning.learner import UNMEASURED_TOKENS, Learner
from rl.learning.token_budget import CPU_TOKENS
from rl.model.attention import Packed
from rl.model.sequence_parallel import Piece
from rl.ranks.device import PACKED_ATTENTION


class Counted:
    """Counts the FLOPs of matrix products, forward and backward, from the calls of torch's functions."""

    def __init__(self, model: nn.Module, patch):
        self.flops, self.head, self.layers = 0, model.lm_head, [m for m in model.modules() if isinstance(m, nn.Linear)]
        linear, attention = F.linear, F.scaled_dot_product_attention

        def count_linear(x, weight, bias=None):
            self.flops += 6 * x.numel() // weight.shape[1] * weight.numel()
            return linear(x, weight, bias)

        def count(query, key, value, is_causal, **rest):
            sequences, heads, length, size = query.shape
            assert is_causal
            self.flops += sum(12 * sequences * heads * size * seen for seen in range(1, length + 1))
            return attention(query, key, value, is_causal=is_causal, **rest)

        patch.setattr(F, "linear", count_linear)
        patch.setattr(F, "scaled_dot_product_attention", count)

    def needed(self, groups, config) -> int:
        """The least possible work: each prompt token once, and each response token once, with the tokens before it."""
        flops, of_layers = 0, sum(x.in_features * x.out_features for x in self.layers if x is not self.head)
        pair = config.num_hidden_layers * config.num_attention_heads * config.head_dim
        for group in groups:
            prompt = len(group.prompt_ids)
            flops += sum(6 * of_layers + 12 * pair * (place + 1) for place in range(prompt))
            for response in group.responses:
                for place in range(len(response.token_ids)):
                    flops += 6 * of_layers + 12 * pair * (prompt + place + 1)
                    flops += 6 * self.head.in_features * self.head.out_features
        return flops


@pytest.mark.parametrize(("kind", "budget", "at_least"), [("qwen3", 8192, 0.0), ("qwen3", 130, 0.05), ("qwen3", 80, 0.2)])
def test_what_is_reported_is_what_is_called(models, ranks, monkeypatch, kind, budget, at_least):
    learner = Learner(models[kind], LearnerArgs(max_tokens_per_micro_batch=budget, ppo_epochs=2), ranks, 10)
    groups = [make_group(t, sizes, prompt=20 + 7 * t) for t, sizes in enumerate([[5, 9, 30], [1], [17, 2, 2, 40]])]
    batch = Batch.of(groups)
    with torch.no_grad():  # not a part of the update
        learner.log_probs_of("policy", batch, [micro_batches(batch, torch.arange(8), budget, ranks)])
    counted = Counted(learner.policy.model, monkeypatch)
    for _ in range(2):
        for micro in micro_batches(batch, torch.arange(8), budget, ranks):
            learner.log_probs(micro)
    expected = 1 - 2 * counted.needed(groups, learner.config) / counted.flops
    reported = learner.perf_metrics(batch, {"update_actor": 1.0}, 1)["perf/wasted_flops"]
    assert reported == pytest.approx(expected, abs=1e-9) and reported >= at_least


@pytest.fixture
def npu():
    """Gives the CPU the attention of an NPU until the test ends."""
    yield lambda: kernels.give_to_cpu("npu")
    PACKED_ATTENTION.pop("cpu", None)


@pytest.mark.parametrize("budget", [8192, 60])
def test_kernels_for_packed_rows_waste_what_is_divided_and_nothing_else(models, ranks, npu, budget):
    """Each token is a query once. The only waste is a prompt whose responses are in several micro-batches."""
    learner = Learner(models["qwen3"], LearnerArgs(), ranks, 10)
    batch = Batch.of([make_group(0, [30, 20, 5], prompt=25)])
    npu()
    micros = micro_batches(batch, torch.arange(3), budget, ranks)
    for micro in micros:
        learner.log_probs(micro)
    assert kernels.CALLS
    tokens, pairs = (learner.computed.tokens, learner.computed.pairs)
    assert tokens == 55 + 25 * len(micros)
    once = sum(25 + i + 1 for n in (30, 20, 5) for i in range(n))
    assert pairs == once + 25 * 26 // 2 * len(micros)


def test_pieces_of_a_shared_row_add_up_to_it():
    """Four ranks that share a row of ten tokens: the last piece is padded, and each has a fourth of the heads."""
    row, pieces = Packed([4, 3, 3], after=[-1, 0, 0]), []
    row.attend(0, *torch.zeros(3, 10, 4, 8), 1.0)
    for _ in range(4):
        piece = Piece.__new__(Piece)  # without a process group
        piece.row, piece.sharing, piece.size = row, 4, 3
        pieces.append(piece.work)
    assert [sum(part) for part in zip(*pieces, strict=True)] == [12, 2 * (7 * 8 // 2)]


def lengths_of(responses: int, mean: int, ragged: bool, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [min(8 * mean, 1 + int(chance.lognormvariate(0, 0.75) * mean)) if ragged else mean for _ in range(responses)]


SIZES = [(8, 8, 8, 64), (8, 8, 8, 256), (8, 8, 100, 300), (64, 8, 100, 300)]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    ("groups", "n", "prompt", "response", "tokens"),
    [
        *[(*sizes, CPU_TOKENS) for sizes in SIZES],
        *[(*sizes, UNMEASURED_TOKENS) for sizes in [*SIZES, (32, 8, 200, 400)]],
    ],
)
def test_less_than_a_fiftieth_of_the_tokens_are_computed_again(groups, n, prompt, response, tokens, ragged):
    """By default, on one rank, for groups that take at most two thirds of a micro-batch."""
    for seed in range(3):
        responses = lengths_of(groups * n, response, ragged, seed)
        lengths, group = [prompt + r for r in responses], [i // n for i in range(groups * n)]
        (plan,) = pack(lengths, [prompt] * len(lengths), group, tokens, 1)
        again = sum(prompt * len({group[i] for i in micro}) for micro in plan) - prompt * groups
        assert again < 0.02 * (sum(responses) + groups * prompt)


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


def test_nothing_computed_is_nothing_wasted(models, ranks):
    learner = Learner(models["qwen3"], LearnerArgs(), ranks, 10)
    assert Computed().metrics(learner.config, Batch.of([]), 1) == {"perf/wasted_flops": 0.0, "perf/forward_only": 0.0}
