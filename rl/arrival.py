"""Weights that come from another node while the engine goes on.

    the learner announces version 7 -> a thread receives it into host memory beside the engine's, which samples with version 6
    -> all of it is there: between two of its steps the engine takes it

A version that is still on its way counts as not announced: what the schedule lets start under version 6 starts, and each token
carries the version that sampled it. An engine with nothing to do waits for the weights.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from rl import watchdog
from rl.channel import State


class Arrival:
    """The next version, which a thread receives."""

    def __init__(self, receive: Callable[[], None]):
        """receive: takes in one version, whenever it comes."""
        self._receive = receive
        self._coming: Future | None = None
        self._states: dict[int, State] = {}  # the newest that was seen of each version, from the engine's on

    def begin(self) -> None:
        """Begins to receive, unless it has begun."""
        if not self._coming:
            self._coming = Future()
            threading.Thread(target=self._run, args=(self._coming,), name="weights", daemon=True).start()

    def wait(self) -> None:
        """Returns when the version is there; the next one may be received from then on. Raises what went wrong."""
        self.begin()
        with watchdog.doing("the rest of the weights"):
            self._coming.result()
        self._coming = None

    def in_force(self, state: State, version: int, busy: bool) -> State:
        """As Subscriber.in_force, for an engine with weights of `version`."""
        self._states = {v: seen for v, seen in self._states.items() if v >= version} | {state.version: state}
        if version < 0:  # there is nothing to go on with
            return state
        newer = min(state.version, version + 1)
        if newer > version:
            self.begin()
            if self._coming.done():
                self._coming.result()
            elif busy:
                newer = version
        watchdog.waits_for("newer weights, which are coming in", state.version > version)
        return replace(self._states[newer], stop=state.stop, snapshot=state.snapshot, again=state.again)

    def _run(self, coming: Future) -> None:
        try:
            coming.set_result(self._receive())
        except BaseException as error:  # raised again in the main thread
            coming.set_exception(error)
