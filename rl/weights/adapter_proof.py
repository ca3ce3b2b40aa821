"""The proof that an engine computes with the adapters that it was sent, at every publish with --publish adapter.

An adapter that never arrives, or arrives and is not applied, looks like staleness. Two things are compared:

    digests      of what the engine holds, read from its own tensors, with what it was given
    log-probs    of a few fixed tokens under the engine with the learner's (rl/weights/adapter_probe.py)

The log-probs are measured by what the adapter does to them. With l those of the learner, r those of the learner without the
adapter, or with the one before, and e the engine's, the engine applies the share <e - r, l - r> / <l - r, l - r>: 1 where all
is right, 0 where it computes what r does. It is known to about noise / rms(l - r). So the first publishes of a run, whose B
are near zero, show little or nothing (in fp32 one step suffices, in bf16 it takes many): the digests stand alone until then.
"""

from itertools import accumulate, pairwise

import torch

from rl.generation.engine import Engine
from rl.model.attention import dtype_of
from rl.weights.digests import digests_of

# Of a log-prob, in nats: the difference between engine and learner that is nobody's fault, generously.
NOISE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}
LEAST = 0.02  # a difference in the share that is never a fault: adapters are rounded to the engine's precision
KNOWN = 0.5  # a share that is known less well than this shows nothing
TOKENS = 17  # in the probe
PARTS = {"ids": TOKENS, "base": TOKENS - 1, "before": TOKENS - 1, "now": TOKENS - 1}
SIZE = sum(PARTS.values()) + 1


def check_log_probs(engine: Engine, version: int, expected: dict, dtype: torch.dtype) -> None:
    """Raises RuntimeError if the engine does not apply the adapter as the learner does. expected: of AdapterProbe. dtype: the
    engine's."""
    found = engine.log_probs_of(expected["ids"][: engine.max_length - 1])
    if words := fault(found, expected, max(NOISE[dtype], expected["noise"])):
        raise RuntimeError(f"version {version}: {words}")


def packed(expected: dict) -> list[int]:
    """As whole numbers [SIZE], which travel behind the digests. expected: of AdapterProbe."""
    values = [*(value for part in PARTS for value in expected[part]), expected["noise"]]
    return torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()


def unpacked(words: list[int]) -> dict:
    """Undoes `packed`."""
    *values, noise = torch.tensor(words).view(torch.float64).tolist()
    ends = list(accumulate(PARTS.values(), initial=0))
    out = {part: values[first:end] for part, (first, end) in zip(PARTS, pairwise(ends), strict=True)}
    return out | {"ids": [int(token) for token in out["ids"]], "noise": noise}


def fault(found: list[float], expected: dict, noise: float) -> str | None:
    """What is wrong with an engine that finds these log-probs of the first tokens; None where nothing is seen to be."""
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
    """(share of the way from the reference to now that the engine is at, what it may differ from 1); None where that shows
    nothing."""
    way = now - reference
    size = float(way.square().mean().sqrt())
    allowed = LEAST + 2 * noise / size if size else float("inf")
    return (float((e - reference) @ way / (way @ way)), allowed) if allowed < KNOWN else None


def _is_off(share: float, allowed: float) -> bool:
    return abs(share - 1) > allowed


class Held:
    """The digests of what an engine was given, to be compared with what it holds when the update is over."""

    def __init__(self, engine: Engine, dtype: torch.dtype):
        self._engine, self._dtype, self._given = engine, dtype, {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._given[name] = self._digest(self._engine.own_part(name, tensor.to(dtype_of(name, self._dtype))))

    def check(self, version: int) -> None:
        """Raises RuntimeError, with the parameter's name, where the engine holds something else."""
        for name, given in self._given.items():
            live = self._engine.read_back(name)  # None where the engine cannot show it
            if live is not None and self._digest(live.to(dtype_of(name, self._dtype))) != given:
                raise RuntimeError(f"version {version}: the engine's {name} is not what the learner sent")

    def _digest(self, tensor: torch.Tensor) -> int:
        return digests_of([tensor + 0.0], tensor.device)[0]  # + 0.0: an engine may know only one zero
