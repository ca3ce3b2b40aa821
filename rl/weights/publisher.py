"""Weights from the learners to all generators: versioned, streamed in buckets over the bridge, and verified.

    learner:    publisher.publish(version, step)    takes a copy and returns; a thread sends it while training continues
    generator:  subscriber.receive(version)         between two engine steps (rl/weights/subscriber.py)

Each publish ends with the learner's digest of every parameter. The generator compares it with the digest of what its engine
now computes with, and stops the job where one differs: weights that were not updated are the silent fault of such systems.

Memory: a learner that sends holds one copy in the generators' precision, in host memory.
"""

import threading
from collections import deque
from collections.abc import Callable

import torch

from rl.learning.learner import Learner
from rl.ranks import watchdog
from rl.ranks.device import is_accelerator, side_stream
from rl.split import Split
from rl.weights.buckets import Plan
from rl.weights.digests import Digests


class Publisher:
    """The learners' side. Those that send have a copy; the others take part in gathering the shards."""

    def __init__(
        self,
        learner: Learner,
        split: Split,
        dtype: torch.dtype,
        announce: Callable[[int, int], None] = lambda version, step: None,
    ):
        """announce: lets the generators know of each publish, by its version and its step."""
        self._announce = announce
        self.split, self.device = split, split.ranks.device
        outgoing = learner.outgoing()
        names, shapes = zip(*outgoing.shapes.items(), strict=True)
        self.plan = Plan(list(names), list(shapes), dtype, len(outgoing.frozen), outgoing.apart)
        self._tensors, self._probe = outgoing.tensors, None
        self._expected: list[int] = []  # what an engine must compute with adapters of this version
        if outgoing.apart:
            from rl.weights.adapter_probe import AdapterProbe  # late: no other run needs it

            self._probe = AdapterProbe(learner)
        self._is_first = True
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if split.bridge:
            self._stream = self._new_stream()
            split.store.set("weights/plan", self.plan.to_json())

    def publish(self, version: int, step: int = 0) -> None:
        """Publishes the weights of that step as this version: waits until the publish before has been received, copies the
        weights (all learners together), announces the version, and returns. What then goes over the bridge is the copy."""
        self.wait()
        if self._is_first and self.split.bridge:
            self.split.store.set("weights/first", str(version))
        self.take_copy()
        if self._probe:
            from rl.weights.adapter_proof import packed  # late: no other run needs it

            self._expected = packed(self._probe())
        self.send(version)
        self._announce(version, step)

    def take_copy(self) -> None:
        """Copies the weights into the stream that is sent. A collective of the learners."""
        if not self._is_first:
            size, self.plan = self.plan.offsets[-1], self.plan.later()
            if self.plan.adapters and self.split.bridge and self.plan.offsets[-1] < size:
                self._stream = self._new_stream()  # lets go of the model, which has been sent
        copies = self.plan.views(self._stream, range(len(self.plan.names))) if self.split.bridge else []
        for number, (_, tensor) in enumerate(self._tensors(self.plan.dtype, self.split.senders, self._is_first)):
            copies[number].copy_(tensor)
        self._is_first = False

    def _new_stream(self) -> torch.Tensor:
        return torch.empty(self.plan.offsets[-1], dtype=self.plan.dtype, pin_memory=is_accelerator(self.device))

    def send(self, version: int) -> None:
        """Begins to send the copy, in the background."""
        if self.split.bridge:
            self._thread = threading.Thread(target=self._send, args=(version,), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Returns when the generators have what was published; raises what went wrong with it."""
        if self._thread:
            with watchdog.doing("the generators to take the weights"):
                self._thread.join()
            self._thread = None
        if self._error:
            raise self._error

    def _send(self, version: int) -> None:
        try:
            with side_stream(self.device):
                self._broadcast(version)
        except BaseException as error:  # raised again in the main thread
            self._error = error

    def _broadcast(self, version: int) -> None:
        bridge, plan = self.split.bridge, self.plan
        under_way = deque()

        def send(data: torch.Tensor) -> None:
            under_way.append((bridge.broadcast(data), data))
            if len(under_way) == bridge.window:
                under_way.popleft()[0].wait()
                watchdog.progress()

        digests = Digests(plan, self.device)
        for bucket in plan.buckets:
            data = bucket.of(self._stream).to(bridge.device)
            send(data)
            digests.add(bucket, data.to(self.device))  # while it travels
        send(torch.tensor([version, *digests.values(), *self._expected]).to(bridge.device))
        for work, _ in under_way:
            work.wait()
