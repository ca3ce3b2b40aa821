"""The ring between two processes, compared with one memcpy, torch.multiprocessing.Queue and Ray's actor queue.

    venv-bench/bin/python benchmarks/samples/ring.py     # about 8 minutes on 2 cores; writes benchmarks/results/ring.{json,md}

- memcpy: numpy copies the message into one warm shared buffer of its size, in one process, over and over. Nobody else reads.
- ring: one process puts, checksums included; the other gets a copy of each record, which verifies every byte.
- Queue, tensor: a fresh torch tensor over the same memory each time, so that each is copied into shared memory once, as in the
  ring; the reader gets the tensor and drops it, looking at none of its bytes.
- Queue, bytes: the message as `bytes`, pickled through the queue's pipe.
- Ray, value: a numpy array through ray.util.queue.Queue, an actor, which is how verl's samples travel; the reader gets an
  array and looks at none of its bytes. A Ray task writes.
- Ray, reference: the same with the array put into Ray's shared memory first, and only its reference in the queue.
Ray's sides are left out, with a message, where Ray is not installed (requirements-bench.txt).

The ring has room for four messages and at least 64 MiB. Writer and reader need a core each: on a busy machine all but memcpy
slow down. The sides take turns within a round; ratios are medians of the rounds' ratios.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.multiprocessing
import tyro
from common import RESULTS, setting, table, words, write

from rl.transport.ring import Ring

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
    ray_messages: int = 400
    """Messages of a measurement through Ray at most."""
    sizes: tuple[str, ...] = tuple(SIZES)
    """Which messages."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


def memcpy(message: np.ndarray, count: int) -> float:
    """Seconds a message."""
    shared = torch.empty(message.size, dtype=torch.uint8).share_memory_().numpy()
    shared[:] = message
    start = time.perf_counter()
    for _ in range(count):
        np.copyto(shared, message)
    return (time.perf_counter() - start) / count


def between_processes(put, get, count: int, warm: int) -> float:
    """Seconds a message, measured by the reader from the end of the warm-up on."""
    done = FORK.Event()

    def write() -> None:
        for _ in range(warm + count):
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


def through_ring(message: np.ndarray, count: int) -> float:
    ring = Ring.create(max(64 << 20, 5 * message.size))

    def get() -> None:
        assert len(ring.get()) == message.size

    warm = min(1000, ring.capacity // message.size + 1)  # one lap of a large ring, so that its pages are there
    seconds = between_processes(lambda: ring.put(message), get, count, warm)
    ring.close()
    return seconds


def through_queue(message: np.ndarray, count: int, pack) -> float:
    queue = FORK.Queue(maxsize=4 if message.size >= 1 << 20 else 1000)
    seconds = between_processes(lambda: queue.put(pack(message)), queue.get, count, min(4, count))
    queue.close()
    return seconds


def through_ray(size: int, count: int) -> dict[str, float]:
    """Seconds a message by value and by reference, from a process of its own: Ray's threads and our forks do not mix."""
    command = [sys.executable, __file__, "--ray", str(size), str(count)]
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=600).stdout
    return json.loads(out.splitlines()[-1])


def ray_side(size: int, count: int) -> dict[str, float]:
    import ray
    from ray.util.queue import Queue

    ray.init(num_cpus=4, object_store_memory=2 << 30, include_dashboard=False, logging_level="error", log_to_driver=False)

    @ray.remote
    def write_all(queue, messages: int, by_reference: bool) -> None:
        message = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        for _ in range(messages):
            queue.put([ray.put(message)] if by_reference else message)

    seconds = {}
    for name, by_reference in (("ray_value", False), ("ray_reference", True)):
        queue, warm = Queue(maxsize=4 if size >= 1 << 20 else 1000), min(4, count)
        writer = write_all.remote(queue, warm + count, by_reference)
        for number in range(warm + count):
            if number == warm:
                start = time.perf_counter()
            item = queue.get()
            data = ray.get(item[0]) if by_reference else item
            assert len(data) == size
        seconds[name] = (time.perf_counter() - start) / count
        ray.get(writer)
        queue.shutdown()
    ray.shutdown()
    return seconds


def measure(size: int, args: Args, with_ray: bool) -> dict[str, list[float]]:
    """Seconds a message, by side and round."""
    message = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    count = min(args.small, max(16, (args.total_mb << 20) // size))
    few = min(count, args.small // 5)
    sides = {
        "memcpy": lambda: memcpy(message, count),
        "ring": lambda: through_ring(message, count),
        "queue_tensor": lambda: through_queue(message, few, torch.from_numpy),
        "queue_bytes": lambda: through_queue(message, few, np.ndarray.tobytes),
    }
    rounds = []
    for _ in range(args.repeats + 1):
        rounds.append({name: side() for name, side in sides.items()})
        rounds[-1] |= through_ray(size, min(few, args.ray_messages)) if with_ray else {}
    return {name: [each[name] for each in rounds[1:]] for name in rounds[0]}


def summarise(name: str, size: int, seconds: dict[str, list[float]]) -> dict:
    row = {"message": name, "bytes": size}
    for side, values in seconds.items():
        rates = [1 / value for value in values]
        row[side] = {"per_s": statistics.median(rates), "min_per_s": min(rates), "max_per_s": max(rates)}
        times = [other / ring for other, ring in zip(values, seconds["ring"], strict=True)]
        low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        row[side] |= {"ring_over_it": middle, "quartiles": [low, high]}
    return row | {"ring_over_memcpy": row["memcpy"]["ring_over_it"], "quartiles": row["memcpy"]["quartiles"]}


SIDES = {"memcpy": "memcpy", "ring": "ring"}
SIDES |= {"queue_tensor": "Queue, tensor", "queue_bytes": "Queue, bytes"}
SIDES |= {"ray_value": "Ray, value", "ray_reference": "Ray, reference"}


def lines(rows: list[dict]) -> list[list[str]]:
    out = []
    for row in rows:
        for side in [side for side in SIDES if side in row]:
            r = row[side]
            ratio = f"{r['ring_over_it']:.3g}, {r['quartiles'][0]:.3g} - {r['quartiles'][1]:.3g}"
            spread = f"{r['min_per_s']:,.0f} - {r['max_per_s']:,.0f}"
            rate = [f"{r['per_s']:,.0f}", spread, f"{r['per_s'] * row['bytes'] / 1e9:.3g}"]
            out.append([row["message"], SIDES[side], *rate, "" if side == "ring" else ratio])
    return out


def main(args: Args) -> None:
    with_ray = importlib.util.find_spec("ray") is not None
    if not with_ray:
        print("Ray is not installed (requirements-bench.txt): its rows are left out.", flush=True)
    here = setting(*(["ray"] if with_ray else []), repeats=args.repeats)
    rows = []
    for name in args.sizes:
        rows.append(summarise(name, SIZES[name], measure(SIZES[name], args, with_ray)))
        print(f"{name}: the ring at {rows[-1]['ring_over_memcpy']:.2f} of memcpy", flush=True)
    here["load average after"] = round(os.getloadavg()[0], 2)  # its own two processes make up to 2 of it
    head = ["message", "side", "messages/s, median", "min - max", "GB/s", "ring over it, quartiles"]
    write("ring", {"setting": here, "rows": rows}, f"{table(head, lines(rows))}\n\n{words(here)}", args.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ray"]:
        print(json.dumps(ray_side(*map(int, sys.argv[2:]))))
    else:
        main(tyro.cli(Args, description=__doc__))
