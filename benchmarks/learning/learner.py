"""The learner's update compared with a bare forward, backward and AdamW step of the same model on the same tokens.

    python benchmarks/learning/learner.py          # about 5 minutes on 2 cores; writes benchmarks/results/learner.{json,md}

- bare: a transformers model with the same packed attention, `logits_to_keep` at the response tokens, cross-entropy, backward,
  fused AdamW. No loss of the project, no sharding, no gradient clipping, no metrics.
- update: `learn` of train_sync.py as it is by default: packing, advantages, policy loss, entropy and all metrics, clipping,
  optimizer, schedule. (With one optimizer step a batch there is no pass for old log-probs.)
- prompts repeated: the same update where no two responses share their prompt, so that it is computed for each of them.
- half without advantage: the same update where all scores of a group are equal, in half of the groups.
Random Qwen2 models in fp32, 64 responses to 8 prompts, of lengths drawn between a quarter of the budget and all of it; a prompt
is half of the budget, as GSM8K's are about half of their responses. Tokens count each response with its prompt, on all sides.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from common import RESULTS, Rounds, over, random_model, ratios, setting, table, words, write
from transformers import AutoModelForCausalLM

import train_sync
from rl.flags import read
from rl.learning.batch import Batch, Division, micro_batches
from rl.learning.learner import Learner
from rl.model.attention import ATTENTION
from rl.ranks import process
from rl.ranks.dist import Ranks
from rl.ranks.timers import Timers
from rl.samples.group import Group, Response

SIZES = {"toy": (64, 1, 32, 8), "1M": (128, 4, 32, 64), "30M": (512, 8, 8192, 128), "100M": (768, 12, 8192, 128)}
# hidden, layers, vocabulary, response budget


@dataclass
class Args:
    sizes: tuple[str, ...] = ("1M", "30M")
    """Which models: toy, 1M, 30M, 100M."""
    rounds: int = 11
    """Measurements of each side; the first round is not counted."""
    minutes: float = 10
    """No round of a size begins that would end later than this."""
    gradient_checkpointing: bool = False
    """Recompute activations, on both sides."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


def make_groups(vocabulary: int, budget: int, shared: bool = True, signal: float = 1.0) -> list[Group]:
    """8 groups of 8 responses, or with the same tokens 64 groups of one. signal: the part of the groups whose scores differ."""
    rng = np.random.default_rng(0)
    groups = []
    for ticket in range(8):
        responses, has_signal = [], ticket < 8 * signal
        for number in range(8):
            n = int(rng.integers(budget // 4, budget + 1))
            tokens = rng.integers(4, vocabulary, n).astype(np.int32)
            log_probs = np.full(n, -np.log(vocabulary), np.float32)
            score = 2.0 if has_signal and number % 2 else 1.0
            responses.append(Response(tokens, log_probs, np.zeros(n, np.int32), "stop", score))
        prompt = rng.integers(4, vocabulary, budget // 2).astype(np.int32)
        apart = [responses] if shared else [[response] for response in responses]
        groups += [Group(8 * ticket + i, prompt, "demo", of_one) for i, of_one in enumerate(apart)]
    return groups


def measure(name: str, folder: str, args: Args, ranks: Ranks) -> dict:
    hidden, layers, vocabulary, budget = SIZES[name]
    path = f"{folder}/{name}"
    parameters = random_model(path, hidden, layers, vocabulary)
    flags = ["--model", path, "--max-response-length", str(budget)]
    flags += ["--gradient-checkpointing"] if args.gradient_checkpointing else []
    sync = read(train_sync.Args, args=flags)
    learner = Learner(path, sync.learner, ranks, total_steps=1000)
    bare = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=ATTENTION).train()
    if args.gradient_checkpointing:
        bare.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-4, fused=True)
    batch = Batch.of(make_groups(vocabulary, budget))
    tokens = sum(batch.total_lengths)
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), learner.args.max_tokens_per_micro_batch, ranks)

    def bare_step() -> None:
        for micro in micros:
            logits = bare(**micro.inputs, logits_to_keep=micro.predict, use_cache=False, layout=micro.layout).logits[
                0
            ]  # [n, V]
            (F.cross_entropy(logits, micro.labels, reduction="sum") / len(batch.token)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def update(**how) -> None:
        given = Batch.of(make_groups(vocabulary, budget, **how), Division.of(sync, learner))
        train_sync.learn(sync, learner, given, Timers())

    sides = {"bare": bare_step, "update": update, "update, prompts repeated": lambda: update(shared=False)}
    sides["update, half without advantage"] = lambda: update(signal=0.5)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in Rounds(args.rounds, args.minutes):
        for side, step in sides.items():
            started = time.perf_counter()
            step()
            if number:
                rates[side].append(tokens / (time.perf_counter() - started))
    return {"parameters": parameters, "tokens": tokens, "tokens_per_s": rates}


def main(args: Args, ranks: Ranks) -> None:
    here = setting("transformers", threads=torch.get_num_threads(), gradient_checkpointing=args.gradient_checkpointing)
    results, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.sizes:
            results[name] = r = measure(name, folder, args, ranks)
            bare = r["tokens_per_s"]["bare"]
            for side, rates in r["tokens_per_s"].items():
                size = f"{r['parameters'] / 1e6:.1f}M, {r['tokens']:,} tokens"
                rows.append([size, side, over(rates, ",.0f"), over(ratios(rates, bare))])
            print(f"{name}: {statistics.median(ratios(r['tokens_per_s']['update'], bare)):.2f} of bare", flush=True)
    head = ["model", "side", "tokens/s", "over bare"]
    text = f"{table(head, rows)}\n\n{words(here)}; interleaved rounds, median (min - max)"
    write("learner", {"setting": here, "sizes": results}, text, args.out)
    sys.stdout.flush()


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    process.run(lambda ranks: main(args, ranks))
