"""What became of a batch's responses: trained, or rejected by the rollout correction. And why a step has nothing to learn from.

Left out: responses that could not be scored and are no part of the batch (Batch.unscored, Batch.sizes).
"""

from collections import Counter
from dataclasses import dataclass

import torch

import losses
from rl.algorithm.args import AlgorithmArgs
from rl.learning.batch import Batch

REJECTED, UNSCORED, MASKED, TRUNCATED = "rejected", "unscored", "masked", "truncated"
EQUAL, OTHER = "equal_scores", "other"


@dataclass(frozen=True)
class Fates:
    """Of each response, the same on every learner."""

    before: torch.Tensor  # [B] its tokens that are in the mask
    after: torch.Tensor  # [B] those of them that the rollout correction leaves, with a weight above 0
    has_signal: bool  # one of these tokens has an advantage

    @staticmethod
    def of(batch: Batch) -> "Fates":
        """A collective of the learners."""
        weight = batch.targets.is_weight
        after = batch.trained if weight is None else batch.trained & (weight != 0)
        signal = torch.tensor([float((after & (batch.targets.advantage != 0)).any())])
        counts = torch.stack([batch.by_response(batch.mask), batch.by_response(after)])
        return Fates(*batch.sum_over_ranks(counts), has_signal=bool(batch.sum_over_ranks(signal) > 0))

    @property
    def trained(self) -> torch.Tensor:
        """[B] bool: a token is trained."""
        return self.after > 0

    @property
    def rejected(self) -> torch.Tensor:
        """[B] bool: the rollout correction left no token."""
        return (self.before > 0) & ~self.trained

    @property
    def masked(self) -> torch.Tensor:
        """[B] bool: the policy sampled none of its tokens."""
        return self.before == 0

    @property
    def rejected_share(self) -> float:
        """The part of the tokens that the rollout correction left out."""
        total = float(self.before.sum())
        return 1 - float(self.after.sum()) / total if total else 0.0


def causes(args: AlgorithmArgs, batch: Batch, fates: Fates) -> Counter[str]:
    """Why nothing is learnt, for a step without any signal: cause -> groups, or for an estimator without groups the whole batch
    as one. A group counts once, with what took the signal from it: scores differ, but responses were rejected; otherwise most
    could not be scored; otherwise they are masked as a whole; otherwise all ran into the length; otherwise the scores are
    equal. OTHER: the scores differ, none was
    rejected, and the estimator makes nothing of it."""
    estimator = losses.ADVANTAGES[args.adv_estimator]
    members: dict[int, list[int]] = {place: [] for place in range(len(batch.sizes))}
    for response, place in enumerate(batch.group.tolist()):
        members[place].append(response)
    sizes = dict(enumerate(batch.sizes))
    if estimator.group_of_one is None and "baseline" not in estimator.inputs:
        members, sizes = {0: [*range(len(batch.group))]}, {0: sum(sizes.values())}
    scores, baselines = batch.score.tolist(), batch.baseline.tolist()
    failed, truncated, rejected, masked = (x.tolist() for x in (batch.failed, batch.truncated, fates.rejected, fates.masked))
    found: Counter[str] = Counter()
    for place, responses in members.items():
        scored = [i for i in responses if not failed[i]]
        compared = [i for i in scored if not masked[i]]
        differ = len({scores[i] for i in compared}) > 1
        if "baseline" in estimator.inputs:
            differ = any(scores[i] != baselines[i] for i in compared)
        if differ:
            found[REJECTED if any(rejected[i] for i in compared) else OTHER] += 1
        elif sizes[place] - len(scored) > len(scored) or (len(scored) < 2 <= sizes[place]):
            found[UNSCORED] += 1
        elif len(compared) < min(2, len(scored)):
            found[MASKED] += 1
        else:
            found[TRUNCATED if all(truncated[i] for i in responses) else EQUAL] += 1
    return found
