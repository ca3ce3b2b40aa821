"""The proof that an engine computes with the adapters that it was sent, at every publish with --publish adapter.

An adapter that is lost, or received but not applied, looks like staleness. Two things are compared:

    digests      of the engine's tensors, read back from it, with those of the tensors that it was given
    log-probs    of a few fixed tokens under the engine with the learner's (rl/weights/adapter_probe.py)

The log-probs are compared relative to the adapter's effect on them. With l the learner's, r the learner's without the adapter,
or with the previous one, and e the engine's, the engine applies the share <e - r, l - r> / <l - r, l - r>: 1 if all is right, 0
if it computes the same as r. Its error is about noise / rms(l - r). So the first publishes of a run, with B near zero, show
little or nothing (in fp32 one step suffices, in bf16 it takes many): until then only the digests prove anything.
"""

from itertools import accumulate, pairwise

import torch

from rl.generation.engine import Engine
from rl.model.attention import dtype_of
from rl.weights.digests import digests_of

# Of a log-prob, in nats: a generous bound of the difference between engine and learner if nothing is wrong.
NOISE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}
LEAST = 0.02  # difference in the share that is never an error: adapters are rounded to the engine's precision
KNOWN = 0.5  # a share with a larger error shows nothing
TOKENS = 17  # in the probe
PARTS = {"ids": TOKENS, "base": TOKENS - 1, "before": TOKENS - 1, "now": TOKENS - 1}
SIZE = sum(PARTS.values()) + 1


def check_log_probs(engine: Engine, version: int, expected: dict, dtype: torch.dtype) -> None:
    """Raise RuntimeError if the engine does not apply the adapter as the learner does. expected: from AdapterProbe. dtype: the
    engine's."""
    found = engine.log_probs_of(expected["ids"][: engine.max_length - 1])
    if words := fault(found, expected, max(NOISE[dtype], expected["noise"])):
        raise RuntimeError(f"version {version}: {words}")


def packed(expected: dict) -> list[int]:
    """Encode `expected`, from AdapterProbe, as integers [SIZE], which are sent after the digests."""
    values = [*(value for part in PARTS for value in expected[part]), expected["noise"]]
    return torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()


def unpacked(words: list[int]) -> dict:
    """Undo `packed`."""
    *values, noise = torch.tensor(words).view(torch.float64).tolist()
    ends = list(accumulate(PARTS.values(), initial=0))
    out = {part: values[first:end] for part, (first, end) in zip(PARTS, pairwise(ends), strict=True)}
    return out | {"ids": [int(token) for token in out["ids"]], "noise": noise}


def fault(found: list[float], expected: dict, noise: float) -> str | None:
    """Return what is wrong with an engine that finds these log-probs of the first tokens; None if no error is visible."""
    e, now, base, before = (
        torch.tensor(x[: len(found)]).double() for x in (found, *(expected[k] for k in ("now", "base", "before")))
    )
    of_base, of_before = _share(e, now, base, noise), _share(e, now, before, noise)
    where = f"on {len(found)} fixed tokens their log-probs say so"
    if of_base and _is_off(*of_base):
        if abs(of_base[0]) < KNOWN / 2:
            return f"the engine has received the adapter and computes without it; {where}"
        if of_before and abs(of_before[0]) < KNOWN / 2:
            return f"the engine computes with the adapter of the publish before; {where}"
        return (
            f"the engine applies {of_base[0]:.2f} times the adapter that it was sent, a wrong scale or another layer's; {where}"
        )
    if of_before and abs(of_before[0]) < KNOWN / 2:
        return f"the engine computes with the adapter of the publish before, not with this one; {where}"
    return None


def _share(e: torch.Tensor, now: torch.Tensor, reference: torch.Tensor, noise: float) -> tuple[float, float] | None:
    """Return (the share of the way from the reference to `now` at which the engine is, its allowed difference from 1); None if
    that shows nothing."""
    way = now - reference
    size = float(way.square().mean().sqrt())
    allowed = LEAST + 2 * noise / size if size else float("inf")
    return (float((e - reference) @ way / (way @ way)), allowed) if allowed < KNOWN else None


def _is_off(share: float, allowed: float) -> bool:
    return abs(share - 1) > allowed


class Held:
    """The digests of the tensors that an engine was given, to be compared with its own after the update."""

    def __init__(self, engine: Engine, dtype: torch.dtype):
        self._engine, self._dtype, self._given = engine, dtype, {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._given[name] = self._digest(self._engine.own_part(name, tensor.to(dtype_of(name, self._dtype))))

    def check(self, version: int) -> None:
        """Raise RuntimeError, with the parameter's name, if the engine's tensor differs."""
        for name, given in self._given.items():
            live = self._engine.read_back(name)  # None if the engine cannot show it
            if live is not None and self._digest(live.to(dtype_of(name, self._dtype))) != given:
                raise RuntimeError(f"version {version}: the engine's {name} is not what the learner sent")

    def _digest(self, tensor: torch.Tensor) -> int:
        return digests_of([tensor + 0.0], tensor.device)[0]  # + 0.0: an engine may know only one zero
