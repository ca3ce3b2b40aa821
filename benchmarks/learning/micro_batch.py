"""What the size of a micro-batch costs in memory and gains in speed: forward and backward of a learner.

    python benchmarks/learning/micro_batch.py    # about 10 minutes on 2 cores; writes benchmarks/results/micro_batch.{json,md}

The same tokens are cut into micro-batches of each budget, interleaved, for random Qwen2 models in fp32. Memory is what
the tensors of one micro-batch hold at their peak, counted (tools/plan/memory_count.py). The default of
--max-tokens-per-micro-batch follows from this table.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import tyro
from common import RESULTS, Rounds, over, random_model, ratios, setting, table, words, write

from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner
from rl.ranks import process
from rl.ranks.dist import Ranks
from rl.samples.group import Group, Response
from tools.plan.memory_count import MemoryCount

SIZES = {"toy": (64, 1, 32, 16), "1M": (128, 4, 64, 64), "30M": (512, 8, 8192, 256)}  # hidden, layers, vocabulary, longest


@dataclass
class Args:
    sizes: tuple[str, ...] = ("1M", "30M")
    """Which models: toy, 1M, 30M."""
    tokens: int = 16_384
    """Tokens that are cut into micro-batches."""
    budgets: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Tokens of a micro-batch."""
    rounds: int = 3
    """Measurements of each budget."""
    minutes: float = 10
    """No round of a size begins that would end later than this."""
    clock: str = "wall"
    """wall, or cpu: the processor's time, for a machine that does other things besides."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


def make_batch(vocabulary: int, longest: int, tokens: int) -> Batch:
    """Responses of a quarter to all of `longest`, each behind a prompt of its own of a quarter."""
    rng, groups, left = np.random.default_rng(0), [], tokens
    while left > 0:
        n = int(rng.integers(longest // 4, longest * 3 // 4 + 1))
        ids = rng.integers(4, vocabulary, n).astype(np.int32)
        response = Response(ids, np.zeros(n, np.float32), np.zeros(n, np.int32), "stop", score=0.0)
        groups.append(Group(len(groups), rng.integers(4, vocabulary, longest // 4).astype(np.int32), "demo", [response]))
        left -= n + longest // 4
    return Batch.of(groups)


def measure(name: str, folder: str, args: Args, ranks: Ranks) -> dict:
    hidden, layers, vocabulary, longest = SIZES[name]
    random_model(f"{folder}/{name}", hidden, layers, vocabulary)
    learner, batch = Learner(f"{folder}/{name}", LearnerArgs(), ranks, 1000), make_batch(vocabulary, longest, args.tokens)
    tokens, clock = sum(batch.total_lengths), {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    cut = {n: micro_batches(batch, torch.arange(len(batch.lengths)), n, ranks) for n in args.budgets}

    def train(micros: list) -> None:
        for micro in micros:
            log_prob = learner.forward(micro, "metric").log_prob
            (-log_prob.sum() / len(batch.token)).backward()

    rates, held = {n: [] for n in cut}, {}
    train(cut[max(args.budgets)][:1])  # the process takes the memory that it keeps, and the gradients are there
    for _ in Rounds(args.rounds, args.minutes):
        for budget, micros in cut.items():
            started = clock()
            train(micros)
            rates[budget].append(tokens / (clock() - started))
    for budget, micros in cut.items():
        with MemoryCount() as count:
            train(micros[:1])
        held[budget] = count.host.peak
    return {"tokens_per_s": rates, "bytes": held}


def main(args: Args, ranks: Ranks) -> None:
    here, results, rows = setting("transformers", threads=torch.get_num_threads(), clock=args.clock), {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.sizes:
            results[name] = r = measure(name, folder, args, ranks)
            largest = r["tokens_per_s"][max(args.budgets)]
            for budget, rates in r["tokens_per_s"].items():
                relative = over(ratios(rates, largest))
                rows.append([name, f"{budget:,}", over(rates, ",.0f"), relative, f"{r['bytes'][budget] / 1e6:,.0f}"])
    head = ["model", "tokens of a micro-batch", "tokens/s", "over the largest", "MB"]
    text = f"{table(head, rows)}\n\n{words(here)}; interleaved rounds, median (min - max)"
    write("micro_batch", {"setting": here, "sizes": results}, text, args.out)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    process.run(lambda ranks: main(args, ranks))
