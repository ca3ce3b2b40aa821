"""Draws the lengths of a planned run's prompts and responses."""

from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from rl.errors import UserError
from tools.report.logs import load

LENGTH, LONGEST, PROMPT_LENGTH = "response_length/mean", "response_length/max", "prompt_length/mean"
CLIPPED = "response_length/clip_ratio"


@dataclass(frozen=True)
class Drawn:
    """Log-normal lengths, cut at the longest. `mean` is that of the lengths before they are cut."""

    n: int  # responses of a prompt
    mean: float  # tokens of a response
    sigma: float  # of the logarithm; 0 gives every response the mean
    longest: int
    prompt: int = 0  # tokens of a prompt

    def group(self, ticket: int) -> list[int]:
        """Tokens of each response to the ticket's prompt, the same at every call."""
        normal = np.random.default_rng(ticket).standard_normal(self.n)
        lengths = self.mean * np.exp(self.sigma * normal - self.sigma**2 / 2)
        return np.clip(np.rint(lengths), 1, self.longest).astype(int).tolist()


def lengths_like(text: str, n: int, longest: int, prompt: int) -> Drawn:
    """Return the lengths that --response-lengths describes: "budget" (all of --max-response-length), a mean, a mean and the
    spread of the logarithm (2000:0.9), or a run's directory, whose later half counts. n: responses of a prompt; prompt: its
    tokens, unless a run says. Raise UserError for other words."""
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
    """Return lengths with the run's mean, and its longest or the share that it cut."""
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
    z = NormalDist().inv_cdf(max(0.5, rank))
    sigma = z - max(0.0, z * z - 2 * max(0.0, most)) ** 0.5
    return Drawn(n, mean, float(sigma), longest, round(prompt))
