"""Started by test_validations.py: the script that $SCRIPT names, with validations so slow that none arrives before the learners
wait for it."""

import importlib
import os

from rl import dist, flags, process
from rl.channel import Inbox

script = importlib.import_module(os.environ["SCRIPT"])
take = Inbox.take_validations
Inbox.take_validations = lambda inbox, until=None: [] if until is None else take(inbox, until)
args = flags.parse(script.Args)
process.run(lambda split: script.main(args, split), join=lambda: dist.init_split(args.generators, args.hang_timeout))
