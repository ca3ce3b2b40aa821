"""Weights from the learners to all generators: versioned, streamed in buckets over the bridge, and verified.

    learner:    publisher.publish(version, step)    takes a copy and returns; a thread sends it while training continues
    generator:  subscriber.receive(version)         between two engine steps (rl/weights/subscriber.py)

Each publish ends with the learner's digest of every parameter. The generator compares it with the digest of the weights in its
engine, and stops the job if one differs: weights that were not updated are the silent fault of such systems.

Memory: a learner that sends holds one copy in the generators' precision, in host memory.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch

from rl.background import in_background
from rl.learning.learner import Learner
from rl.ranks import watchdog
from rl.ranks.device import is_accelerator, side_stream
from rl.split import Split
from rl.weights.buckets import PublishPlan, digest, read


class Publisher:
    """The learners' side. The learners that send have a copy; the others help to gather the shards."""

    def __init__(
        self, learner: Learner, split: Split, dtype: torch.dtype, announce: Callable[[int], None] = lambda version: None
    ):
        """announce: called with the version of each publish."""
        self._announce = announce
        self.split = split
        self.device = split.ranks.device
        self.learner = learner
        shapes = [list(parameter.shape) for parameter in learner.parameters.values()]
        self.plan = PublishPlan([*learner.parameters], shapes, dtype, len(learner.frozen))
        self._is_first = True
        self._sending: Future | None = None
        if split.bridge:
            self._stream = torch.empty(self.plan.offsets[-1], dtype=dtype, pin_memory=is_accelerator(self.device))
            split.store.set("weights/plan", self.plan.to_json())

    def publish(self, version: int, step: int = 0) -> None:
        """Publish the weights of that step as this version: wait until the previous publish has been sent, copy the weights,
        announce the version, and return while the copy is sent. A collective of the learners."""
        self.wait()
        if self._is_first and self.split.bridge:
            self.split.store.set("weights/first", str(version))
        self.take_copy()
        self.send(version, step)
        self._announce(version)

    def take_copy(self) -> None:
        """Copy the weights into the stream that is sent. A collective of the learners."""
        if not self._is_first:
            self.plan = self.plan.later()
        copies = self.plan.views(self._stream) if self.split.bridge else []
        for number, (_, tensor) in enumerate(self.learner.weights(self.plan.dtype, self.split.senders, self._is_first)):
            copies[number].copy_(tensor)
        self._is_first = False

    def send(self, version: int, step: int = 0) -> None:
        """Begin to send the copy, in the background."""
        if self.split.bridge:
            self._sending = in_background(partial(self._send, version, step), "publish")

    def wait(self) -> None:
        """Return when the last publish has been sent. Raise the error that stopped it, if any."""
        if self._sending:
            self._sending.result()
            self._sending = None

    def _send(self, version: int, step: int) -> None:
        bridge = self.split.bridge
        under_way = deque()

        def send(data: torch.Tensor) -> None:
            under_way.append((bridge.broadcast(data), data))
            if len(under_way) == bridge.window:
                under_way.popleft()[0].wait()
                watchdog.progress()

        with side_stream(self.device):
            digests = []
            for bucket in self.plan.buckets:
                data = bucket.of(self._stream).to(bridge.device)
                send(data)
                if bucket.ends:  # while it travels
                    first = self.plan.offsets[bucket.members.start]
                    run = data if bucket.start == first else self._stream[first:]  # of one sent in parts, the whole
                    digests += [digest(value, self.device) for value in self.plan.views(run, bucket.members)]
            send(torch.tensor([version, step, *read(digests)]).to(bridge.device))
            for work, _ in under_way:
                work.wait()
