"""The algorithm's flags whose values are words to be read: numbers of a loss, bounds and criteria of the rollout correction."""

import math
from collections.abc import Mapping, Sequence

import losses
from rl.errors import UserError
from rl.ranges import SWITCHES, flag


def check_loss_args(words: Sequence[str], loss_mode: str, own_flags: Mapping[str, str]) -> None:
    """Raise UserError unless each word of --loss-args names a numeric parameter of the loss. own_flags: numbers with flags."""
    loss = losses.POLICY_LOSSES[loss_mode]
    known = {name: value for name, value in (loss.knobs | loss.choice_knobs).items() if name not in own_flags}
    for word in words:
        name, _, value = word.partition("=")
        if name in own_flags:
            raise UserError(f"--loss-args {word}: this number has a flag of its own, {flag(own_flags[name])}.")
        if name not in known:
            takes = ", ".join(f"{k}={v:g}" for k, v in known.items()) or "none"
            raise UserError(
                f"--loss-args {word}: --loss-mode {loss_mode} takes {takes} (its defaults). A knob stands behind the "
                "* of its function in losses.py, with a number as its default."
            )
        try:
            usable = 0 < float(value) < math.inf
        except ValueError:
            usable = False
        if not usable:
            raise UserError(f"--loss-args {word}: write {name}=NUMBER, above 0, such as {name}={known[name]:g}.")


def hint_of(word: str, loss_mode: str, own_flags: Mapping[str, str]) -> str:
    """Return a sentence for an unknown flag that is a numeric parameter of a loss or an estimator, or an earlier switch."""
    name = word.removeprefix("--").replace("-", "_")
    modes = [mode for mode, loss in losses.POLICY_LOSSES.items() if name in loss.knobs | loss.choice_knobs]
    estimators = [own for own, estimator in losses.ADVANTAGES.items() if name in estimator.knobs]
    if (switch := name.removeprefix("no_")) in SWITCHES:
        coef = flag(SWITCHES[switch])
        return f" Leave {flag(switch)} out: {coef} above 0 is on, such as 0.001, and 0, the default, is off."
    if name in own_flags:
        return f" {word}: here {flag(own_flags[name])}."
    if modes:
        mode = loss_mode if loss_mode in modes else ", ".join(modes)
        return f" {word} is a number of --loss-mode {mode}: --loss-args {name}=NUMBER."
    if estimators:
        return f" {word} is a number of --adv-estimator {', '.join(estimators)}, whose default in losses.py holds."
    return ""


def parse_threshold(text: str) -> tuple[float | None, float]:
    """ "2.0" -> (None, 2.0); "0.5_5.0" -> (0.5, 5.0)."""
    try:
        numbers = [float(part) for part in str(text).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not (0 <= numbers[0] <= numbers[-1] > 0) or numbers[-1] == float("inf"):
        raise ValueError(f'threshold {text!r}: write one positive number, "2.0", or a band from low to high, "0.5_5.0"')
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def parse_criteria(criteria: str, threshold: str) -> list[tuple[str, str, float, float]]:
    """ "seq_mean_k3,token_k1" and "0.01,0.5_2.0" -> [("seq_mean", "k3", 0, 0.01), ("token", "k1", 0.5, 2.0)]. For k1, a single
    bound hi means the band from 1/hi to hi."""
    names, texts = [n.strip() for n in criteria.split(",")], [t.strip() for t in str(threshold).split(",")]
    texts = texts * len(names) if len(texts) == 1 else texts
    if len(texts) != len(names):
        raise ValueError(f"{len(names)} rejection criteria ({criteria}) but {len(texts)} thresholds ({threshold})")
    return [_parse_criterion(name, text) for name, text in zip(names, texts, strict=True)]


def _parse_criterion(name: str, text: str) -> tuple[str, str, float, float]:
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
