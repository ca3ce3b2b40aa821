"""Started by test_validations.py: runs the script that $SCRIPT names with falling validation accuracies: 1, 0.9, 0.8, ... The
validations are so slow that none arrives before the learners wait for it."""

import importlib
import os

from rl import flags, split, training_run
from rl.ranks import dist, process
from rl.samples.channel import Inbox

script = importlib.import_module(os.environ["SCRIPT"])
take, metrics, calls = Inbox.take_validations, training_run.validation_metrics, 0


def worse(rows: list[dict]) -> dict[str, float]:
    global calls
    calls += 1
    return {name: (11 - calls) / 10 if "/acc/" in name else value for name, value in metrics(rows).items()}


Inbox.take_validations = lambda inbox, until=None: [] if until is None else take(inbox, until)
training_run.validation_metrics = worse
args = flags.parse(script.Args)
process.run(lambda job: script.main(args, job), join=lambda: (split if args.schedule.split else dist).join(args))
