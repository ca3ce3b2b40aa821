"""The ring between two processes, beside one memcpy of the same bytes and torch.multiprocessing.Queue, interleaved in one run.

    python benchmarks/ring.py          # writes benchmarks/results/ring.{json,md}

- memcpy: numpy copies the message into one warm shared buffer of its size, in one process, over and over. Nobody else reads.
- ring: one process puts, checksums included; the other gets each record, which verifies every byte, and releases it.
- Queue, tensor: a fresh torch tensor over the same memory each time, so that each is copied into shared memory once, as in the
  ring; the reader gets the tensor and drops it, looking at none of its bytes.
- Queue, bytes: the message as `bytes`, pickled through the queue's pipe.

The ring has room for four messages and at least 64 MiB. Writer and reader need a core each: on a busy machine all but memcpy
slow down. The ratio is the median of the rounds' ratios.
"""

import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.metrics import cpu_name  # noqa: E402
from rl.ring import Ring  # noqa: E402

SIZES = {"256 B": 256, "4 KB": 4 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
FORK = torch.multiprocessing.get_context("fork")


@dataclass
class Args:
    repeats: int = 5
    """Measurements of each; the first round is not counted."""
    total_mb: int = 512
    """Bytes that a measurement moves, if that makes between 16 and `small` messages."""
    small: int = 30_000
    """Messages of a measurement at most; a fifth of it through the queues."""
    out: Path = ROOT / "benchmarks" / "results"
    """Directory of the tables; made if missing."""


def memcpy(message: np.ndarray, count: int) -> float:
    """Seconds a message."""
    shared = torch.empty(message.size, dtype=torch.uint8).share_memory_().numpy()
    shared[:] = message
    start = time.perf_counter()
    for _ in range(count):
        np.copyto(shared, message)
    return (time.perf_counter() - start) / count


def between_processes(put, get, count: int, warm: int, at_once: int = 1) -> float:
    """Seconds a message, measured by the reader from the end of the warm-up on. `put` writes `at_once` messages."""

    done = FORK.Event()

    def write() -> None:
        for _ in range(0, warm + count, at_once):
            put()
        done.wait(600)  # the tensors' files come from this process

    writer = FORK.Process(target=write, daemon=True)
    writer.start()
    for _ in range(warm):
        get()
    start = time.perf_counter()
    for _ in range(count):
        get()
    seconds = (time.perf_counter() - start) / count
    done.set()
    writer.join()
    return seconds


def through_ring(message: np.ndarray, count: int, at_once: int = 1) -> float:
    ring = Ring.create(max(64 << 20, 5 * message.size))

    def get() -> None:
        with ring.get() as record:
            assert len(record.data) == message.size

    warm = min(1000, ring.capacity // message.size + 1)  # one lap of a large ring, so that its pages are there
    messages = [message] * at_once
    put = (lambda: ring.put(message)) if at_once == 1 else (lambda: ring.put_many(messages))
    seconds = between_processes(put, get, count, warm, at_once)
    ring.close()
    return seconds


def through_queue(message: np.ndarray, count: int, pack) -> float:
    queue = FORK.Queue(maxsize=4 if message.size >= 1 << 20 else 1000)
    seconds = between_processes(lambda: queue.put(pack(message)), queue.get, count, min(4, count))
    queue.close()
    return seconds


def measure(size: int, args: Args) -> dict[str, list[float]]:
    """Seconds a message, by side and round."""
    message = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    count = min(args.small, max(16, (args.total_mb << 20) // size))
    few = min(count, args.small // 5)
    sides = {
        "memcpy": lambda: memcpy(message, count),
        "ring": lambda: through_ring(message, count),
        **({"ring_many": lambda: through_ring(message, count, at_once=16)} if size <= 4096 else {}),
        "queue_tensor": lambda: through_queue(message, few, torch.from_numpy),
        "queue_bytes": lambda: through_queue(message, few, np.ndarray.tobytes),
    }
    rounds = [{name: side() for name, side in sides.items()} for _ in range(args.repeats + 1)][1:]
    return {name: [each[name] for each in rounds] for name in sides}


def summarise(name: str, size: int, seconds: dict[str, list[float]]) -> dict:
    row = {"message": name, "bytes": size}
    for side, values in seconds.items():
        rates = [1 / value for value in values]
        row[side] = {"per_s": statistics.median(rates), "min_per_s": min(rates), "max_per_s": max(rates)}
    ratios = [copy / ring for copy, ring in zip(seconds["memcpy"], seconds["ring"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return row | {"ring_over_memcpy": middle, "quartiles": [low, high]}


def table(rows: list[dict]) -> str:
    lines = [
        "| message | side | messages/s, median | min - max | GB/s | ring over memcpy, quartiles |",
        "|---|---|---|---|---|---|",
    ]
    sides = {"memcpy": "memcpy", "ring": "ring", "ring_many": "ring, 16 at once"}
    sides |= {"queue_tensor": "Queue, tensor", "queue_bytes": "Queue, bytes"}
    for row in rows:
        for side, name in sides.items():
            if side not in row:
                continue
            r = row[side]
            ratio = f"{row['ring_over_memcpy']:.2f}, {row['quartiles'][0]:.2f} - {row['quartiles'][1]:.2f}"
            lines.append(
                f"| {row['message']} | {name} | {r['per_s']:,.0f} | {r['min_per_s']:,.0f} - {r['max_per_s']:,.0f} "
                f"| {r['per_s'] * row['bytes'] / 1e9:.3g} | {ratio if side == 'ring' else ''} |"
            )
    return "\n".join(lines)


def main(args: Args) -> None:
    setting = {"processor": cpu_name(), "cores": os.cpu_count(), "load average before": round(os.getloadavg()[0], 2)}
    setting |= {"repeats": args.repeats, "python": platform.python_version(), "torch": torch.__version__}
    rows = [summarise(name, size, measure(size, args)) for name, size in SIZES.items()]
    setting["load average after"] = round(os.getloadavg()[0], 2)  # its own two processes make up to 2 of it
    text = table(rows)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ring.json").write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    (args.out / "ring.md").write_text(text + "\n\n" + ", ".join(f"{k} {v}" for k, v in setting.items()) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
