from concurrent.futures import Future

import pytest

from rl.samples import tickets


@pytest.fixture(scope="module")
def requests_at_once():
    """Requests for tickets are over when they return: a thread would answer at any time."""

    def at_once(call, name: str) -> Future:
        future = Future()
        future.set_result(call())
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tickets, "in_background", at_once)
        yield
