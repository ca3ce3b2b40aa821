"""Digests of weights, by which generators verify that they compute with the weights that the learners sent."""

from collections.abc import Iterable

import torch
import xxhash

from rl.ranks.device import is_accelerator
from rl.weights.buckets import Bucket, Plan


class Digests:
    """A 64-bit digest of each parameter's bits, fed with the buckets in order: xxh3 on CPU machines; on accelerators a sum of
    the bits weighted by position, which needs no order and so runs there."""

    def __init__(self, plan: Plan, device: torch.device):
        self.plan, self.on_host = plan, not is_accelerator(device)
        self._hashes = [xxhash.xxh3_64() for _ in plan.names] if self.on_host else []
        self._sums: list[list[torch.Tensor]] = [[] for _ in plan.names]

    def add(self, bucket: Bucket, data: torch.Tensor) -> None:
        """data: the bucket, contiguous."""
        offsets, size = self.plan.offsets, self.plan.dtype.itemsize
        raw = memoryview(data.view(torch.uint8).numpy()) if self.on_host else None
        for i in bucket.members:
            start, stop = max(bucket.start, offsets[i]) - bucket.start, min(bucket.stop, offsets[i + 1]) - bucket.start
            if raw is not None:
                self._hashes[i].update(raw[start * size : stop * size])
            else:
                self._sums[i].append(_weighted_sum(data[start:stop], first=bucket.start + start - offsets[i]))

    def values(self) -> list[int]:
        """Return the digest of each parameter, signed, so that they fit into a tensor."""
        if self.on_host:
            return [_signed(h.intdigest()) for h in self._hashes]
        totals = iter(_read([torch.stack(sums).sum() for sums in self._sums if sums]))
        return [next(totals) if sums else 0 for sums in self._sums]


def digests_of(tensors: Iterable[torch.Tensor], device: torch.device) -> list[int]:
    """Return the digest of each tensor, the same as that of Digests."""
    flat = (tensor.contiguous().view(-1) for tensor in tensors)
    if not is_accelerator(device):
        return [_signed(xxhash.xxh3_64_intdigest(x.view(torch.uint8).numpy())) for x in flat]
    return _read([_weighted_sum(x, first=0) for x in flat])


def _read(sums: list[torch.Tensor]) -> list[int]:
    """Return sums modulo 2^64 from the device, in one copy: each copy waits for the device."""
    return torch.stack(sums).tolist() if sums else []


def _weighted_sum(flat: torch.Tensor, first: int) -> torch.Tensor:
    """Return the sum modulo 2^64 of the elements' bits as whole numbers, each times an odd weight of its position."""
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)
    total = torch.zeros((), dtype=torch.long, device=bits.device)
    for start in range(0, len(bits), 1 << 24):
        run = bits[start : start + (1 << 24)].long()
        position = torch.arange(first + start, first + start + len(run), device=bits.device)
        total += (run * (position % 65_521 * 2 + 1)).sum()
    return total


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value
