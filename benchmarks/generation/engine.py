"""The embedded engine compared with transformers' own generate() and continuous batching, interleaved in one run.

    python benchmarks/generation/engine.py          # writes benchmarks/results/engine.{json,md}

Same model (the demo's), same prompts, same number of tokens (end tokens ignored), temperature 1, fp32. Only the embedded
engine also records log-probs and gives each request a seed of its own.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tyro
from common import table, write
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from examples.demo.sums import model_dir
from rl.generation.embedded import TransformersEngine
from rl.generation.engine import Request, SamplingParams


@dataclass
class Args:
    requests: int = 64
    """Responses generated at once."""
    tokens: int = 64
    """Tokens of each."""
    repeats: int = 5
    """Measurements of each engine; the first round is not counted."""


def main(args: Args) -> None:
    logging.set_verbosity_error()
    path = model_dir()
    prompts = [[2, 4 + i % 10, 5 + i % 9, 14, 6, 15, 3] for i in range(args.requests)]
    engine = TransformersEngine(path, max_length=7 + args.tokens, max_num_seqs=args.requests)
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    batching = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()

    def ours() -> None:
        for i, prompt in enumerate(prompts):
            engine.add(Request(i, prompt, SamplingParams(max_tokens=args.tokens, ignore_eos=True), i))
        while engine.num_unfinished:
            engine.step()

    def generate() -> None:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        plain.generate(ids, attention_mask=mask, min_new_tokens=args.tokens, max_new_tokens=args.tokens, do_sample=True)

    def continuous_batching() -> None:
        config = GenerationConfig(max_new_tokens=args.tokens, do_sample=True, eos_token_id=-1, pad_token_id=0)
        batching.generate_batch(prompts, generation_config=config, continuous_batching_config=tuned)

    # Untuned it takes 18 GB on a CPU and minutes a round; these settings are the fastest we found.
    tuned = ContinuousBatchingConfig(
        page_size=64, num_blocks=160, max_batch_tokens=1024, use_cuda_graph=False, use_async_batching=False
    )
    sides = {"embedded engine": ours, "generate()": generate, "continuous batching": continuous_batching}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(args.repeats + 1):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            if repeat:
                rates[name].append(args.requests * args.tokens / (time.perf_counter() - started))
    base = statistics.median(rates["generate()"])
    head, rows = ["engine", "tokens/s, median", "min - max", "over generate()"], []
    for name, values in rates.items():
        middle = statistics.median(values)
        rows.append([name, f"{middle:,.0f}", f"{min(values):,.0f} - {max(values):,.0f}", f"{middle / base:.2f}"])
    setup = f"{args.requests} requests of {args.tokens} tokens, {torch.get_num_threads()} threads"
    write("engine", rates, f"{table(head, rows)}\n\n{setup}.")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
