"""What a learner spends on a step's tokens outside of the model, by size: nanoseconds and bytes a token, on one core.

    python benchmarks/learning/bookkeeping.py
    python benchmarks/learning/bookkeeping.py --sizes "64 x 16 x 200"

Each size is a process of its own, or eight under torchrun that share the batch. Counted are the
batch and what is computed on it: the records that it is made of are there before. Nanoseconds and bytes are by token of the
whole batch, those of eight of the learner that has most. The log-probs are random; a token-level correction is on, so that
everything is computed; "forward alone" makes the tokens' indices, too, which micro-batches have anyway. malloc is left as it
is, as on an accelerator's host: on a CPU, where freed memory stays (rl/ranks/device.py), it takes less time and more
memory.
"""

import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import tyro
from common import RESULTS, ROOT, setting, table, words, write

import losses
import train_sync
from rl import parts
from rl.algorithm import whole_batch
from rl.algorithm.metrics import batch_metrics, rollout_metrics
from rl.algorithm.staleness import staleness_metrics
from rl.algorithm.whole_batch import correct_rollout, forward_only
from rl.learning.batch import Batch, Division, tokens_of
from rl.ranks import process
from rl.ranks.dist import Ranks
from rl.samples.group import Group, Response, all_gather_groups

SIZES = ("8 x 8 x 1000", "64 x 16 x 1000", "512 x 16 x 1250", "1024 x 16 x 2000")
PARTS = (
    "Batch.of",
    "rollout correction",
    "rewards, advantages",
    "forward alone",
    "denominator",
    "rollout_metrics",
    "batch_metrics",
    "staleness",
)


@dataclass
class Args:
    sizes: tuple[str, ...] = SIZES
    """Prompts x responses x mean tokens of a response."""
    rounds: int = 5
    """Repetitions of each size; the median counts."""
    learners: tuple[int, ...] = (1, 8)
    """Over how many the batch is divided."""
    alone: str | None = None
    """Measure this size in this process, or as one rank of torchrun's, and print it as JSON."""
    out: Path = RESULTS
    """Directory for bookkeeping.json and bookkeeping.md."""


@dataclass
class Micro:
    """In the place of a micro-batch, none of which is made."""

    batch: Batch
    responses: torch.Tensor

    @property
    def index(self) -> torch.Tensor:
        return tokens_of(self.batch, self.responses)


def make_groups(prompts: int, n: int, length: int) -> list[Group]:
    rng, groups = np.random.default_rng(0), []
    for ticket in range(prompts):
        responses = []
        for size in rng.integers(length // 2, 3 * length // 2, n):
            ids, log_probs = rng.integers(0, 150_000, size, np.int32), -rng.standard_exponential(size, np.float32)
            responses.append(Response(ids, log_probs, np.full(size, ticket % 3, np.int32), "stop", float(rng.integers(0, 2))))
        groups.append(Group(ticket, rng.integers(0, 150_000, 100, np.int32), "demo", responses))
    return groups


def memory(name: str) -> int:
    """Bytes by /proc/self/status: VmRSS, resident now, or VmHWM, the most since the last call for VmRSS."""
    if name == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


def shared_groups(size: str, ranks: Ranks) -> list[Group]:
    """The same on every rank: the first makes them and sends them."""
    groups = make_groups(*map(int, size.split(" x "))) if ranks.is_main else []
    return groups if ranks.world_size == 1 else all_gather_groups(groups)


def measure(size: str, rounds: int, ranks: Ranks) -> dict:
    torch.set_num_threads(1)
    args = parts.make(train_sync.Args, rollout_is="token")
    groups, few = shared_groups(size, ranks), shared_groups("8 x 8 x 10", ranks)
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}  # of CPU time: other work on the machine does not count

    def timed(part: str, act: Callable):
        started = time.process_time()
        result = act()
        seconds[part].append(time.process_time() - started)
        return result

    def make_batch(groups: list[Group]) -> Batch:
        return Batch.of(groups, division)

    def rewards_and_advantages(batch: Batch) -> None:
        batch.targets.reward = whole_batch.token_reward(batch)
        batch.targets.advantage = whole_batch.advantage(losses.ADVANTAGES["grpo"], batch)

    def planned(batch: Batch) -> list[list[Micro]]:
        of_all = (batch.total_lengths, batch.prompt_lengths, batch.group, batch.flat)
        minis = batch.mini_batches(args.schedule.prompts_per_update)
        plans = ((mini, division.micros(*of_all, mini)[ranks.data_rank]) for mini in minis)
        return [[Micro(batch, mini[part]) for part in plan] for mini, plan in plans]

    def denominator(batch: Batch) -> float:
        return whole_batch.denominator(batch, torch.arange(len(batch.lengths)), "token-mean", 1)

    before = 0
    for number in range(-1, rounds):
        if number == 0:  # the round before is there to load the code
            before = memory("VmRSS")
            seconds = {part: [] for part in PARTS}
        division = Division(
            args.schedule.prompts_per_update, args.learner.max_tokens_per_micro_batch, ranks, args.packs_flat_apart
        )
        batch = timed("Batch.of", functools.partial(make_batch, few if number < 0 else groups))
        batch.targets.actor_log_prob = batch.rollout_log_prob * 1.001
        batch.targets.old_log_prob = batch.targets.actor_log_prob
        targets = batch.targets
        correct = functools.partial(correct_rollout, args.correction, batch)
        targets.is_weight, targets.rejected = timed("rollout correction", correct)
        timed("rewards, advantages", lambda batch=batch: rewards_and_advantages(batch))
        mark = functools.partial(forward_only, batch, planned(batch))
        timed("forward alone", mark)
        timed("denominator", lambda batch=batch: denominator(batch))
        timed("rollout_metrics", lambda batch=batch: rollout_metrics(args.correction, batch))
        timed("batch_metrics", lambda batch=batch: batch_metrics(batch))
        timed("staleness", lambda batch=batch: staleness_metrics(batch, 3))
        tokens, own = int(batch.lengths.sum()), len(batch.token)
        del batch, targets, correct, mark
    peak = memory("VmHWM") - before
    return {
        "tokens": tokens,
        "own": own,
        "ns": {p: 1e9 * statistics.median(s) / tokens for p, s in seconds.items()},
        "bytes": peak / tokens,
    }


def main(args: Args) -> None:
    if args.alone:
        process.run(lambda ranks: print(json.dumps(measure(args.alone, args.rounds, ranks)), flush=True))
        return
    here, results = setting(threads=1), {}
    for size, learners in itertools.product(args.sizes, args.learners):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(learners)] if learners > 1 else []
        command = [sys.executable, *torchrun, __file__, "--alone", size, "--rounds", str(args.rounds)]
        env = os.environ | {"MALLOC_ARENA_TEST": "8"}  # glibc's own number
        out = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout
        of_ranks = [json.loads(line) for line in out.splitlines()]
        name = size if learners == 1 else f"{size}, one of {learners}"
        results[name] = max(of_ranks, key=lambda r: r["own"])
    rows = []
    for size, r in results.items():
        parts = [f"{r['ns'][part]:.1f}" for part in PARTS]
        rows.append([size, f"{r['tokens']:,}", *parts, f"{sum(r['ns'].values()):.0f}", f"{r['bytes']:.0f}"])
    head = [
        "a step's samples",
        "tokens",
        *(f"{part}, ns" for part in PARTS),
        "together, ns a token",
        "bytes a token at the peak",
    ]
    write("bookkeeping", {"setting": here, "sizes": results}, f"{table(head, rows)}\n\n{words(here)}", args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
