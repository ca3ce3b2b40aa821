"""Started by test_plan_memory.py: counts the first learner's peak memory on a CPU, with real tensors or with fake ones.

torchrun ... plan_memory.py MODEL real JSON           # the learner's flags
python plan_memory.py MODEL fake JSON RANKS

The first learner prints a line of JSON: bytes by cause, and on real tensors what the process has taken while it learned.
"""

import contextlib
import dataclasses
import json
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
from helpers import make_group
from memory import Peak
from tiny_vlm import prompts_by_number
from torch._C._distributed_c10d import FakeWork
from torch.distributed import Work
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.utils._pytree import tree_leaves, tree_map_only

import train_sync
from rl import parts
from rl.learning import placement
from rl.learning.batch import Batch, Division
from rl.model.pretrained import load_config
from rl.ranks import dist
from rl.ranks.dist import Ranks
from rl.ranks.timers import Timers
from rl.setup import make_learner
from tools.plan import dry_run
from tools.plan.fake_device import FakeDevice, start
from tools.plan.images import PlannedImages
from tools.plan.memory_count import MemoryCount


class SteadyCount(MemoryCount):
    """Counts what the learner itself holds, as it would on fake tensors. gloo makes buffers of its own, and its threads keep a
    collective's tensors until they get to run again after its end: the peak would depend on when that is. So each collective is
    over at once, and is given copies, which are not counted."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "c10d":
            return super().__torch_dispatch__(func, types, args, kwargs)
        copies = tree_map_only(torch.Tensor, torch.clone, args)
        out = func(*copies, **(kwargs or {}))
        Work.unbox(tree_leaves(out)[-1]).wait()
        for tensor, copy in zip(tree_leaves(args), tree_leaves(copies), strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(copy)
        over = FakeWork().boxed()
        return (args[0], over) if isinstance(out, tuple) else over  # the first argument is what a collective fills


def allocate_fakes(mode: FakeDevice) -> None:
    """Has the buffers that FSDP makes on the device, here a CPU, be fake: a real one would get a fake next to it."""
    allocate = DefaultAllocMixin.allocate

    def allocate_fake(*args, **kwargs):
        with mode.host_too():
            return allocate(*args, **kwargs)

    DefaultAllocMixin.allocate = allocate_fake


def main(place: Ranks, path: str, fake: bool, flags: dict) -> None:
    lengths, prompt, with_images = flags.pop("lengths"), flags.pop("prompt"), flags.pop("images", False)
    assert place.mesh.size() == place.world_size  # of real numbers: before anything is fake
    config = load_config(path)
    placement.check_policy = lambda *_: None  # of values
    if fake:
        placement.open_weights = dry_run._unread
    args = parts.make(train_sync.Args, model=path, rollout_n=len(lengths), train_batch_size=2, ppo_mini_batch_size=1, **flags)
    groups, images = [make_group(ticket, lengths, prompt) for ticket in range(2)], []
    if with_images:
        for number, (ids, of_prompt) in enumerate(prompts_by_number(path, len(groups))):
            groups[number] = dataclasses.replace(groups[number], prompt_ids=np.array(ids, np.int32))
            images.append(of_prompt)
    count = (MemoryCount if fake else SteadyCount)(config.get_text_config().vocab_size, set())
    with FakeDevice() if fake else contextlib.nullcontext() as mode, count:
        if fake:
            allocate_fakes(mode)
        with mode.host_too() if fake else contextlib.nullcontext():
            learner = make_learner(args, SimpleNamespace(path=path, total_steps=10), place)
        batch = Batch.of(groups, Division.of(args, learner))
        batch.images = PlannedImages(images) if images else None
        count.host.peak, count.host.at_peak = 0, Counter()
        with Peak() as peak:
            before = count.host.live.total()
            train_sync.learn(args, learner, batch, Timers())
    added = count.host.peak - before
    if place.is_main:
        print(json.dumps({"causes": count.host.at_peak, "kept": +count.host.live, "added": added, "resident": peak.added}))


if __name__ == "__main__":
    path, how, flags, *ranks = sys.argv[1:]
    is_fake = how == "fake"
    place = dataclasses.replace(start(int(ranks[0])), device=torch.device("cpu")) if is_fake else dist.init()
    main(place, path, is_fake, json.loads(flags))
