"""Started by test_packed_kernels.py: measures the memory of attention and its gradient over one packed row, on tensors without
values.

python attention_memory.py KIND DTYPE '{"segments": [...], "after": [...], "heads": n, "kv_heads": n, "size": n}'

KIND: whose attention the device has; cpu: the host's own. Prints a line of JSON, in bytes: what the forward pass leaves for the
backward pass besides the queries, keys and values that it was given, the most that is held at a time, and the largest tensor.
"""

import json
import sys

import torch

from rl.model.attention import Packed
from rl.ranks.device import is_accelerator
from tools.plan.fake_device import FakeDevice, start
from tools.plan.memory_count import MemoryCount


class Largest(MemoryCount):
    """Also keeps the size of the largest storage."""

    largest = 0

    def note(self, tensor: torch.Tensor, cause: str = "") -> None:
        super().note(tensor, cause)
        self.largest = max(self.largest, tensor.untyped_storage().nbytes())


def main(kind: str, dtype: torch.dtype, segments, after, heads: int, kv_heads: int, size: int) -> None:
    place = torch.device("cpu") if kind == "cpu" else start(attention=kind).device
    with FakeDevice() as fake, Largest() as count:
        with fake.host_too(kind == "cpu"):
            made = [torch.empty(sum(segments), n, size, dtype=dtype, device=place) for n in (heads, kv_heads, kv_heads, heads)]
        (query, key, value), grad, layout = (x.requires_grad_() for x in made[:3]), made[3], Packed(segments, place, after)
        ledger = count.device if is_accelerator(place) else count.host
        before, count.largest = ledger.live.total(), 0
        out = layout.attend(0, query, key, value, 0.1)
        kept = ledger.live.total() - before
        out.backward(grad)
    print(json.dumps({"kept": kept, "peak": ledger.peak - before, "largest": count.largest}))


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]), **json.loads(sys.argv[3]))
