"""Started under torchrun by test_split.py: train_async.py with something added, named by $ROUGH.

slow: both roles take their time; slow-decoding: the generators more than the learners. learner, generator: that role raises
after some steps; killed-...: it is killed; hung-learner: it trains no more.
"""

import os
import random
import signal
import sys
import time

import tyro

import train_async
from rl import dist, watchdog
from rl.generator import Generator

how, calls = os.environ["ROUGH"], 0
learn, poll = train_async.learn, Generator.poll


def strike(who: str, after: int) -> None:
    global calls
    calls += 1
    if how.endswith(who) and calls == after:
        print(f"struck at {time.time()}", flush=True)
        if how.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how.startswith("hung"):
            watchdog._watchdog.timeout = 3  # only now: nothing before may depend on how busy the machine is
            time.sleep(1e6)
        raise RuntimeError(f"the {who} has had enough")


def rough_learn(*arguments):
    strike("learner", 4)
    if how.startswith("slow"):
        time.sleep(random.uniform(0, 0.2))
    return learn(*arguments)


def rough_poll(*arguments, **keywords):
    strike("generator", 60)
    if how.startswith("slow"):
        time.sleep(random.uniform(0, 0.04 if how == "slow" else 0.12))
    return poll(*arguments, **keywords)


train_async.learn, Generator.poll = rough_learn, rough_poll
args = tyro.cli(train_async.Args, args=sys.argv[1:])
dist.run(lambda split: train_async.main(args, split), join=lambda: dist.init_split(args.generators, args.hang_timeout))
