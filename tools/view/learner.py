"""What the learner computed of each token of a recorded step: replay.py --tokens writes it, the page of view.py shows it.

samples/learner_000012_0.npz, of step 12 and learner 0: `ticket`, `number` and `length` [R] name its responses, in whose order
all tokens [N] have, end to end,

    log_prob      under the policy as the step began; `gap`: less the log-prob recorded while sampling
    ratio         of the new to the old policy, in the last update of the token
    advantage, entropy
    clipped, ...  whatever else the step has: statistics of the policy loss, reference and teacher log-probs, weights, values

NaN where the step computes none: tokens that it does not train.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from rl.learning.batch import Batch
from rl.ranks.dist import Ranks
from rl.samples.group import Group

TARGETS = {
    "log_prob": "actor_log_prob",
    "ref_log_prob": "ref_log_prob",
    "teacher_log_prob": "teacher_log_prob",
    "value": "value",
    "is_weight": "is_weight",
    "rejected": "rejected",
    "reward": "reward",
    "advantage": "advantage",
}
NAMES = {"pg_clipfrac": "clipped", "pg_clipfrac_lower": "clipped_lower"}  # of statistics


class Watch:
    """Keeps what a script's `actor_loss` computes of a step's tokens."""

    def __init__(self, actor_loss: Callable, directory: Path, ranks: Ranks, first: int):
        """directory: of the record; first: the first step to write."""
        self._actor_loss, self._directory, self._ranks, self._first = actor_loss, directory, ranks, first
        self._seen: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []

    def actor_loss(self, args, t, out, denominator):
        """Call the script's function."""
        terms, stats = self._actor_loss(args, t, out, denominator)
        kept = {NAMES.get(name, name): value for name, value in stats.items() if name != "ppo_kl"}
        kept |= {"ratio": torch.exp(-stats["ppo_kl"]), "entropy": out.entropy}
        self._seen.append((t.index, {name: value.detach().float().cpu() for name, value in kept.items()}))
        return terms, stats

    def end_step(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        """Write this learner's part of the step."""
        seen = self._seen
        self._seen = []
        if step < self._first:
            return
        columns = {name: x for name, of in TARGETS.items() if (x := getattr(batch.targets, of)) is not None}
        for index, values in seen:
            for name, value in values.items():
                columns.setdefault(name, torch.full((len(batch.token),), torch.nan))[index] = value
        columns["gap"] = columns["log_prob"] - batch.rollout_log_prob
        in_order = sorted(groups, key=lambda group: group.ticket)
        places = [(group.ticket, i) for group in in_order for i, r in enumerate(group.responses) if r.score is not None]
        here = batch.local_lengths > 0
        own = np.array(places, np.int64).reshape(-1, 2)[here.numpy()]
        arrays = {name: np.where(batch.mask, x.float(), np.nan).astype(np.float32) for name, x in columns.items()}
        of_responses = {"ticket": own[:, 0], "number": own[:, 1], "length": batch.local_lengths[here].numpy()}
        np.savez_compressed(_file(self._directory, step, self._ranks.rank), **of_responses, **arrays)
        if self._ranks.is_main:
            rank = self._ranks.world_size
            while (older := _file(self._directory, step, rank)).exists():  # of a replay with more learners
                older.unlink()
                rank += 1


def _file(directory: Path, step: int, rank: int) -> Path:
    return directory / f"learner_{step:06d}_{rank}.npz"


def read(directory: Path, step: int) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """Return (ticket, number of the response) -> column -> [n]; nothing if the step has not been replayed."""
    found = {}
    for file in sorted(directory.glob(f"learner_{step:06d}_*.npz")):
        with np.load(file) as data:
            arrays = dict(data)
        places = zip(arrays.pop("ticket").tolist(), arrays.pop("number").tolist(), strict=True)
        ends = arrays.pop("length").cumsum()
        split = {name: np.split(array, ends[:-1]) for name, array in arrays.items()}
        for i, place in enumerate(places):
            found[place] = {name: pieces[i] for name, pieces in split.items()}
    return found
