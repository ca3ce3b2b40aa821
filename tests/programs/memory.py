"""Measures one learner's host memory, in bytes per parameter, at its start, in a step, a publish and saves. Prints a line of
JSON.

python tests/programs/memory.py SMALL MODEL OUT, where a learner of SMALL imports what any learner imports
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed
from transformers import AutoTokenizer

import train_sync
from rl.checkpoint import saver
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import dist, host, launch, process
from rl.split import Split
from rl.weights.publish import Publisher


def resident(word: str) -> int:
    """VmRSS (now) or VmHWM (the most since `Peak` began) of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(word))


class Peak:
    """Resident memory inside `with Peak() as peak`: peak.added is the most above the start, peak.kept the rest at the end."""

    def __enter__(self) -> "Peak":
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident("VmRSS")
        return self

    def __exit__(self, *_) -> None:
        self.added, self.kept = resident("VmHWM") - self.before, resident("VmRSS") - self.before


def step(learner: Learner) -> None:
    for parameter in learner.policy.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    learner.optimizer.step()
    learner.optimizer.zero_grad()


def main(ranks: dist.Ranks) -> None:
    small, model, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    step(Learner(small, LearnerArgs(), ranks, total_steps=10))
    tokenizer = AutoTokenizer.from_pretrained(model)
    said, peaks = [], {}
    with Peak() as peaks["start"]:
        learner = Learner(model, LearnerArgs(), ranks, total_steps=10)
    parameters = sum(p.numel() for p in learner.policy.parameters())
    with Peak() as peaks["step"]:
        step(learner)
    nodes = [launch.Node("here", 0, 2, 1)]
    split = Split("learner", ranks, 1, 1, nodes, 0, torch.distributed.HashStore(), bridge=object())
    with Peak() as peaks["publish"]:
        publisher = Publisher(learner, split, torch.float32)
        publisher.take_copy()
    job = SimpleNamespace(tokenizer=tokenizer, prompts=SimpleNamespace(prep=None))
    run = SimpleNamespace(dir=out, say=said.append)
    writer = saver.Saver(train_sync.Args(), job, run, {}, learner, None)
    available, host.available_memory = host.available_memory, lambda: 0
    for number, name in enumerate(["short", "short again", "first", "second", "last"], start=5):
        if name == "first":
            host.available_memory = available
        with Peak() as peaks[name]:
            writer.save(number, {})
            writer.wait()
        assert not writer.error, writer.error
    shares = {name: [peak.added / parameters, peak.kept / parameters] for name, peak in peaks.items()}
    print(json.dumps({"parameters": parameters, "bytes": shares, "said": said}))


if __name__ == "__main__":
    process.run(main)
