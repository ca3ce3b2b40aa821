"""What the ranks of a job ask of the store does not grow faster than their number."""

import threading
from collections import Counter
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, Store

from rl import device


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


def calls_of_a_bridge(size: int) -> Counter:
    store, calls, groups = HashStore(), Counter(), []

    def join(rank: int) -> None:
        groups.append(device.broadcast_group(Counting(store, calls), rank, size, torch.device("cpu"), timedelta(seconds=60)))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(groups) == size
    return calls


@pytest.mark.timeout(120)
def test_each_member_of_the_bridge_calls_the_store_a_fixed_number_of_times():
    few, many = calls_of_a_bridge(4), calls_of_a_bridge(16)
    assert few.total() <= 5 * 4 and many.total() <= 5 * 16, (few, many)
