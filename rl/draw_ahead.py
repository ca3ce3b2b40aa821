"""Tickets drawn ahead by a thread: a generator far from the store starts them without waiting for a round trip."""

import threading

from torch.distributed import Store

from rl.schedule import Draws


class DrawAhead(Draws):
    """As Draws, but a thread asks the store, over a connection of its own: `have` says what is wanted, and does not wait."""

    def __init__(self, store: Store, again: list[int]):
        super().__init__(store.clone(), again)
        self._wanted, self._started = 0, 0  # to be at hand; that the store has not counted yet
        self._changed, self._error = threading.Condition(), None
        threading.Thread(target=self._serve, name="tickets", daemon=True).start()

    def have(self, count: int, lists: int = 0) -> None:
        with self._changed:
            if self._error:
                raise self._error
            self._wanted = count
            if self._lacks:
                self._changed.notify_all()

    def start(self) -> int:
        with self._changed:
            self._wanted -= 1
            self._started += 1
            self._changed.notify_all()
            return self.reserve.popleft()

    def settle(self) -> None:
        with self._changed:
            self._wanted = 0
            while self._started and not self._error:
                self._changed.wait(1.0)  # a signal's handler runs in between
            if self._error:
                raise self._error

    @property
    def _lacks(self) -> int:
        return max(0, self._wanted - len(self.reserve))

    def _keep(self, drawn: list[int]) -> None:
        self.reserve.extend(drawn)

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._lacks or self._started)
                    lacks, started = self._lacks, self._started
                drawn = self._draw(lacks)
                if started:
                    self.store.add(self.counter, started)
                with self._changed:
                    self._keep(drawn)
                    self._started -= started
                    self._changed.notify_all()
        except BaseException as error:  # raised again in the main thread
            with self._changed:
                self._error = error
                self._changed.notify_all()
