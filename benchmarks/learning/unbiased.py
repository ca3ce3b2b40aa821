"""The gradients that the scripts' own `learn` takes of stale batches, compared with the exact ones, by enumeration.

    python benchmarks/learning/unbiased.py        # half a minute; writes benchmarks/results/unbiased.{json,md}

The policy is a table of logits, one row behind every prefix, in fp64, and so is the older policy that sampled: its logits are a
drift away. Every pair of responses is trained on as a group of two and weighed by its probability, which gives the expected
gradient of a step without any noise. It is compared with two exact gradients: that of the expected score, dJ, and that of the
surrogate objective of PPO and TRPO, in which the policy chooses a token, but states and continuations stay those of the policy
that sampled. Clips are out of the way, scores are random, the advantage is rloo's.
"""

import contextlib
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import tyro
from common import setting, table, words, write

import train_one_step_off
from rl import parts
from rl.learning.batch import Batch
from rl.learning.learner import Forward
from rl.ranges import check
from rl.ranks import dist
from rl.samples.group import Group, Response

WIDE = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e9, "clip_ratio_c": 1e9}
FLAGS = {"adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum", "rollout_n": 2}
UNCAPPED = {"rollout_is_threshold": "1e9"}
SIDES = {
    "default: the generator's log-probs are the old ones": {},
    "`--loss-mode reinforce`, which has no ratio": {"loss_mode": "reinforce"},
    "`--rollout-is token`": {"rollout_is": "token"} | UNCAPPED,
    "`--rollout-is sequence`": {"rollout_is": "sequence"} | UNCAPPED,
    "`--rollout-is sequence --loss-mode reinforce`": {"rollout_is": "sequence", "loss_mode": "reinforce"} | UNCAPPED,
    "`--use-rollout-log-probs False`: no correction": {"use_rollout_log_probs": False},
}
CASES = {"1 token, drift 1": (3, 1, 1.0), "2 tokens, drift 0.7": (3, 2, 0.7), "3 tokens, drift 0.05": (2, 3, 0.05)}


class Tabular:
    """In the learner's place: a policy over `num_words` words, with logits of its own behind every prefix below `length`."""

    def __init__(self, num_words: int, length: int, logits: torch.Tensor):
        self.logits = logits.clone().requires_grad_()
        self.ranks = dist.Ranks(0, 1, 0, torch.device("cpu"))
        self.sequences = list(itertools.product(range(num_words), repeat=length))
        prefixes = (p for t in range(length) for p in itertools.product(range(num_words), repeat=t))
        self.row = {prefix: i for i, prefix in enumerate(prefixes)}
        self.batch, self.gradients, self.moves_to = None, [], None

    def of(self, sequence: tuple[int, ...]) -> torch.Tensor:
        """Log-probs of its words, [T]."""
        rows = [self.row[sequence[:t]] for t in range(len(sequence))]
        return self.logits.log_softmax(-1)[rows, list(sequence)]

    def _all(self) -> torch.Tensor:
        return torch.cat([self.of(tuple(tokens.tolist())) for tokens in self.batch.token.split(self.batch.lengths.tolist())])

    def forward(self, micro, *_) -> Forward:
        log_prob = self._all()[micro.index]
        return Forward(log_prob, torch.zeros_like(log_prob))

    def log_probs_of(self, which: str, *_) -> torch.Tensor:
        return self._all().detach()

    def begin_step(self, has_signal: bool) -> None: ...

    def step(self) -> dict[str, float]:
        """Keeps the gradient; moves the policy only where a test says to where."""
        self.gradients.append(self.logits.grad)
        self.logits.grad = None
        if self.moves_to is not None:
            self.logits.data.copy_(self.moves_to)
        return {"actor/grad_norm": 0.0}


def expected_gradient(script, flags: dict, policy: Tabular, sampler: Tabular, score: dict, update: int = 0) -> torch.Tensor:
    """The mean over all pairs of responses that `sampler` draws of the gradient of the script's `update`-th optimizer step."""
    args = parts.make(script.Args, **{**FLAGS, **WIDE, **flags})
    check(args)
    untimed = lambda phase: contextlib.nullcontext()  # noqa: E731
    start, total = policy.logits.detach().clone(), torch.zeros_like(policy.logits)
    for pair in itertools.combinations_with_replacement(policy.sequences, 2):
        batch, policy.gradients = _batch(pair, sampler, score), []
        policy.batch = batch
        policy.logits.data.copy_(start)
        script.learn(args, policy, batch, untimed)
        probability = batch.rollout_log_prob.sum().exp() * (1 if pair[0] == pair[1] else 2)
        total -= probability * policy.gradients[update]
    return total


def _batch(pair, sampler: Tabular, score: dict) -> Batch:
    length = len(pair[0])
    version, prompt = np.zeros(length, np.int32), np.zeros(1, np.int32)
    responses = [Response(np.array(s, np.int32), np.zeros(length, np.float32), version, "length", score=score[s]) for s in pair]
    batch = Batch.of([Group(0, prompt, "", responses)])
    batch.rollout_log_prob = torch.cat([sampler.of(s).detach() for s in pair])  # fp64, as everything here
    batch.score = batch.score.double()
    return batch


def exact_gradients(policy: Tabular, sampler: Tabular, score: dict) -> dict[str, torch.Tensor]:
    """The ascent directions of the expected score and of the surrogate."""
    expected = sum(policy.of(s).sum().exp() * score[s] for s in policy.sequences)
    surrogate = sum(
        sampler.of(s).sum().detach().exp() * score[s] * (policy.of(s) - sampler.of(s).detach()).exp().sum()
        for s in policy.sequences
    )
    return {
        "dJ": torch.autograd.grad(expected, policy.logits)[0],
        "surrogate": torch.autograd.grad(surrogate, policy.logits)[0],
    }


@contextlib.contextmanager
def in_fp64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def make_case(num_words: int, length: int, drift: float, seed: int = 0) -> tuple[Tabular, Tabular, dict]:
    """The policy, the older one that samples, and each response's score: eighths, which are exact in any precision."""
    rng = torch.Generator().manual_seed(seed)
    rows = sum(num_words**t for t in range(length))  # prefixes
    logits, away = (torch.randn(rows, num_words, generator=rng) for _ in range(2))
    policy, sampler = Tabular(num_words, length, logits), Tabular(num_words, length, logits + drift * away)
    return policy, sampler, {s: int(torch.randint(-8, 9, (), generator=rng)) / 8 for s in policy.sequences}


def errors(flags: dict, case: tuple, script=train_one_step_off, seed: int = 0) -> dict[str, float]:
    """The largest error of the expected gradient, relative to the largest entry of each exact one."""
    policy, sampler, score = make_case(*case, seed=seed)
    found = expected_gradient(script, flags, policy, sampler, score)
    exact = exact_gradients(policy, sampler, score)
    return {name: float((found - g).abs().max() / g.abs().max()) for name, g in exact.items()}


@dataclass
class Args:
    pass


def main(args: Args) -> None:
    dist.init()
    with in_fp64():
        results = {side: {case: errors(flags, CASES[case]) for case in CASES} for side, flags in SIDES.items()}
    head = ["error to dJ / to the surrogate", *CASES]
    rows = [[side, *(f"{r['dJ']:.1g} / {r['surrogate']:.1g}" for r in of_side.values())] for side, of_side in results.items()]
    machine = setting()
    write("unbiased", {"setting": machine, "errors": results}, f"{table(head, rows)}\n\n{words(machine)}.")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
