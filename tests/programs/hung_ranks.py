"""Started by test_watchdog.py: ranks that hang on purpose, in the way that the argument names.

torchrun ... hung_ranks.py ring           two ranks: the learner takes a record, and then never one again
torchrun ... hung_ranks.py collective     three: learner 1 does not come to a collective in which learner 0 waits
torchrun ... hung_ranks.py stopped        two: the generator is stopped
torchrun ... hung_ranks.py breaking       three: as with collective, but that learner 1 ends just before learner 0's alarm
torchrun ... hung_ranks.py killed         three: as with collective, but that learner 1 is killed with generator 0's alarm
python hung_ranks.py alone                a process that gets on slowly, and then no more
"""

import itertools
import os
import signal
import sys
import time

import torch

from rl.ranks import dist, process, watchdog
from rl.split import Split, init_split

if sys.argv[1] == "ring":  # which takes seconds to import
    import numpy as np

    from rl.ranks.timers import Timers
    from rl.samples import channel
    from rl.samples.channel import Inbox, Outbox
    from rl.samples.group import Group, Response

FOREVER = 1e6


def ring(split: Split) -> None:
    timer, channel.RING_BYTES = Timers(), 1 << 20
    if split.role == "learner":
        inbox = Inbox(split)
        with timer("wait"):
            while not inbox.groups:
                inbox.receive()
        with timer("update_actor"):
            time.sleep(FOREVER)
    outbox, tokens = Outbox(split), np.zeros(20_000, np.int32)
    for ticket in itertools.count():
        if ticket < 100:  # more than the learner can have taken in when it stops
            outbox.send_group(Group(ticket, tokens, "demo", [Response(tokens, tokens.astype(np.float32), tokens, "stop")]))
        with timer("wait"):
            time.sleep(2e-3)
        outbox.flush()


def collective(split: Split) -> None:
    if split.role == "generator":
        with watchdog.doing("version 1 of the weights"):
            split.store.get("never")
    for _ in range(3):
        dist.barrier()
    if split.ranks.rank == 1:
        time.sleep(FOREVER)
    dist.barrier()


def breaking(split: Split) -> None:
    """Learner 0 loses its connection before its watchdog, which is late on purpose, reads the alarm."""
    watchdog.ANSWER_SECONDS, name = 12, f"{split.role} {split.ranks.rank}"
    raises, sign = ("learner 0", watchdog.FAILED) if sys.argv[1] == "breaking" else ("generator 0", watchdog.ALARM)
    if name != raises:
        watchdog._watchdog.timeout = FOREVER
    if name == "learner 1":
        watchdog.speaking.acquire()  # its watchdog must not answer
        watchdog._watchdog.store.wait([sign])
        os._exit(0) if sys.argv[1] == "breaking" else os.kill(os.getpid(), signal.SIGKILL)
    if name == "learner 0":
        watchdog._watchdog.tick, first_to_fail = 2, watchdog.first_to_fail
        watchdog.first_to_fail = lambda *cause: (first_to_fail(*cause), time.sleep(2))[0]
    with watchdog.doing("a collective that breaks"):
        dist.barrier() if split.role == "learner" else time.sleep(FOREVER)


def stopped(split: Split) -> None:
    watchdog.ANSWER_SECONDS = 4
    if split.role == "generator":
        os.kill(os.getpid(), signal.SIGSTOP)
    with watchdog.doing("a record in the ring"):
        time.sleep(FOREVER)


def alone(ranks: dist.Ranks) -> None:
    for i in range(8):
        print(f"{os.getpid()} got on {i} times", flush=True)
        watchdog.progress()
        time.sleep(0.5)
    with watchdog.doing("what never comes"):
        while True:
            torch.ones(1).add(1)


def together(split: Split) -> None:
    """Begin when all ranks are there. Then only a hang takes long, however busy the machine is."""
    split.store.add("here", 1)
    while split.store.add("here", 0) < split.learners + split.generators:
        time.sleep(0.05)
    watchdog._watchdog.timeout = 3
    {"ring": ring, "collective": collective, "breaking": breaking, "killed": breaking, "stopped": stopped}[sys.argv[1]](split)


if sys.argv[1] == "alone":
    process.run(alone, lambda: dist.init(2))
else:
    process.run(together, lambda: init_split(1, 180))
