"""On one GPU: the learner's tokens/s, MFU and peak memory, the embedded engine's tokens/s, and async with both on the same GPU.

    python benchmarks/gpu.py              # about 15 minutes on an H100; writes benchmarks/results/gpu.{json,md}
    python benchmarks/gpu.py --toy        # the same at toy size on any machine, to see that it runs; writes nothing

Random weights in the shapes of Qwen2.5-0.5B, Qwen2.5-1.5B and Qwen3-4B; bf16 compute, fp32 master weights and AdamW.
- learner: `learn` of train_sync.py, one optimizer step of four micro-batches of 8,192 packed tokens (eight sequences of 1,024
  in each); MFU counts no recomputation (rl/metrics.py).
- engine: 256 requests of 256 tokens (prompts of 128), end tokens ignored.
- async: train_async.py, one generator and one learner on the one device, whose weights then travel over gloo (nccl wants a
  device for each rank). What is not possible there: a KV cache or an optimizer that takes the whole memory, since neither side
  gives any back while the other works; and sharing without a cost, since both compete for the same multiprocessors.
Each measurement is a process of its own; one that runs out of memory says so in its row.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from common import MODES, RESULTS, random_model, run_script, setting, synchronize, table, words, write
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from rl import device, process
from rl.dist import Ranks
from rl.flags import read

QWEN2 = dict(vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=32_768, eos_token_id=1, pad_token_id=0)
SHAPES = {
    "Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        **QWEN2,
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        **QWEN2,
    ),
    "Qwen3-4B": Qwen3Config(
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=9728,
        **QWEN2,
    ),
    "toy": Qwen2Config(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=128,
        **(QWEN2 | {"vocab_size": 64}),
    ),
}


@dataclass
class Args:
    shapes: tuple[str, ...] = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen3-4B")
    """Which models."""
    parts: tuple[str, ...] = ("learner", "engine", "async")
    """Which measurements; async is of the first shape."""
    repeats: int = 5
    """Steps that are counted, after two that are not."""
    toy: bool = False
    """Tiny shapes on whatever there is, nothing written."""
    part: str | None = None
    """(internal) One measurement, in this process."""
    shape: str = "toy"
    """(internal) Its model."""
    path: str = ""
    """(internal) Its directory."""
    gradient_checkpointing: bool = False
    """(internal) Whether activations are recomputed."""


def save(shape: str, path: str) -> None:
    """Random weights in bf16, made on the device, with the demo's characters for a tokenizer."""
    random_model(path, 64, 1, 64)  # for its tokenizer
    torch.manual_seed(0)
    with torch.device(device.kind()):
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16)
    model.save_pretrained(path)


def learner(args: Args, ranks: Ranks) -> dict:
    import train_sync
    from rl.batch import Batch, Group, Response
    from rl.kl_control import KLControl
    from rl.learner import Learner
    from rl.metrics import train_flops_per_token
    from rl.timers import Timers

    sequences, prompt, response = (32, 256, 768) if not args.toy else (8, 8, 24)
    flags = ["--model", args.path, "--dtype", "bfloat16", "--max-response-length", str(response)]
    flags += ["--ppo-max-token-len-per-gpu", str(8 * (prompt + response)), "--lr", "1e-6"]
    flags += ["--gradient-checkpointing"] if args.gradient_checkpointing else []
    sync = read(train_sync.Args, args=flags)
    model = Learner(args.path, sync, ranks, total_steps=1000)
    rng, vocabulary = np.random.default_rng(0), SHAPES[args.shape].vocab_size

    def tokens(n: int) -> np.ndarray:
        return rng.integers(4, vocabulary, n).astype(np.int32)

    def batch() -> Batch:  # every response with a prompt of its own: nothing is shared, all tokens are computed
        chance = np.full(response, -np.log(vocabulary), np.float32)
        rows = [Response(tokens(response), chance, np.zeros(response, np.int32), "stop", 1 + i % 2) for i in range(sequences)]
        return Batch.of([Group(i, tokens(prompt), "demo", [row]) for i, row in enumerate(rows)])

    seconds, kl_control = [], KLControl(sync)
    for _ in range(2 + args.repeats):
        of = batch()
        synchronize()
        started = time.perf_counter()
        train_sync.learn(sync, model, kl_control, of, Timers())
        synchronize()
        seconds.append(time.perf_counter() - started)
    total, middle = sequences * (prompt + response), float(np.median(seconds[2:]))
    out = {"tokens_per_s": total / middle, "seconds": seconds[2:]} | device.memory_gb()
    if peak := device.peak_flops():
        out["mfu"] = total * train_flops_per_token(model.config, prompt + response) / middle / peak
    return out


def engine(args: Args, ranks: Ranks) -> dict:
    from rl.embedded_engine import TransformersEngine
    from rl.engine import Request, SamplingParams

    requests, prompt, response = (256, 128, 256) if not args.toy else (8, 8, 8)
    vocabulary, rng = SHAPES[args.shape].vocab_size, np.random.default_rng(0)
    model = TransformersEngine(args.path, prompt + response, requests, dtype=torch.bfloat16, device=ranks.device)
    seconds = []
    for repeat in range(1 + args.repeats // 2):
        for i in range(requests):
            ids = rng.integers(4, vocabulary, prompt).tolist()
            model.add(Request(i, ids, SamplingParams(max_tokens=response, ignore_eos=True), repeat * requests + i))
        synchronize()
        started = time.perf_counter()
        while model.num_unfinished:
            model.step()
        synchronize()
        seconds.append(time.perf_counter() - started)
    middle = float(np.median(seconds[1:] or seconds))
    return {"tokens_per_s": requests * response / middle, "seconds": seconds[1:]} | device.memory_gb()


def shared(args: Args, path: str) -> dict:
    """train_async.py on one device; its tokens/s, what each side waited, and the publish."""
    flags = ["--model", path, "--dtype", "bfloat16", "--engine", "transformers", "--test-freq", "0", "--ignore-eos"]
    flags += ["--total-training-steps", "12" if not args.toy else "3", "--lr", "1e-6", "--gradient-checkpointing"]
    flags += ["--max-response-length", "256" if not args.toy else "8", "--max-num-seqs", "128"]
    _, rows = run_script(sys.executable, MODES["async"], *flags)
    rows = rows[len(rows) // 3 :]
    seconds = sum(row["timing_s/step"] for row in rows)
    out = {"tokens_per_s": sum(row["perf/total_num_tokens"] for row in rows) / seconds}
    for name in ("fully_async/trainer/idle_ratio", "fully_async/rollouter/idle_ratio", "publish/seconds", "publish/gb_per_s"):
        values = [row[name] for row in rows if row.get(name) is not None]
        out[name] = float(np.median(values)) if values else None
    return out


def measured(args: Args, part: str, shape: str, path: str, checkpointing: bool) -> dict:
    """One measurement in a process of its own; {"error": ...} if it ran out of memory."""
    command = [sys.executable, __file__, "--part", part, "--shape", shape, "--path", path, "--repeats", str(args.repeats)]
    command += ["--toy"] if args.toy else []
    command += ["--gradient-checkpointing"] if checkpointing else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode and "out of memory" in done.stderr:
        return {"error": "out of memory"}
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, shape: str, r: dict) -> list[str]:
    if "error" in r:
        return [name, shape, r["error"], "", ""]
    memory = r.get("perf/max_memory_reserved_gb")
    return [
        name,
        shape,
        f"{r['tokens_per_s']:,.0f}",
        f"{r['mfu']:.0%}" if "mfu" in r else "",
        f"{memory:.1f}" if memory else "",
    ]


def main(args: Args) -> None:
    if device.kind() == "cpu" and not args.toy:
        print("no GPU here: nothing is measured. --toy shows that it runs.")
        return
    shapes = ("toy",) if args.toy else args.shapes
    results: dict[str, dict] = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as path:
            save(shape, path)
            for checkpointing in (False, True) if "learner" in args.parts else ():
                name = "learner, gradient checkpointing" if checkpointing else "learner"
                results[f"{name}/{shape}"] = measured(args, "learner", shape, path, checkpointing)
            if "engine" in args.parts:
                results[f"embedded engine/{shape}"] = measured(args, "engine", shape, path, False)
            if "async" in args.parts and shape == shapes[0]:
                results[f"async, one device/{shape}"] = shared(args, path)
        for key in [key for key in results if key.endswith(shape)]:
            print(f"{key}: {results[key]}", flush=True)
    rows = [row(*key.split("/"), r) for key, r in results.items()]
    here = setting("transformers", device=device.name())
    text = f"{table(['what', 'model', 'tokens/s', 'MFU', 'peak GB'], rows)}\n\n{words(here)}"
    with tempfile.TemporaryDirectory() as nowhere:
        write("gpu", {"setting": here, "results": results}, text, Path(nowhere) if args.toy else RESULTS)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.part:
        part = {"learner": learner, "engine": engine}[args.part]
        process.run(lambda ranks: print(json.dumps(part(args, ranks))))
    else:
        main(args)
