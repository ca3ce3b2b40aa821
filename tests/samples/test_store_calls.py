"""The number of store calls of a job grows no faster than its number of ranks."""

import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, Store

from rl.transport.bridge import Bridge


class Counting(Store):
    """One rank's connection to a store; counts the calls, gloo's own too."""

    def __init__(self, store: Store, calls: Counter):
        super().__init__()
        self.store, self.calls = store, calls

    def _call(self, name: str, *arguments):
        self.calls[name] += 1
        return getattr(self.store, name)(*arguments)

    def has_extended_api(self) -> bool:  # as TCPStore
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)


for name in ("set", "get", "add", "check", "wait", "multi_get", "multi_set", "append", "compare_set"):
    setattr(Counting, name, lambda self, *arguments, _name=name: self._call(_name, *arguments))


def calls_of_a_bridge(size: int, of_each_node: int) -> Counter:
    store, calls, bridges = HashStore(), Counter(), []
    node_of = [rank // of_each_node for rank in range(size)]

    def join(rank: int) -> None:
        bridges.append(Bridge.join(Counting(store, calls), rank, node_of, torch.device("cpu"), timedelta(seconds=300)))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 300
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert len(bridges) == size
    return calls


@pytest.mark.timeout(900)
@pytest.mark.parametrize("of_each_node", [1, 2, 4])
def test_each_member_of_the_bridge_calls_the_store_a_fixed_number_of_times(of_each_node):
    few, many = calls_of_a_bridge(4, of_each_node), calls_of_a_bridge(16, of_each_node)
    assert few.total() <= 6 * 4 and many.total() <= 6 * 16, (few, many)
