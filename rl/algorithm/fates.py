"""The fates of a step's responses, in total and by data source.

    data/<source>/trained      a token was trained
    data/<source>/rejected     the rollout correction left no token
    data/<source>/unscored     it could not be scored
    data/<source>/masked       the policy sampled none of its tokens; only if some are masked
    data/<source>/filtered     its prompt was replaced by --filter-groups
    data/<source>/dropped      its prompt was dropped as too old (--max-staleness)

Each response of a prompt that was started and settled is in exactly one of these counts of one step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rl.algorithm import whole_batch
from rl.data.prompts import PromptDataset, PromptOrder
from rl.learning.batch import Batch

KINDS = ("trained", "rejected", "unscored", "filtered", "dropped")
MOST = 16  # sources with separate metrics; if there are more, the smallest ones share theirs
OTHERS = "(others)"
# The remedy where the rollout correction rejects too much
OF_REJECTION = (
    "Widen the bounds, or bring generator and learner closer together (--rollout-dtype, a lower --staleness-threshold)"
)


@dataclass(frozen=True)
class Fates:
    """The fate of each response; the same on every learner."""

    before: torch.Tensor  # [B] number of its tokens in the mask
    after: torch.Tensor  # [B] number of those that the rollout correction keeps, with a weight above 0
    has_signal: bool  # whether one of these tokens has an advantage, or a teacher

    @staticmethod
    def of(batch: Batch) -> "Fates":
        """Return the fates of a batch. A collective of the learners."""
        weight = batch.targets.is_weight
        after = batch.trained if weight is None else batch.trained & (weight != 0)
        signals = after if batch.targets.teacher_log_prob is not None else after & (batch.targets.advantage != 0)
        signal = torch.tensor([float(signals.any())])
        counts = torch.stack([whole_batch.by_response(batch, batch.mask), whole_batch.by_response(batch, after)])
        return Fates(*whole_batch.sum_over_ranks(batch, counts), has_signal=bool(whole_batch.sum_over_ranks(batch, signal) > 0))

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
        """The share of the tokens that the rollout correction left out."""
        total = float(self.before.sum())
        return 1 - float(self.after.sum()) / total if total else 0.0


class SourceCounts:
    """Counts by the data sources of the training prompts."""

    def __init__(self, prompts: PromptDataset, order: PromptOrder, responses: int):
        """responses: number of responses to each prompt."""
        self.prompts, self.order, self.responses = prompts, order, responses
        sizes = prompts.source_sizes()
        largest = sorted(sizes, key=lambda source: (-sizes[source], source))
        self.shown = largest if len(largest) <= MOST else [*largest[: MOST - 1], OTHERS]

    def of_step(self, batch: Batch, fates: Fates, gone: Mapping[str, Sequence[int]] | None) -> dict[str, int]:
        """Return data/*. gone: tickets that were not trained, by reason: "filtered" or "stale"; None if they are
        unknown: the kinds that count them are then left out."""
        counts = {source: Counter() for source in self.shown}
        places = batch.group.tolist()
        of_each = (x.tolist() for x in (fates.trained, fates.rejected, fates.masked))
        for place, trained, rejected, masked in zip(places, *of_each, strict=True):
            counts[self._shown(batch.sources[place])].update(trained=trained, rejected=rejected, masked=masked)
        scored = Counter(places)
        for place, (source, size) in enumerate(zip(batch.sources, batch.sizes, strict=True)):
            counts[self._shown(source)].update(unscored=size - scored[place])
        for reason, tickets in (gone or {}).items():
            kind = "dropped" if reason == "stale" else reason
            for ticket in tickets:
                source = self.prompts.source(self.order(ticket)[1])
                counts[self._shown(source)].update({kind: self.responses})
        kinds = [*(KINDS if gone is not None else KINDS[:3])]
        kinds += ["masked"] if batch.is_masked else []
        return {f"data/{source}/{kind}": int(of[kind]) for source, of in counts.items() for kind in kinds}

    def _shown(self, source: str) -> str:
        """Return the name under which the source counts. A source that no prompt has (a replay may have other data) counts
        under the last one."""
        return source if source in self.shown else self.shown[-1]
