"""The prompts and responses of a run that has not been made: lengths, drawn from what is known of them."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np

from rl.errors import UserError
from rl.report.logs import load

BLOCK = 1024  # tickets drawn at once
LENGTH, LONGEST, PROMPT_LENGTH = "response_length/mean", "response_length/max", "prompt_length/mean"
CLIPPED = "response_length/clip_ratio"


class Workload(Protocol):
    def group(self, ticket: int) -> tuple[int, list[int], bool]:
        """(prompt tokens, tokens of each response, whether their scores differ) of a ticket; the same at every call."""


@dataclass
class Drawn:
    """Log-normal lengths of mean and spread, cut at the longest one; sigma 0 gives all responses the mean.

    `mean` is that of the lengths before they are cut. A share `flat` of the groups has no signal."""

    n: int  # responses a prompt
    mean: float  # tokens of a response
    sigma: float  # of the logarithm
    longest: int
    prompt: int = 0  # tokens of a prompt
    flat: float = 0.0
    seed: int = 0
    _blocks: dict[int, tuple[list[list[int]], list[bool]]] = field(default_factory=dict, repr=False, init=False, compare=False)

    def group(self, ticket: int) -> tuple[int, list[int], bool]:
        block, place = divmod(ticket, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block)
        lengths, signal = self._blocks[block]
        return self.prompt, lengths[place], signal[place]

    def _draw(self, block: int) -> tuple[list[list[int]], list[bool]]:
        random = np.random.default_rng((self.seed, block))
        logs = np.log(self.mean) - self.sigma**2 / 2 + self.sigma * random.standard_normal((BLOCK, self.n))
        lengths = np.clip(np.rint(np.exp(logs)), 1, self.longest).astype(int)
        return lengths.tolist(), (random.random(BLOCK) >= self.flat).tolist()


def lengths_like(text: str, n: int, longest: int, prompt: int) -> Drawn:
    """The workload that --response-lengths describes: "budget" (all of --max-response-length), a mean, a mean and the spread of
    the logarithm (2000:0.9), or a run's directory, whose later half is taken. n: responses a prompt; prompt: its tokens, where
    no run tells them. Raises UserError for other words."""
    if text == "budget":
        return Drawn(n, longest, 0.0, longest, prompt)
    if Path(text).exists():
        return _of_run(Path(text), n, longest)
    try:
        mean, sigma = (float(part) for part in (text if ":" in text else f"{text}:0").split(":"))
    except ValueError:
        raise UserError(f"--response-lengths {text}: neither budget, MEAN, MEAN:SIGMA nor a run's directory.") from None
    if not (mean > 0 and 0 <= sigma < 5):
        raise UserError(f"--response-lengths {text}: the mean must be above 0, and sigma from 0 to 5.")
    return Drawn(n, mean, sigma, longest, prompt)


def _of_run(path: Path, n: int, longest: int) -> Drawn:
    """Lengths with the run's mean, and its longest or cut share."""
    log = load(path)
    rows = [row for row in log.rows if {LENGTH, LONGEST, PROMPT_LENGTH} <= row.keys()]
    rows = rows[len(rows) // 2 :]
    if not rows:
        raise UserError(f"--response-lengths {path}: no step of this run has recorded its lengths.")
    mean, prompt, cut = (float(np.mean([row.get(name, 0.0) for row in rows])) for name in (LENGTH, PROMPT_LENGTH, CLIPPED))
    most = float(np.mean([np.log(row[LONGEST]) for row in rows])) - np.log(mean)
    responses = log.responses_per_step or 100
    # log(longest) = log(mean) - sigma^2 / 2 + sigma * z, where z is the normal score of the longest of this many (Blom)
    rank = 1 - cut if cut * responses > 1 else (responses - 0.375) / (responses + 0.25)
    z = max(0.0, NormalDist().inv_cdf(rank))
    sigma = z - max(0.0, z * z - 2 * max(0.0, most)) ** 0.5
    return Drawn(n, mean, float(sigma), longest, round(prompt))
