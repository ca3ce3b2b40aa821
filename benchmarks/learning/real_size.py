"""A learner's step at the size of a real model, compared with its arithmetic at the rate of the core's matrix products.

    OMP_NUM_THREADS=1 python benchmarks/learning/real_size.py  # 5 minutes, 12 GB; writes benchmarks/results/real_size.{json,md}

The model has the shape of Qwen2.5-0.5B (494M parameters, random, fp32); a step is `learn` of train_sync.py on 16 responses to 2
prompts, with all that belongs to it. Its arithmetic is what forward and backward must compute at the least
(`update_flops`: 6 a matrix parameter and distinct token, and attention), with --gradient-checkpointing a third
more. The rate is measured between the steps: the products of the model's MLP, of as many tokens, the best of five.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import tyro
from common import RESULTS, Rounds, over, setting, table, words, write
from device.measure import SHAPES, config_of
from transformers import AutoModelForCausalLM

import train_sync
from rl.flags import read
from rl.learning.batch import Batch
from rl.learning.flops import update_flops
from rl.learning.learner import Learner
from rl.ranks import process
from rl.ranks.dist import Ranks
from rl.ranks.timers import Timers
from rl.samples.group import Group, Response

PROMPTS, RESPONSES = 2, 8


@dataclass
class Args:
    shape: Literal[tuple(SHAPES)] = "Qwen2.5-0.5B"
    """Which model; "toy" to see that it runs."""
    tokens: int = 112
    """Of each prompt and of each response."""
    rounds: int = 6
    """Steps; the first two are not counted: after them the process has the memory that it keeps."""
    minutes: float = 20
    """No step begins that would end later than this."""
    gradient_checkpointing: bool = False
    """Recompute activations."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


def make_batch(vocabulary: int, tokens: int) -> Batch:
    rng, chance = np.random.default_rng(0), np.full(tokens, -np.log(vocabulary), np.float32)
    draw = lambda: rng.integers(4, vocabulary, tokens).astype(np.int32)  # noqa: E731
    groups = []
    for ticket in range(PROMPTS):
        responses = [Response(draw(), chance, np.zeros(tokens, np.int32), "length", score=i % 2) for i in range(RESPONSES)]
        groups.append(Group(ticket, draw(), "demo", responses))
    return Batch.of(groups)


def product_rate(tokens: int, hidden: int, width: int) -> float:
    """FLOP/s of [tokens, hidden] @ [hidden, width], the best of five."""
    a, b, best = torch.randn(tokens, hidden), torch.randn(width, hidden), float("inf")
    for _ in range(5):
        started = time.perf_counter()
        torch.nn.functional.linear(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * tokens * hidden * width / best


def main(args: Args, ranks: Ranks) -> None:
    here = setting("transformers", threads=torch.get_num_threads(), gradient_checkpointing=args.gradient_checkpointing)
    config, steps, rates = config_of(args.shape), [], []
    with tempfile.TemporaryDirectory() as path:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        parameters = sum(p.numel() for p in model.parameters())
        model.save_pretrained(path)
        del model
        flags = ["--model", path, "--max-response-length", str(args.tokens), "--lr", "1e-6"]
        sync = read(train_sync.Args, args=flags + ["--gradient-checkpointing"] * args.gradient_checkpointing)
        learner = Learner(path, sync.learner, ranks, total_steps=1000)
    flops = update_flops(learner.config, make_batch(config.vocab_size, args.tokens))
    flops *= 4 / 3 if args.gradient_checkpointing else 1
    distinct = (PROMPTS + PROMPTS * RESPONSES) * args.tokens
    for number in Rounds(args.rounds, args.minutes):
        batch = make_batch(config.vocab_size, args.tokens)
        rate, started = product_rate(distinct, config.hidden_size, config.intermediate_size), time.perf_counter()
        train_sync.learn(sync, learner, batch, Timers())
        seconds = time.perf_counter() - started
        print(f"{seconds:.1f} s, {flops / seconds / rate:.2f} of the arithmetic at {rate / 1e9:.0f} GFLOP/s", flush=True)
        if number >= min(2, args.rounds - 1):
            steps.append(seconds)
            rates.append(rate)
    parts = [flops / rate / seconds for seconds, rate in zip(steps, rates, strict=True)]
    row = [f"{args.shape}, {parameters / 1e6:,.0f}M, {distinct:,} distinct tokens", f"{flops / 1e12:.2f}"]
    row += [over([rate / 1e9 for rate in rates], ".0f"), over(steps, ".1f"), over(parts)]
    text = table(["model", "TFLOP a step", "GFLOP/s of a product", "seconds a step", "arithmetic over step"], [row])
    data = {"setting": here, "parameters": parameters, "flops": flops, "seconds": steps, "rates": rates, "parts": parts}
    write("real_size", data, f"{text}\n\n{words(here)}; median (min - max)", args.out)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    process.run(lambda ranks: main(args, ranks))
