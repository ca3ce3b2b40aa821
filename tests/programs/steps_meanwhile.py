"""Started under torchrun by test_arrival.py: train_async.py, with a log of each generator's engine steps.

    torchrun ... steps_meanwhile.py OUT FLAGS ...      writes OUT/<generator>.json

With --rollout-tp 2 two ranks have the same engine each, and stay in step as those that share one must: what one rank does
otherwise than the other is seen in their responses.
"""

import dataclasses
import json
import sys
from pathlib import Path

import train_async
from rl import flags
from rl.generation import generator
from rl.generation.embedded.engine import TransformersEngine
from rl.ranks import process
from rl.split import Split, init_split
from rl.weights.subscriber import Subscriber

out = Path(sys.argv.pop(1))
steps, responses, announced = [], [], -1  # of each step: the engine's version, and the newest that was announced by then


def effective_state(self, state, busy, real=Subscriber.effective_state):
    global announced
    announced = state.version
    return real(self, state, busy)


def step(self, real=TransformersEngine.step):
    steps.append((self.version, announced))
    outputs = real(self)
    responses.extend((output.id, output.token_ids, output.versions) for output in outputs)
    return outputs


def main(split: Split) -> None:
    train_async.main(args, split)
    if split.role == "generator":
        (out / f"{split.ranks.rank}.json").write_text(json.dumps({"steps": steps, "responses": responses}))


Subscriber.effective_state, TransformersEngine.step = effective_state, step
make_engine = generator.make_engine
generator.make_engine = lambda path, args, *how: make_engine(path, dataclasses.replace(args, rollout_tp=1), *how)
args = flags.parse(train_async.Args, "")
process.run(main, join=lambda: init_split(args.schedule.split.generators, args.hang_timeout))
