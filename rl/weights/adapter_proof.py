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

# Of a log-prob, in nats: a generous bound of the difference between engine and learner if nothing is wrong.
NOISE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}
LEAST = 0.02  # difference in the share that is never an error: adapters are rounded to the engine's precision
KNOWN = 0.5  # a share with a larger error shows nothing
TOKENS = 17  # in the probe
PARTS = {"ids": TOKENS, "base": TOKENS - 1, "before": TOKENS - 1, "now": TOKENS - 1}
SIZE = sum(PARTS.values()) + 1


def check_log_probs(engine: Engine, version: int, expected: dict, dtype: torch.dtype) -> None:
    """Raise RuntimeError if the engine, of this precision, does not apply the adapter as the learner does."""
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
    of_base, of_before = _wrong_share(e, now, base, noise), _wrong_share(e, now, before, noise)
    where = f"on {len(found)} fixed tokens their log-probs say so"
    if of_base is not None and abs(of_base) < KNOWN / 2:
        return f"the engine has received the adapter and computes without it; {where}"
    if of_before is not None and abs(of_before) < KNOWN / 2:
        return f"the engine computes with the adapter of the publish before, not with this one; {where}"
    if of_base is not None:
        return f"the engine applies {of_base:.2f} times the adapter that it was sent, a wrong scale or another layer's; {where}"
    return None


def _wrong_share(e: torch.Tensor, now: torch.Tensor, reference: torch.Tensor, noise: float) -> float | None:
    """Return the share of the way from the reference to `now` at which the engine is; None if it is 1 within the noise, or if
    the noise hides it."""
    way = now - reference
    size = float(way.square().mean().sqrt())
    allowed = LEAST + 2 * noise / size if size else KNOWN
    share = float((e - reference) @ way / (way @ way)) if allowed < KNOWN else 1.0
    return share if abs(share - 1) > allowed else None
