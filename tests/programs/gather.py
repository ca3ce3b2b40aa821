"""Started by test_gather.py: ranks share groups; each checks that it has all of them, as they were made."""

import sys
import time
from dataclasses import replace

import numpy as np
from helpers import make_group

from rl.ranks import dist, process
from rl.samples.group import all_gather_groups, all_gather_records


def main(ranks: dist.Ranks) -> None:
    tokens = int(sys.argv[1])
    every = [make_group(ticket, [tokens, 3]) for ticket in range(4)]
    assert all_gather_records([]) == []
    for owners in ([0, 0, 0, 0], [1, 0, 2, 1], [2, 2, 2, 0]):
        began = time.monotonic()
        found = all_gather_groups([group for group, owner in zip(every, owners, strict=True) if owner == ranks.rank])
        print(f"{time.monotonic() - began:.3f} s", flush=True)
        assert [replace(group).to_bytes() for group in found] == [group.to_bytes() for group in every]
        assert np.array_equal(found[3].responses[0].token_ids, every[3].responses[0].token_ids)
    records = all_gather_records([b"", bytes([ranks.rank])])
    assert [bytes(record) for record in records] == [b"", b"\0", b"", b"\1", b"", b"\2"][: 2 * ranks.world_size]
    print(f"rank {ranks.rank} has all", flush=True)


if __name__ == "__main__":
    process.run(main)
