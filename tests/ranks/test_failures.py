"""The report that a failing rank leaves for the other ranks."""

import sys

import pytest
from torch.distributed import HashStore

from rl.errors import UserError
from rl.ranks import failures, process


def test_a_failure_is_reported_whatever_its_text_holds(monkeypatch):
    """A file name or a reward function's error may contain half of a surrogate pair, which the store refuses."""
    store = HashStore()
    monkeypatch.setattr(failures, "_open_store", lambda: store)
    monkeypatch.setattr(process.os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        process.fail(UserError("no reward for b\udc80r, ü"), "learner 0")
    assert failures.cause().startswith("learner 0 on ") and failures.cause().endswith(r" failed: no reward for b\udc80r, ü")
