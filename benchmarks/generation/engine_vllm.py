"""Our step loop over vLLM compared with vLLM's own `LLM.generate` on the same requests, interleaved in one run.

    OMP_NUM_THREADS=1 python benchmarks/generation/engine_vllm.py          # writes benchmarks/results/engine_vllm.{json,md}

Same model (the demo's), same prompts, same seeds, same number of tokens (end tokens ignored), temperature 1, fp32, and the
log-prob of every sampled token on both sides. The last row is what seeds and log-probs cost: `LLM.generate` without them.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tyro
from common import ratios, table, write

from examples.demo.sums import model_dir
from rl.generation.engine import EngineArgs, Request, SamplingParams
from rl.generation.vllm.engine import VLLMEngine, vllm

OURS, RAW, BARE = "our loop", "LLM.generate, the same requests", "LLM.generate, no seeds, no log-probs"


@dataclass
class Args:
    requests: int = 64
    """Responses generated at once."""
    tokens: int = 64
    """Tokens of each."""
    repeats: int = 15
    """Measurements of each side; the first round is not counted."""


def main(args: Args) -> None:
    path, length = model_dir(), 7 + args.tokens
    prompts = [[2, 4 + i % 10, 5 + i % 9, 14, 6, 15, 3] for i in range(args.requests)]
    engine = VLLMEngine(path, EngineArgs(max_num_seqs=args.requests), length)
    llm = vllm.LLM(
        model=path,
        dtype="float32",
        max_model_len=length,
        max_num_seqs=args.requests,
        max_num_batched_tokens=8192,
        enforce_eager=True,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        async_scheduling=False,
    )

    def ours() -> None:
        for i, prompt in enumerate(prompts):
            engine.add(Request(i, prompt, SamplingParams(max_tokens=args.tokens, ignore_eos=True), i))
        while engine.num_unfinished:
            engine.step()

    def raw(**settings) -> None:
        common = dict(temperature=1.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False)
        params = [vllm.SamplingParams(**common, **{k: f(i) for k, f in settings.items()}) for i in range(args.requests)]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    sides = {OURS: ours, RAW: lambda: raw(seed=lambda i: i, logprobs=lambda i: 0), BARE: raw}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(args.repeats + 1):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            if repeat:
                rates[name].append(args.requests * args.tokens / (time.perf_counter() - started))
    report(args, rates)


def report(args: Args, rates: dict[str, list[float]]) -> None:
    """rates: tokens/s by side, one a round."""
    head, rows = ["", "tokens/s, median", "min - max", "over LLM.generate, median of the rounds"], []
    for name, values in rates.items():
        spread = f"{min(values):,.0f} - {max(values):,.0f}"
        rows.append([name, f"{statistics.median(values):,.0f}", spread, f"{statistics.median(ratios(values, rates[RAW])):.2f}"])
    setup = f"{args.requests} requests of {args.tokens} tokens, {args.repeats} rounds, {torch.get_num_threads()} threads"
    write("engine_vllm", rates, f"{table(head, rows)}\n\n{setup}, vLLM {vllm.__version__} on a CPU.")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
