"""Started by test_layouts.py: a learner takes a step, or resumes from a checkpoint, and saves, on any layout of ranks.

torchrun ... reshard.py MODEL FLAGS(JSON) FROM|- OUT    OUT/step_000001 and OUT/tensors.safetensors: weights and moments, whole
"""

import json
import sys
from pathlib import Path

import torch
from helpers import save_once, whole
from safetensors.torch import save_file

import train_sync
from rl.checkpoint import resume, saver
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import process
from rl.ranks.shards import local


def main(ranks) -> None:
    model, flags, came_from, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    learner = Learner(model, LearnerArgs(**flags), ranks, total_steps=10)
    if came_from == "-":
        torch.manual_seed(ranks.rank)
        for parameter in learner.policy.parameters():
            parameter.grad = torch.empty_like(parameter)
            local(parameter.grad).normal_()
        learner.step()
    else:
        resume.load_tensors(Path(came_from), learner.state_tensors())
    state = {name: whole(tensor) for name, tensor in learner.state_tensors().items()}
    args = train_sync.Args()
    args.trust_remote_code = False  # another part of a script's flags
    error = save_once(learner, out, args, saver.Saver).error
    assert not error, error
    if ranks.is_main:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, out / "tensors.safetensors")


process.run(main)
