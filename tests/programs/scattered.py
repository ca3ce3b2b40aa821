"""Started by test_local_disks.py: learners resume from a checkpoint whose files are spread over directories, one per rank, as
over the disks of nodes.

torchrun ... scattered.py MODEL CHECKPOINT OUT      # a line of JSON: whether the tensors are the whole's, and what is reported
"""

import json
import os
import sys
from pathlib import Path

import torch

from rl.checkpoint import manifest, resume
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import process
from rl.ranks.dist import barrier, from_main


def tensors(learner: Learner, path: Path) -> dict[str, torch.Tensor]:
    for tensor in learner.state_tensors().values():
        tensor.to_local().fill_(-1.0)
    resume._load_tensors(path, learner)
    return {name: tensor.full_tensor().clone() for name, tensor in learner.state_tensors().items()}


def main(ranks) -> None:
    model, whole, own = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]) / f"disk-{ranks.rank}" / "step_000001"
    shards = sorted(whole.glob("training/shard-*"))
    for file in [file for file in whole.rglob("*") if file.is_file()]:
        place = shards.index(file) % 2 if file in shards else 0  # ranks 0 and 1 have files, the others none
        if place == ranks.rank:
            (own / file.relative_to(whole)).parent.mkdir(parents=True, exist_ok=True)
            os.link(file, own / file.relative_to(whole))
    learner = Learner(model, LearnerArgs(), ranks, total_steps=10)
    expected, found, damage = tensors(learner, whole), tensors(learner, own), {}
    same = all(torch.equal(found[name], expected[name]) for name in expected)
    at_all = [manifest.damage_anywhere(path) for path in (whole, own)]
    victim = own / shards[1].relative_to(whole)
    for harm in ("changed", "missing"):
        if victim.exists():
            data = bytearray(victim.read_bytes())
            data[-1] ^= 1
            victim.unlink()
            if harm == "changed":
                victim.write_bytes(data)
        barrier()
        damage[harm] = manifest.damage_anywhere(own)
        assert damage[harm] == from_main(damage[harm] or ""), "all ranks report the same"
    if ranks.is_main:
        print(json.dumps({"tensors": len(expected), "same": same, "whole": at_all, "damage": damage}), flush=True)


process.run(main)
