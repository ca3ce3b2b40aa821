"""Two learners save a checkpoint, and the second one fails in some way.

torchrun --nproc-per-node 2 tests/programs/saves.py MODEL OUT whole|short|killed|refuses|full
"""

import os
import signal
import sys
from pathlib import Path

import safetensors.torch
from helpers import save_once

import train_sync
from rl.checkpoint import saver
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import dist, host, process


class Troubled(saver.Saver):
    def _write_shards(self, stem: Path, shards) -> None:
        trouble = sys.argv[3] if self.learner.ranks.rank == 1 else "whole"
        if trouble == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "refuses":
            raise OSError(28, "No space left on device")
        super()._write_shards(stem, shards)


def save_file(tensors: dict, file: Path, *metadata) -> None:
    """With `full`, the first learner's disk fills up in the middle of the model."""
    if sys.argv[3] == "full" and file.name == "model.safetensors":
        raise OSError(28, "No space left on device")
    safetensors.torch.save_file(tensors, file, *metadata)


def main(ranks: dist.Ranks) -> None:
    saver.save_file = save_file
    if sys.argv[3] == "short" and not ranks.is_main:
        host.available_memory = lambda: 0
    model, out = sys.argv[1], Path(sys.argv[2])
    learner = Learner(model, LearnerArgs(), ranks, total_steps=10)
    say = print if ranks.is_main else lambda _: None
    print(f"rank {ranks.rank} continued: {save_once(learner, out / 'run', train_sync.Args(), Troubled, (1, 2), say).error}")


if __name__ == "__main__":
    process.run(main)
