"""Rollout correction: its flags, and their application to a batch with the functions of losses.py.

The generator's log-probs differ from the learner's for the same tokens: different kernels, different precision, older weights.
Tokens are weighted or left out depending on the difference. Left out: its metrics (rl/algorithm/rollout_metrics.py).
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

import losses
from rl.algorithm import whole_batch
from rl.errors import UserError
from rl.learning.batch import Batch

Bounds = tuple[float | None, float]  # (None, cap) or a band
Criterion = tuple[str, str, float, float]  # level, divergence, low, high: see losses.rollout_rejection_mask


@dataclass
class RolloutCorrectionArgs:
    """Corrections for tokens to which generator and learner give different probabilities."""

    rollout_is: Literal[losses.IS_LEVELS] | None = None
    """Importance sampling: weight tokens by the ratio of the learner's probability to the generator's, at this level."""
    rollout_is_threshold: str | None = None
    """Cap of the weight ("2.0", the default), or a band outside which the weight is 0 ("0.5_5.0")."""
    rollout_is_batch_normalize: bool = False
    """Scale the weights to a mean of 1 over the batch."""
    rollout_rs: str | None = None
    """Rejection sampling: leave out tokens or responses whose log-probs disagree. Write level_divergence; separate several by
    commas. Levels: token, seq_sum, seq_mean, seq_max, batch; divergences: k1, k2, k3, binary_kl (losses.py)."""
    rollout_rs_threshold: str | None = None
    """A bound for each word of --rollout-rs, separated by commas: a band "0.999_1.001" for k1, a number for the others."""

    @property
    def weight_bounds(self) -> Bounds:
        """The bounds of the importance weights."""
        return parse_threshold(self.rollout_is_threshold or "2.0")

    @property
    def rejection_criteria(self) -> list[Criterion]:
        """The criteria of --rollout-rs; empty without rejection."""
        return parse_criteria(self.rollout_rs, self.rollout_rs_threshold or "") if self.rollout_rs else []

    @property
    def corrects_rollout(self) -> bool:
        """Whether tokens are weighted or left out depending on the difference between generator and learner."""
        return bool(self.rollout_is or self.rejection_criteria)

    def check(self) -> None:
        """Raise UserError for bounds that cannot be parsed."""
        for flags, parsed in {
            "--rollout-is-threshold": "weight_bounds",
            "--rollout-rs, --rollout-rs-threshold": "rejection_criteria",
        }.items():
            try:
                getattr(self, parsed)
            except ValueError as error:
                raise UserError(f"{flags}: {error}.") from None


def correct_rollout(args: RolloutCorrectionArgs, batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (weight of each token, whether it is rejected), [N]; None if nothing is weighted or rejected."""
    weight = None
    rejected = None
    criteria = args.rejection_criteria
    inputs = (batch.targets.actor_log_prob, batch.rollout_log_prob, batch.mask)
    if args.rollout_is:
        low, high = args.weight_bounds
        normalize = args.rollout_is_batch_normalize
        weigh = partial(losses.rollout_is_weights, level=args.rollout_is, low=low, high=high, normalize=normalize)
        apply = whole_batch.on_whole if normalize else whole_batch.by_pieces
        weight = apply(batch, weigh, *inputs)
    if criteria:
        apply = whole_batch.on_whole if any(level == "batch" for level, *_ in criteria) else whole_batch.by_pieces
        rejected = batch.mask & ~apply(batch, partial(losses.rollout_rejection_mask, criteria=criteria), *inputs)
    return weight, rejected


def parse_threshold(text: str) -> Bounds:
    """ "2.0" -> (None, 2.0); "0.5_5.0" -> (0.5, 5.0)."""
    try:
        numbers = [float(part) for part in str(text).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not (0 <= numbers[0] <= numbers[-1] > 0) or numbers[-1] == float("inf"):
        raise ValueError(f'threshold {text!r}: write one positive number, "2.0", or a band from low to high, "0.5_5.0"')
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def parse_criteria(criteria: str, threshold: str) -> list[Criterion]:
    """ "seq_mean_k3,token_k1" and "0.01,0.5_2.0" -> [("seq_mean", "k3", 0, 0.01), ("token", "k1", 0.5, 2.0)]. For k1, a single
    bound hi means the band from 1/hi to hi."""
    names, texts = [n.strip() for n in criteria.split(",")], [t.strip() for t in str(threshold).split(",")]
    texts = texts * len(names) if len(texts) == 1 else texts
    if len(texts) != len(names):
        raise ValueError(f"{len(names)} rejection criteria ({criteria}) but {len(texts)} thresholds ({threshold})")
    return [_parse_criterion(name, text) for name, text in zip(names, texts, strict=True)]


def _parse_criterion(name: str, text: str) -> Criterion:
    divergence = next((of for of in losses.DIVERGENCES if name.endswith(f"_{of}")), "")
    level = name.removesuffix(f"_{divergence}")
    if level not in losses.REJECTION_LEVELS or not divergence or name == "batch_k1":
        levels = ", ".join(losses.REJECTION_LEVELS)
        raise ValueError(
            f"rejection criterion {name!r}: write one of {levels}, then _k1 (not of batch), _k2, _k3 or _binary_kl"
        )
    low, high = parse_threshold(text)
    if divergence != "k1" and low is not None:
        raise ValueError(f"{name} is bounded above only: write one number instead of {text!r}")
    if divergence == "k1" and low is None:
        low = min(high, 1 / high)
        high = max(high, 1 / high)
    return level, divergence, low or 0.0, high
