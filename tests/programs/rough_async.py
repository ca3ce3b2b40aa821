"""Started under torchrun by test_split.py: train_async.py with an addition that $ROUGH names.

slow: both roles take their time, and the first batch is not trained before all that may start has started, so that some of it
gets old; slow-decoding: the generators take more of it, and once wait amid responses for the publish. learner: it raises after
some steps.
"""

import os
import random
import time

import train_async
from rl import flags
from rl.generation.generator import Generator
from rl.ranks import process
from rl.samples.channel import ControlBlock
from rl.samples.tickets import started
from rl.split import init_split

how, updates = os.environ["ROUGH"], 0
learn, score, init = train_async.learn, Generator.score, ControlBlock.__init__
control, finished = None, 0


def wait_until(done) -> None:
    """Wait for a while only: a test's outcome may not depend on which side is faster."""
    give_up = time.monotonic() + 30
    while not done() and time.monotonic() < give_up:
        time.sleep(0.01)


def rough_init(self, split):
    global control
    control = self
    init(self, split)


def rough_learn(*arguments):
    global updates
    updates += 1
    if how == "learner" and updates == 4:
        raise RuntimeError("the learner has had enough")
    if how == "slow" and updates == 1:
        wait_until(lambda: started(control.store) >= args.schedule.quota(0))
    if how.startswith("slow"):
        time.sleep(random.uniform(0, 0.2))
    return learn(*arguments)


def rough_score(generator, *arguments, **keywords):
    global finished
    amid = any(output.token_ids for output in generator.engine.unfinished())
    if how == "slow-decoding" and finished >= args.schedule.prompts_per_step * args.schedule.publish_every and amid:
        wait_until(lambda: control.read().version > generator.engine.version)  # the learners have what they need for it
        finished = -1000
    if how.startswith("slow"):
        time.sleep(random.uniform(0, 0.04 if how == "slow" else 0.12))
    done = score(generator, *arguments, **keywords)
    finished += len(done)
    return done


train_async.learn, Generator.score, ControlBlock.__init__ = rough_learn, rough_score, rough_init
args = flags.parse(train_async.Args)
process.run(lambda split: train_async.main(args, split), join=lambda: init_split(args.schedule.generators, args.hang_timeout))
