"""Started by test_exchange.py: ranks, as if on several nodes, exchange records again and again.

torchrun ... exchange.py NODE ...      of each rank, the node that it is on

Prints a line a rank: the bytes that came from other nodes, and those of the other nodes' records, each behind its length.
"""

import gc
import os
import sys
from pathlib import Path

import numpy as np

from rl.ranks import process
from rl.transport.exchange import Exchange

ROUNDS = 6


def records(rank: int, number: int) -> bytes:
    """Return a record that differs by rank and round and is often empty."""
    rng = np.random.default_rng((rank, number))
    return rng.bytes(int(rng.integers(1, 200_000))) if number != 2 and rng.random() < 0.6 else b""


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("rl-samples")


def files() -> int:
    links = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum("rl-samples" in os.readlink(link) for link in links if link.is_symlink())


def main(ranks) -> None:
    node_of = sys.argv[1:]
    os.environ["GROUP_RANK"] = node_of[ranks.rank]
    exchange, theirs, kept = Exchange(), 0, {}
    for number in range(ROUNDS):
        expected = [records(rank, number) for rank in range(len(node_of))]
        if any(expected):
            theirs += sum(8 + len(data) for rank, data in enumerate(expected) if node_of[rank] != node_of[ranks.rank])
        shares = exchange.share(expected[ranks.rank])
        assert [bytes(share) for share in shares] == expected, (ranks.rank, number)
        if number == 1:
            kept = {rank: np.frombuffer(share, np.uint8) for rank, share in enumerate(shares) if len(share)}
            for array in kept.values():
                array[0] ^= 255 if ranks.rank == 0 else 0  # nobody else's changes
        del shares
    for rank, array in kept.items():
        own = array.copy()
        own[0] ^= 255 if ranks.rank == 0 else 0
        assert own.tobytes() == records(rank, 1), "what is held stays as it was"
    exchange.share(b"")
    assert not files(), "the files are closed once everybody has them"
    kept.clear()
    array = None
    gc.collect()
    assert not mapped(), "what nobody holds is freed"
    first = node_of.index(node_of[ranks.rank]) == ranks.rank
    print(f"rank {ranks.rank}: {exchange.received} {theirs if first else 0}", flush=True)


process.run(main)
