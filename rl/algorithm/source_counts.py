"""Counts of responses by data source: what a step trained of each, and what became of the others.

    data/<source>/trained      a token of it was trained
    data/<source>/rejected     the rollout correction left no token of it
    data/<source>/unscored     it could not be scored
    data/<source>/masked       the policy sampled none of its tokens; only where some are masked
    data/<source>/filtered     of a prompt that --filter-groups replaced
    data/<source>/dropped      of a prompt that was dropped as too old (--max-staleness)
    data/<source>/skipped      not generated, of a prompt that was passed over; only with --prompt-sampling

They are of one step: over a run they are summed up. Each response of a prompt that was started and settled is in one of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from rl.algorithm.fates import Fates
from rl.data.prompts import PromptDataset, PromptOrder
from rl.learning.batch import Batch

KINDS_OF_A_BATCH = ("trained", "rejected", "unscored")
KINDS = (*KINDS_OF_A_BATCH, "filtered", "dropped")
MOST = 16  # sources with metrics of their own; with more the smallest ones share theirs
OTHERS = "(others)"


class SourceCounts:
    """Counts by the data sources of the training prompts."""

    def __init__(self, prompts: PromptDataset, order: PromptOrder, responses: int):
        """responses: of each prompt."""
        self.prompts, self.order, self.responses = prompts, order, responses
        sizes = prompts.source_sizes()
        largest = sorted(sizes, key=lambda source: (-sizes[source], source))
        self.shown = largest if len(largest) <= MOST else [*largest[: MOST - 1], OTHERS]

    def of_step(self, batch: Batch, fates: Fates, gone: Mapping[str, Sequence[int]] | None) -> dict[str, int]:
        """data/*. gone: tickets that were not trained, by reason: "filtered", "stale" or "skipped". None if they are not known:
        then the kinds that count them are left out."""
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
        kinds = (*(KINDS if gone is not None else KINDS_OF_A_BATCH), *(["masked"] if batch.is_masked else []))
        kinds += ("skipped",) if gone and "skipped" in gone else ()
        return {f"data/{source}/{kind}": int(of[kind]) for source, of in counts.items() for kind in kinds}

    def _shown(self, source: str) -> str:
        """The name that the source counts under. One that no prompt has (a replay may have other data) is among the last."""
        return source if source in self.shown else self.shown[-1]
