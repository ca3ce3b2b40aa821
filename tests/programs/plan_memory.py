"""Started by test_plan_memory.py: what one learner holds at its peak on a CPU, counted on real tensors or on fake ones.

python plan_memory.py MODEL real|fake JSON      # the learner's flags

Prints a line of JSON: bytes by cause, and on real tensors what the process has taken while it learned.
"""

import contextlib
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from helpers import make_group
from programs.memory import Peak

import train_sync
from rl import learner as learner_module
from rl.batch import Batch
from rl.kl_control import KLControl
from rl.learner import Learner
from rl.plan import dry_run
from rl.plan.fake_device import FakeDevice, start
from rl.plan.memory_count import MemoryCount
from rl.pretrained import load_config
from rl.timers import Timers


def main(path: str, fake: bool, flags: dict) -> None:
    lengths, prompt = flags.pop("lengths"), flags.pop("prompt")
    place = dataclasses.replace(start(), device=torch.device("cpu"))
    assert place.mesh.size() == 1  # of real numbers: before anything is fake
    config = load_config(path)
    learner_module.check_policy = lambda *_: None  # of values
    if fake:
        learner_module.open_weights = dry_run._unread
    args = train_sync.Args(model=path, rollout_n=len(lengths), train_batch_size=2, ppo_mini_batch_size=1, **flags)
    batch = Batch.of([make_group(ticket, lengths, prompt) for ticket in range(2)])
    count = MemoryCount(config.vocab_size, set())
    with FakeDevice() if fake else contextlib.nullcontext() as mode, count:
        with mode.host_too() if fake else contextlib.nullcontext():
            learner = Learner(path, args, place, 10, with_reference=args.needs_reference)
        count.host.peak, count.host.at_peak = 0, Counter()
        with Peak() as peak:
            before = count.host.live.total()
            train_sync.learn(args, learner, KLControl(args), batch, Timers())
    added = count.host.peak - before
    print(json.dumps({"causes": count.host.at_peak, "kept": +count.host.live, "added": added, "resident": peak.added}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "fake", json.loads(sys.argv[3]))
