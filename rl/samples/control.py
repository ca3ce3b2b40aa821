"""The control block: the state that the first learner announces to all generators, through the store."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from rl.background import in_background
from rl.split import Split


@dataclass(frozen=True)
class State:
    """The first learner's message to all generators."""

    version: int  # version of the newest weights that are ready to be received
    dropped: int  # number of tickets dropped so far, for any reason: others may start in their place
    snapshot: int = 0  # the step whose checkpoint needs the unfinished groups
    stop: bool = False
    step: int = 0  # the step after which these weights were published


class ControlBlock:
    """The state in the store. In each generator a thread waits for the next one, so that reading it needs no round trip.

    The key "control" has the newest state with its number; "control/version/<version>" has the state that announced that
    version; "control/<number>" exists once that number has been written.
    """

    def __init__(self, split: Split):
        self.store = split.store
        self.writes = split.role == "learner" and split.ranks.is_main
        self.state: State | None = None
        self._number = 0  # of the state
        self._changed = threading.Condition()
        self._following = in_background(self._follow, "control") if split.role == "generator" else None

    def update(self, **changes) -> None:
        """Change fields of the state, which the first learner writes to the store."""
        new = replace(self.state or State(version=-1, dropped=0), **changes)
        if self.writes and new != self.state:
            self._number += 1
            if not self.state or new.version != self.state.version:
                self.store.set(announces(new.version), json.dumps(asdict(new)))
            self.store.set("control", json.dumps([self._number, asdict(new)]))
            self.store.set(f"control/{self._number}", "")
        self.state = new

    def read(self) -> State:
        """Return the newest state that has arrived here; wait until there is one."""
        return self._wait(lambda state: True, "the control block in the store")

    def wait_for(self, version: int) -> None:
        """Return when the weights of this version, or newer ones, are ready."""
        self._wait(lambda state: state.version >= version, f"version {version} of the weights")

    def _wait(self, done: Callable[[State], bool], what: str) -> State:
        with self._changed:
            while not (self.state and done(self.state)) and not self._following.done():
                self._changed.wait(1.0)  # signal handlers run in between
            if self._following.done():  # it has failed
                self._following.result()
            return self.state

    def _follow(self) -> None:
        store = self.store.clone()  # a separate connection, since a waiting call blocks all others
        while True:
            store.wait([f"control/{self._number + 1}"], timedelta(days=7))  # a step may take long; the watchdog has the limits
            number, state = json.loads(store.get("control"))
            with self._changed:
                self._number = number
                self.state = State(**state)
                self._changed.notify_all()


def announces(version: int) -> str:
    """Return the key of the state that announced this version."""
    return f"control/version/{version}"
