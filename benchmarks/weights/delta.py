"""Publishes of what has changed compared with whole ones, in bfloat16, between real optimizer steps.

    torchrun --standalone --nproc-per-node 2 benchmarks/weights/delta.py         # writes benchmarks/results/delta.{json,md}

One learner, one generator, random Qwen2 models. A step is a policy gradient on random tokens and AdamW in fp32, by our
learner; each step's weights are published twice, whole and as changes, to an engine each. What a publish takes is the
generator's time, from when both sides are there until the verified weights are in place; finding what has changed is in it.
"""

import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import tyro
from common import table, write
from weights.publish import save_model

from rl.generation.embedded.engine import TransformersEngine
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner, LearnerArgs
from rl.ranks import process
from rl.ranks.host import cpu_name
from rl.samples.group import Group, Response
from rl.split import Split, init_split
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber

SIDES = ("full", "delta")


@dataclass
class Args:
    steps: int = 8
    """Optimizer steps of each run; publishes before the third are not counted."""
    rates: tuple[float, ...] = (1e-6, 1e-5)
    """Learning rates."""
    sizes: tuple[str, ...] = ("1M", "30M")
    """Which models: 1M, 30M, 300M."""


def random_batch(vocabulary: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(2, vocabulary, 48, np.int32) for _ in range(8)]
    responses = [
        Response(row, np.zeros(48, np.float32), np.zeros(48, np.int32), "stop", float(i % 2)) for i, row in enumerate(ids)
    ]
    return Batch.of([Group(0, rng.integers(2, vocabulary, 16, np.int32), "random", responses)])


def one_step(learner: Learner, step: int) -> None:
    batch = random_batch(learner.config.vocab_size, step)
    for micro in micro_batches(batch, torch.arange(len(batch.lengths)), 8192, learner.ranks):
        log_prob, _ = learner.log_probs(micro)
        advantage = 2 * batch.score[batch.seq[micro.index]] - 1
        (-(advantage * log_prob).mean()).backward()
    learner.step()


def measure(split: Split, path: str, rate: float, steps: int) -> dict[str, list[dict]] | None:
    """What each publish took and sent, by side; None on the learner."""
    rendezvous, ends, found = torch.zeros(1), {}, {side: [] for side in SIDES}
    if split.role == "learner":
        learner = Learner(path, LearnerArgs(lr=rate, lr_warmup_steps=0), split.ranks, 10**6)
    for side in SIDES:
        own = replace(split, store=torch.distributed.PrefixStore(f"{path} {rate} {side}", split.store))
        if split.role == "learner":
            ends[side] = Publisher(learner, own, torch.bfloat16, side)
        else:
            ends[side] = Subscriber(own, TransformersEngine(path, max_length=8, dtype=torch.bfloat16))
    for version in range(steps):
        if split.role == "learner" and version:
            one_step(learner, version)
        for side in SIDES:
            if split.role == "learner":
                ends[side].take_copy()
            split.bridge.broadcast(rendezvous).wait()
            started = time.perf_counter()
            if split.role == "learner":
                ends[side].send(version)
                ends[side].wait()
            else:
                ends[side].receive(version)
                found[side].append({"seconds": time.perf_counter() - started} | ends[side].received)
    return found if split.role == "generator" else None


def main(args: Args, split: Split) -> None:
    results, rows, folder = {}, [], Path(tempfile.gettempdir()) / "rl-benchmark-delta"
    for name in args.sizes:
        path = folder / name
        if split.role == "generator":
            torch.manual_seed(0)
            split.store.set(f"saved/{name}", str(save_model(name, str(path))))
        parameters = int(split.store.get(f"saved/{name}"))
        for rate in args.rates:
            if found := measure(split, str(path), rate, args.steps):
                results[f"{name}, {rate:g}"] = {"parameters": parameters, **found}
                median = lambda side, key, of=found: statistics.median(one[key] for one in of[side][2:])  # noqa: E731
                sent = [f"{median(side, 'bytes') / 1e6:.2f} MB" for side in SIDES]
                took = [f"{1e3 * median(side, 'seconds'):.1f} ms" for side in SIDES]
                changed = f"{median('delta', 'changed'):.2%}"
                rows.append([f"{parameters / 1e6:.1f}M", f"{rate:g}", changed, *sent, *took])
        if split.role == "generator":
            shutil.rmtree(path)
    if split.role == "generator":
        head = ["parameters", "lr", "changed a step", "whole", "changes", "whole takes", "changes take"]
        machine = f"{cpu_name()}, one thread a rank, gloo inside the machine, {args.steps - 2} publishes; medians"
        write("delta", results, f"{table(head, rows)}\n\n{machine}.")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    process.run(lambda split: main(args, split), join=lambda: init_split(1))
