"""A verified publish compared with one raw broadcast of the same bytes, interleaved in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/weights/publish.py       # writes benchmarks/results/publish.{json,md}

One learner, one generator, random Qwen2 models in fp32. "raw" is one flat gloo broadcast of as many bytes; a publish goes
through shared memory. "publish" is the generator's whole time from when both sides are there until its engine runs the new
weights and they are verified; "unverified" is the same without digests. "copy" is how long the learner is kept from training.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tyro
from common import table, write
from torch.distributed import PrefixStore
from transformers import AutoModelForCausalLM, Qwen2Config

from rl.generation.embedded import TransformersEngine
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import device_groups, process
from rl.ranks.host import cpu_name
from rl.split import Split, init_split
from rl.weights import publish as of_both
from rl.weights.publish import Publisher, Subscriber

SIZES = {"1M": (128, 4, 512), "30M": (512, 8, 8192), "300M": (1280, 12, 32768)}  # hidden, layers, vocabulary
SIDES = ("raw", "publish", "unverified")


@dataclass
class Args:
    repeats: int = 9
    """Measurements of each side; the first round is not counted."""
    sizes: tuple[str, ...] = tuple(SIZES)
    """Which models."""


def save_model(name: str, path: str) -> int:
    hidden, layers, vocabulary = SIZES[name]
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return sum(p.numel() for p in model.parameters())


def measure(split: Split, path: str, parameters: int, repeats: int) -> dict[str, list[float]] | None:
    """Seconds by side, as the generator sees them (None on the learner)."""
    rendezvous, place = torch.zeros(1), int(split.role == "generator")
    raw = device_groups.host_group(PrefixStore(f"raw/{parameters}", split.store), place, 2, timedelta(minutes=10))
    flat = torch.zeros(parameters)
    seconds: dict[str, list[float]] = {side: [] for side in (*SIDES, "copy")}
    digest = of_both.digest
    if split.role == "learner":
        publisher = Publisher(Learner(path, LearnerArgs(), split.ranks, 1), split, torch.float32)
    else:
        engine = TransformersEngine(path, max_length=8)
        subscriber = Subscriber(split, engine)
    version = 0
    for repeat in range(repeats + 1):
        for side in SIDES:
            of_both.digest = (lambda tensor, device: 0) if side == "unverified" else digest
            if side != "raw" and split.role == "learner":
                started = time.perf_counter()
                publisher.take_copy()
                copied = torch.tensor([time.perf_counter() - started])
                split.bridge.broadcast(rendezvous).wait()
                publisher.send(version)
                publisher.wait()
                split.bridge.broadcast(copied).wait()
            elif side != "raw":
                split.bridge.broadcast(rendezvous).wait()
                started = time.perf_counter()
                subscriber.receive(version)
                took = time.perf_counter() - started
                copied = torch.zeros(1)
                split.bridge.broadcast(copied).wait()
            else:
                split.bridge.broadcast(rendezvous).wait()
                started = time.perf_counter()
                raw.broadcast(flat, 0).wait()
                took, copied = time.perf_counter() - started, None
            if split.role == "generator" and repeat:
                seconds[side].append(took)
                if side == "publish":
                    seconds["copy"].append(float(copied))
            version += side != "raw"
    return seconds if split.role == "generator" else None


def saved_models(sizes: Iterable[str], split: Split, folder: str) -> Iterator[tuple[str, str, int]]:
    """(size, directory, parameters) of each model, which the generator saves for both ranks and removes behind its use."""
    for name in sizes:
        path = Path(tempfile.gettempdir()) / folder / name
        if split.role == "generator":
            torch.manual_seed(0)
            split.store.set(f"saved/{name}", str(save_model(name, str(path))))
        yield name, str(path), int(split.store.get(f"saved/{name}"))
        if split.role == "generator":
            shutil.rmtree(path)


def main(args: Args, split: Split) -> None:
    results = {}
    for name, path, parameters in saved_models(args.sizes, split, "rl-benchmark-publish"):
        seconds = measure(split, path, parameters, args.repeats)
        split.store.delete_key("weights/plan")
        if seconds:
            results[name] = {"parameters": parameters, "seconds": seconds}
    if split.role == "learner":
        return
    head, rows = ["parameters", "raw broadcast", "publish", "over raw", "GB/s", "verifying", "the learner's copy"], []
    for r in results.values():
        middle = {side: statistics.median(values) for side, values in r["seconds"].items()}
        pairs = zip(r["seconds"]["publish"], r["seconds"]["unverified"], strict=True)
        share = statistics.median(with_it - without for with_it, without in pairs) / middle["publish"]
        spread = [f"{1e3 * min(v):.1f} - {1e3 * max(v):.1f}" for v in (r["seconds"]["raw"], r["seconds"]["publish"])]
        sides = [f"{1e3 * middle[side]:.1f} ms ({of})" for side, of in zip(("raw", "publish"), spread, strict=True)]
        ratio, rate = middle["publish"] / middle["raw"], 4e-9 * r["parameters"] / middle["publish"]
        rest = [f"{ratio:.2f}", f"{rate:.1f}", f"{share:.0%}", f"{1e3 * middle['copy']:.1f} ms"]
        rows.append([f"{r['parameters'] / 1e6:.1f}M", *sides, *rest])
    machine = f"{cpu_name()}, one thread a rank, {args.repeats} interleaved rounds; median (min - max)"
    write("publish", results, f"{table(head, rows)}\n\n{machine}.")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    process.run(lambda split: main(args, split), join=lambda: init_split(1))
