"""A publish of adapters by themselves compared with one of merged weights, and with one of a model that trains all of them.

    torchrun --standalone --nproc-per-node 2 benchmarks/weights/adapters.py     # writes benchmarks/results/adapters.{json,md}

One learner, one generator with the embedded engine, random Qwen2 models in fp32, rank 32 in all linear layers. Seconds are the
generator's, from when the learner begins until the engine runs the new weights and they are verified; "kept" is how long the
learner is kept from training. Adapters by themselves are measured with the log-probs that prove them and without. The first
publish, which has the model, is not counted.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tyro
from common import table, write
from weights.publish import saved_models

from rl.generation.embedded.engine import TransformersEngine
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import process
from rl.ranks.host import cpu_name
from rl.split import Split, init_split
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber

SIDES = {
    "all weights": LearnerArgs(),
    "merged": LearnerArgs(lora_rank=32),
    "adapter": LearnerArgs(lora_rank=32, publish="adapter"),
    "adapter, without log-probs": LearnerArgs(lora_rank=32, publish="adapter"),
}


@dataclass
class Args:
    repeats: int = 9
    """Measurements of each side."""
    sizes: tuple[str, ...] = ("1M", "30M")
    """Which models of publish.py."""


def ends(split: Split, path: str) -> dict[str, Publisher | Subscriber]:
    """This rank's end of each side's publish."""
    out, rendezvous = {}, torch.zeros(1)
    for side, args in SIDES.items():
        if split.role == "learner":
            out[side] = Publisher(Learner(path, args, split.ranks, 1), split, torch.float32)
        else:
            engine = TransformersEngine(path, max_length=64, adapters=args if args.publishes_adapters else None)
            out[side] = Subscriber(split, engine)
            split.store.delete_key("weights/plan")
        if "without" in side:
            leave_out_log_probs(out[side])
        split.bridge.broadcast(rendezvous).wait()
    return out


def leave_out_log_probs(end: Publisher | Subscriber) -> None:
    if isinstance(end, Subscriber):
        end._prove = lambda version, expected: None
    else:
        end._probe = partial(dict, end._probe())


def measure(split: Split, path: str, repeats: int) -> dict[str, dict] | None:
    """Bytes, seconds and what the learner is kept, by side, as the generator sees them (None on the learner)."""
    of_side, rendezvous = ends(split, path), torch.zeros(1)
    found = {side: {"bytes": 0, "seconds": [], "kept": []} for side in SIDES}
    for version in range(repeats + 1):
        for side, end in of_side.items():
            split.bridge.broadcast(rendezvous).wait()
            started = time.perf_counter()
            if split.role == "learner":
                end.publish(version)
                kept = torch.tensor([time.perf_counter() - started])
                end.wait()
                split.bridge.broadcast(kept).wait()
                continue
            end.receive(version)
            took, kept = time.perf_counter() - started, torch.zeros(1)
            split.bridge.broadcast(kept).wait()
            if version:
                found[side]["bytes"] = end.received["bytes"]
                found[side]["seconds"].append(took)
                found[side]["kept"].append(float(kept))
    return found if split.role == "generator" else None


def main(args: Args, split: Split) -> None:
    results = {}
    for name, path, parameters in saved_models(args.sizes, split, "rl-benchmark-adapters"):
        if found := measure(split, path, args.repeats):
            results[name] = {"parameters": parameters, "sides": found}
    if split.role == "learner":
        return
    rows = []
    for r in results.values():
        for side, of in r["sides"].items():
            middle, kept = (1e3 * statistics.median(of[what]) for what in ("seconds", "kept"))
            spread = f"{1e3 * min(of['seconds']):.1f} - {1e3 * max(of['seconds']):.1f}"
            what = [f"{of['bytes'] / 1e6:.1f} MB", f"{middle:.1f} ms ({spread})", f"{kept:.1f} ms"]
            rows.append([f"{r['parameters'] / 1e6:.1f}M", side, *what])
    machine = f"{cpu_name()}, one thread a rank, {args.repeats} interleaved rounds; median (min - max)"
    write("adapters", results, f"{table(['parameters', 'publish', 'bytes', 'seconds', 'kept'], rows)}\n\n{machine}.")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    process.run(lambda split: main(args, split), join=lambda: init_split(1))
