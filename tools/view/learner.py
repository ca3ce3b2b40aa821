"""What the learner computed of each token of a recorded step: replay.py --tokens writes it, the page of view.py shows it.

samples/learner_000012_0.npz, of step 12 and learner 0: `ticket`, `number` and `length` [R] name its responses, in whose order
all tokens [N] have, end to end,

    log_prob      under the policy as the step began; `gap`: less the log-prob recorded while sampling
    ratio         of the new to the old policy, in the last update of the token
    advantage...  the batch's targets that the step has, entropy, statistics of the policy loss such as `clipped`

NaN for tokens that the step does not train.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from rl.learning.batch import Batch
from rl.ranks.dist import Ranks
from rl.samples.group import Group
from rl.samples.recorder import step_of

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
        seen, self._seen = self._seen, []
        if step < self._first:
            return
        columns = {name: x for name, x in vars(batch.targets).items() if isinstance(x, torch.Tensor)}
        columns["log_prob"] = columns.pop("actor_log_prob")
        columns["gap"] = columns["log_prob"] - batch.rollout_log_prob
        for index, values in seen:
            for name, value in values.items():
                columns.setdefault(name, torch.full((len(batch.token),), torch.nan))[index] = value
        arrays = {name: np.where(batch.mask, x.float(), np.nan).astype(np.float32) for name, x in columns.items()}
        in_order = sorted(groups, key=lambda group: group.ticket)
        places = [(group.ticket, i) for group in in_order for i, r in enumerate(group.responses) if r.score is not None]
        here = batch.local_lengths > 0
        ticket, number = np.array(places, np.int64).reshape(-1, 2)[here.numpy()].T
        file = self._directory / f"learner_{step:06d}_{self._ranks.rank}.npz"
        np.savez_compressed(file, ticket=ticket, number=number, length=batch.local_lengths[here].numpy(), **arrays)
        for file in self._directory.glob(f"learner_{step:06d}_*.npz"):
            if step_of(file) >= self._ranks.world_size:  # of a replay with more learners
                file.unlink(missing_ok=True)


def read(directory: Path, step: int) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """Return (ticket, number of the response) -> column -> [n]; nothing if the step has not been replayed."""
    found = {}
    for file in directory.glob(f"learner_{step:06d}_*.npz"):
        with np.load(file) as data:
            columns = dict(data)
        *place, lengths = (columns.pop(name).tolist() for name in ("ticket", "number", "length"))
        start = 0
        for ticket, number, length in zip(*place, lengths, strict=True):
            found[ticket, number] = {name: column[start : start + length] for name, column in columns.items()}
            start += length
    return found
