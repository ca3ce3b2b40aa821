"""One step's batch: groups as the tensors that a learner computes on.

`Batch` has the scores of all responses of a step, and the tokens of those that this learner trains (rl/learning/division.py),
end to end. Its `Targets` are what `learn` computes from them: first what models say (rl/learning/micro_batches.py), then what
the whole batch says (rl/algorithm/whole_batch.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl.learning.division import Division, mini_batches
from rl.ranks.dist import Ranks
from rl.samples.group import Group, Response

if TYPE_CHECKING:
    from rl.learning.batch_images import BatchImages


@dataclass
class TopTokens:
    """A teacher's K most likely tokens in the place of each token, in host memory (--teacher-top-k)."""

    token: torch.Tensor  # [N, K] int32
    log_prob: torch.Tensor  # [N, K] float32, the teacher's


@dataclass
class Targets:
    """The inputs of a batch's loss, in the order in which `learn` computes them: CPU tensors [N], like the batch's."""

    actor_log_prob: torch.Tensor | None = None  # float32, of the policy that starts the step; NaN if unknown
    old_log_prob: torch.Tensor | None = None  # float32, the ratio's denominator; None: the update's own policy
    ref_log_prob: torch.Tensor | None = None  # float32
    teacher_log_prob: torch.Tensor | None = None  # float32
    teacher_top: TopTokens | None = None  # with --teacher-top-k
    value: torch.Tensor | None = None  # float32, of the critic, before the update
    is_weight: torch.Tensor | None = None  # float32, weight of the rollout correction
    rejected: torch.Tensor | None = None  # bool, tokens that the rollout correction excludes from the loss
    kl: torch.Tensor | None = None  # float32, the penalty in the reward, before its coefficient
    reward: torch.Tensor | None = None  # float32, the score on the last token, less KL penalties
    advantage: torch.Tensor | None = None  # float32
    chosen: torch.Tensor | None = None  # bool, tokens that clip_cov and kl_cov choose
    returns: torch.Tensor | None = None  # float32, the critic's targets


@dataclass
class Batch:
    """B responses; CPU tensors.

    Tensors per response, [B], are the same on every learner. Tensors per token, [N], hold the responses that this learner
    trains: all of them if it is alone. A response's tokens are contiguous, and responses are in order. Responses that could not
    be scored are left out: they have no part in the loss, its denominators or any baseline.
    """

    tickets: list[int]  # of its groups, including one whose responses all failed to be scored
    unscored: int  # responses left out
    errors: list[str]  # why responses could not be scored
    prompts: list[np.ndarray]  # B prompts, as token ids
    lengths: torch.Tensor  # [B] long, tokens of each response
    sampled_lengths: torch.Tensor  # [B] long, tokens of each response in the mask
    group: torch.Tensor  # [B] long, which prompt: the group's place in the batch
    score: torch.Tensor  # [B] float32
    baseline: torch.Tensor  # [B] float32, score of the greedy response to the same prompt (ReMax)
    extra: list[dict[str, float]]  # B dicts of further numbers of the reward function
    truncated: torch.Tensor  # [B] bool, the response was cut at its budget
    token: torch.Tensor  # [N] int32
    seq: torch.Tensor  # [N] long, the response each token belongs to
    mask: torch.Tensor  # [N] bool, tokens that the policy sampled and that may be trained
    rollout_log_prob: torch.Tensor  # [N] float32
    version: torch.Tensor  # [N] int32
    local_lengths: torch.Tensor  # [B] long, tokens of each response among the N: lengths, or 0
    division: Division | None  # among the learners; None: all tokens are here
    flat: list[bool]  # B, whether the group is flat; all False if flat groups are not packed apart
    routes: list[np.ndarray | None]  # B responses' routes, as in their records
    prompt_routes: list[np.ndarray | None]  # B prompts' routes
    sources: list[str]  # of its groups: their data sources
    sizes: list[int]  # of its groups: their responses, scored or not
    histories: list[list[int] | None]  # B, as in their records
    support: torch.Tensor | None  # [N, K] int32, tokens that could be sampled (rl/model/sampling_mask.py)
    images: BatchImages | None = None  # of its prompts, if the model takes images
    targets: Targets = field(default_factory=Targets)

    @staticmethod
    def of(groups: list[Group], division: Division | None = None) -> Batch:
        """Make the batch of the groups, in ticket order. division: among the learners; None: this one trains all."""
        groups = sorted(groups, key=lambda g: g.ticket)
        pairs = [(i, g, r) for i, g in enumerate(groups) for r in g.scored]
        lengths = torch.tensor([len(r.token_ids) for _, _, r in pairs], dtype=torch.long)
        group = torch.tensor([i for i, _, _ in pairs], dtype=torch.long)
        is_flat = [division is not None and division.packs_flat_apart and g.is_flat for g in groups]
        flat = [is_flat[i] for i, _, _ in pairs]
        here = lengths
        responses = [r for _, _, r in pairs]
        is_part = division is not None and division.ranks.data_size > 1
        if is_part:
            prompts = [len(g.prompt_ids) for _, g, _ in pairs]
            owners = division.owners([p + n for p, n in zip(prompts, lengths.tolist(), strict=True)], prompts, group, flat)
            own = [i for i, owner in enumerate(owners) if owner == division.ranks.data_rank]
            here = torch.zeros_like(lengths)
            responses = [responses[i] for i in own]
            here[own] = lengths[own]
        masks = (np.ones(len(r.token_ids), bool) if r.mask is None else r.mask for r in responses)
        joined = lambda arrays, dtype: torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]))  # noqa: E731
        return Batch(
            tickets=[g.ticket for g in groups],
            unscored=sum(len(g.responses) for g in groups) - len(pairs),
            errors=[r.error for g in groups for r in g.responses if r.error is not None],
            prompts=[g.prompt_ids for _, g, _ in pairs],
            lengths=lengths,
            sampled_lengths=torch.tensor([r.sampled for _, _, r in pairs], dtype=torch.long),
            group=group,
            score=torch.tensor([r.score for _, _, r in pairs], dtype=torch.float32),
            baseline=torch.tensor([g.baseline for _, g, _ in pairs], dtype=torch.float32),
            extra=[r.extra for _, _, r in pairs],
            truncated=torch.tensor([r.finish_reason == "length" for _, _, r in pairs], dtype=torch.bool),
            token=joined((r.token_ids for r in responses), np.int32),
            seq=torch.arange(len(pairs)).repeat_interleave(here),
            mask=joined(masks, bool),
            rollout_log_prob=joined((r.log_probs for r in responses), np.float32),
            version=joined((r.versions for r in responses), np.int32),
            local_lengths=here,
            division=division if is_part else None,
            flat=flat,
            routes=[r.routes for _, _, r in pairs],
            prompt_routes=[g.prompt_routes for _, g, _ in pairs],
            sources=[g.data_source for g in groups],
            sizes=[len(g.responses) for g in groups],
            histories=[r.histories for _, _, r in pairs],
            support=_supports(responses) if any(r.support is not None for r in responses) else None,
        )

    @property
    def is_unscored(self) -> bool:
        """Whether no response could be scored."""
        return bool(self.errors) and not len(self.score)

    @property
    def ranks(self) -> Ranks | None:
        """The learners that hold the other tokens; None if all are here."""
        return self.division and self.division.ranks

    @property
    def is_masked(self) -> bool:
        """Whether a response has tokens that the policy did not sample. The same on every learner."""
        return not torch.equal(self.lengths, self.sampled_lengths)

    @property
    def trained(self) -> torch.Tensor:
        """[N] bool: the tokens of the mask that the rollout correction keeps in the loss."""
        return self.mask if self.targets.rejected is None else self.mask & ~self.targets.rejected

    @property
    def starts(self) -> torch.Tensor:
        """[B]: index of each response's first token in the [N] tensors."""
        return self.local_lengths.cumsum(0) - self.local_lengths

    def mini_batches(self, prompts: int) -> list[torch.Tensor]:
        """Return the responses [b] of each mini-batch of `prompts` prompts, in ticket order."""
        return mini_batches(self.group, len(self.tickets), prompts)

    @property
    def total_lengths(self) -> list[int]:
        """Prompt plus response tokens of each response."""
        return [len(p) + n for p, n in zip(self.prompts, self.lengths.tolist(), strict=True)]

    @property
    def prompt_lengths(self) -> list[int]:
        """Prompt tokens of each response."""
        return [len(p) for p in self.prompts]

    def distinct_prompts(self) -> list[np.ndarray]:
        """Return the prompt of each group that has a response."""
        _, first = np.unique(self.group.numpy(), return_index=True)
        return [self.prompts[i] for i in first]


def _supports(responses: list[Response]) -> torch.Tensor:
    from rl.model import sampling_mask  # late: only --keep-sampling-mask needs it

    return sampling_mask.of_responses([r.support for r in responses], [len(r.token_ids) for r in responses])
