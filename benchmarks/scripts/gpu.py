"""On one accelerator: speed, MFU and peak memory of the learner and of both engines, sleeping and waking, async on one device.

    python benchmarks/scripts/gpu.py          # about 20 minutes on an H100; writes benchmarks/results/gpu.{json,md}, row by row
    python benchmarks/scripts/gpu.py --toy    # the same at toy size on any machine, to see that it runs; writes nothing

Random weights in the shapes of Qwen2.5-0.5B, Qwen2.5-1.5B and Qwen3-4B; bf16 compute, fp32 master weights and AdamW.
- learner: `learn` of train_sync.py, one optimizer step of four micro-batches of 8,192 packed tokens (eight sequences of 1,024
  in each); MFU counts no recomputation (rl/learning/flops.py).
- engine, vllm: 256 requests of 256 tokens (prompts of 128), end tokens ignored.
- sleep: seconds that vLLM takes to sleep, to wake and to take new weights, and the memory that sleeping gives back.
- values: mean difference of vLLM's log-probs from transformers', at temperatures 1 and 0.6, after a publish.
- async: train_async.py, one generator and one learner on the one device, whose weights then travel over gloo (nccl wants a
  device for each rank). What is not possible there: a KV cache or an optimizer that takes the whole memory, since neither side
  gives any back while the other works; and sharing without a cost, since both compete for the same multiprocessors.
Each measurement is a process of its own. One that fails says so in its row, and the others continue.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import tyro
from common import MODES, RESULTS, of_fixed_length, random_model, run_script, setting, synchronize, table, words, write
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from rl.flags import read
from rl.ranks import device, process
from rl.ranks.dist import Ranks

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
    parts: tuple[str, ...] = ("learner", "engine", "vllm", "sleep", "values", "async")
    """Which measurements; async is of the first shape."""
    kind: Literal["auto", "cuda", "npu"] = "auto"
    """Devices that must be there; with auto whatever there is."""
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
    random_model(path, 64, 1, SHAPES[shape].vocab_size, fill=True)  # for its tokenizer
    torch.manual_seed(0)
    with torch.device(device.kind()):
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16)
    model.save_pretrained(path)


def learner(args: Args, ranks: Ranks) -> dict:

    import train_sync
    from rl.learning.batch import Batch
    from rl.learning.flops import train_flops_per_token
    from rl.learning.learner import Learner
    from rl.ranks.timers import Timers
    from rl.samples.group import Group, Response

    sequences, prompt, response = (32, 256, 768) if not args.toy else (8, 8, 24)
    flags = ["--model", args.path, "--dtype", "bfloat16", "--max-response-length", str(response)]
    flags += ["--max-tokens-per-micro-batch", str(8 * (prompt + response)), "--lr", "1e-6"]
    flags += ["--gradient-checkpointing"] if args.gradient_checkpointing else []
    sync = read(train_sync.Args, args=flags)
    model = Learner(args.path, sync.learner, ranks, total_steps=1000)
    rng, vocabulary = np.random.default_rng(0), SHAPES[args.shape].vocab_size

    def tokens(n: int) -> np.ndarray:
        return rng.integers(4, vocabulary, n).astype(np.int32)

    def batch() -> Batch:  # every response with a prompt of its own: nothing is shared, all tokens are computed
        chance = np.full(response, -np.log(vocabulary), np.float32)
        rows = [Response(tokens(response), chance, np.zeros(response, np.int32), "stop", 1 + i % 2) for i in range(sequences)]
        return Batch.of([Group(i, tokens(prompt), "demo", [row]) for i, row in enumerate(rows)])

    seconds = []
    for _ in range(2 + args.repeats):
        of = batch()
        synchronize()
        started = time.perf_counter()
        train_sync.learn(sync, model, of, Timers())
        synchronize()
        seconds.append(time.perf_counter() - started)
    total, middle = sequences * (prompt + response), float(np.median(seconds[2:]))
    out = {"tokens_per_s": total / middle, "seconds": seconds[2:]} | device.memory_gb()
    if peak := device.peak_flops():
        out["mfu"] = total * train_flops_per_token(model.config, prompt + response) / middle / peak
    return out


def requests_of(args: Args) -> tuple[int, int, int]:
    """(requests, tokens of a prompt, of a response)"""
    return (256, 128, 256) if not args.toy else (8, 8, 8)


def engine(args: Args, ranks: Ranks) -> dict:
    from rl.generation.embedded.engine import TransformersEngine

    requests, prompt, response = requests_of(args)
    model = TransformersEngine(args.path, prompt + response, requests, dtype=torch.bfloat16, device=ranks.device)
    return decoded(model, args)


def decoded(model, args: Args) -> dict:
    """Tokens/s of an engine."""
    from rl.generation.engine import Request, SamplingParams

    requests, prompt, response = requests_of(args)
    vocabulary, rng, seconds = SHAPES[args.shape].vocab_size, np.random.default_rng(0), []
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


def vllm_engine(args: Args, ranks: Ranks):
    from rl.generation.engine import EngineArgs
    from rl.generation.vllm.engine import VLLMEngine

    requests, prompt, response = requests_of(args)
    flags = EngineArgs(max_num_seqs=requests, max_num_batched_tokens=8192, gpu_memory_utilization=0.5)
    return VLLMEngine(args.path, flags, prompt + response, torch.bfloat16, ranks.device)


def vllm(args: Args, ranks: Ranks) -> dict:
    return decoded(vllm_engine(args, ranks), args)


def sleep(args: Args, ranks: Ranks) -> dict:
    model = AutoModelForCausalLM.from_pretrained(args.path, dtype=torch.bfloat16).to(ranks.device)
    engine, seconds, freed = vllm_engine(args, ranks), {}, None
    for version in range(2):
        before = device.memory_left() if engine.sleeps else None
        started = time.perf_counter()
        engine.sleep()
        synchronize()
        slept = time.perf_counter()
        freed = (device.memory_left()[0] - before[0]) / 2**30 if before else None
        engine.update(model.named_parameters(), version)
        synchronize()
        seconds = {"sleep": slept - started, "wake and publish": time.perf_counter() - slept}
    note = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    return {
        "seconds": seconds,
        "freed_gb": freed,
        "note": f"{note}, " + (f"{freed:.1f} GiB freed" if freed else "no sleep mode"),
    }


@torch.no_grad()
def values(args: Args, ranks: Ranks) -> dict:
    from rl.generation.engine import Request, SamplingParams

    model = AutoModelForCausalLM.from_pretrained(args.path, dtype=torch.bfloat16).to(ranks.device).eval()
    engine, rng, means = vllm_engine(args, ranks), np.random.default_rng(0), {}
    engine.update(model.named_parameters(), 0)
    for temperature in (1.0, 0.6):
        prompts = [rng.integers(4, SHAPES[args.shape].vocab_size, 8).tolist() for _ in range(8)]
        for i, ids in enumerate(prompts):
            engine.add(Request(i, ids, SamplingParams(temperature, max_tokens=8, ignore_eos=True), i))
        outputs = []
        while engine.num_unfinished:
            outputs += engine.step()
        differences = []
        for output in outputs:
            ids = torch.tensor([prompts[output.id] + output.token_ids], device=ranks.device)
            theirs = (model(ids).logits[0, 7:-1].float() / temperature).log_softmax(-1)
            theirs = theirs.gather(1, torch.tensor(output.token_ids, device=ranks.device)[:, None])[:, 0].cpu()
            differences.append((theirs - torch.tensor(output.log_probs)).abs())
        means[str(temperature)] = float(torch.cat(differences).mean())
    wrong = "" if max(means.values()) < 0.05 else "WRONG: "
    return {"mean_difference": means, "note": wrong + ", ".join(f"{mean:.4f} at {t}" for t, mean in means.items())}


def shared(args: Args, path: str) -> dict:
    """train_async.py on one device; its tokens/s, what each side waited, and the publish."""
    flags = ["--model", path, "--dtype", "bfloat16", "--engine", "embedded", "--test-freq", "0"]
    flags += ["--total-training-steps", "12" if not args.toy else "3", "--lr", "1e-6", "--gradient-checkpointing"]
    flags += ["--max-response-length", "256" if not args.toy else "8", "--max-num-seqs", "128"]
    _, rows = run_script(sys.executable, of_fixed_length(MODES["async"]), *flags)
    rows = rows[len(rows) // 3 :]
    seconds = sum(row["timing_s/step"] for row in rows)
    out = {"tokens_per_s": sum(row["perf/total_num_tokens"] for row in rows) / seconds}
    for name in ("fully_async/trainer/idle_ratio", "fully_async/rollouter/idle_ratio", "publish/seconds", "publish/gb_per_s"):
        values = [row[name] for row in rows if row.get(name) is not None]
        out[name] = float(np.median(values)) if values else None
    return out


def measured(args: Args, part: str, shape: str, path: str, checkpointing: bool) -> dict:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--shape", shape, "--path", path, "--repeats", str(args.repeats)]
    command += ["--toy"] if args.toy else []
    command += ["--gradient-checkpointing"] if checkpointing else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(
            "out of memory" if "out of memory" in done.stderr else done.stderr[-3000:] or f"exit {done.returncode}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def attempt(measure: Callable[[], dict]) -> dict:
    """{"error": its last line} of a measurement that fails; what it printed is printed."""
    try:
        return measure()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print("\n".join(lines), file=sys.stderr, flush=True)
        return {"error": lines[-1][:200]}


HEAD = ["what", "model", "tokens/s", "MFU", "peak GB", ""]


def row(name: str, shape: str, r: dict) -> list[str]:
    memory = r.get("perf/max_memory_reserved_gb")
    return [
        name,
        shape,
        f"{r['tokens_per_s']:,.0f}" if "tokens_per_s" in r else "",
        f"{r['mfu']:.0%}" if "mfu" in r else "",
        f"{memory:.1f}" if memory else "",
        r.get("error") or r.get("note", ""),
    ]


def measurements(args: Args, shape: str, is_first: bool, path: str) -> Iterator[tuple[str, Callable[[], dict]]]:
    """(name of the row, what measures it) of a model."""
    names = {
        "learner": "learner",
        "engine": "embedded engine",
        "vllm": "vLLM",
        "sleep": "vLLM, sleep",
        "values": "vLLM, values",
    }
    for part in args.parts:
        if part == "async":
            if is_first:
                yield "async, one device", partial(shared, args, path)
            continue
        yield names.get(part, part), partial(measured, args, part, shape, path, False)
        if part == "learner":
            yield "learner, gradient checkpointing", partial(measured, args, part, shape, path, True)


def main(args: Args) -> None:
    if args.kind not in ("auto", device.kind()):
        sys.exit(f"error: --kind {args.kind}, but this machine has {device.kind()} (driver, torch: docs/engines.md).")
    if device.kind() == "cpu" and not args.toy:
        print("no GPU here: nothing is measured. --toy shows that it runs.")
        return
    shapes = ("toy",) if args.toy else args.shapes
    results: dict[str, dict] = {}
    here = setting("transformers", device=device.name())
    with tempfile.TemporaryDirectory() as nowhere:
        out = Path(nowhere) if args.toy else RESULTS
        for shape in shapes:
            with tempfile.TemporaryDirectory() as path:
                save(shape, path)
                for name, measure in measurements(args, shape, shape == shapes[0], path):
                    results[f"{name}/{shape}"] = attempt(measure)
                    rows = [row(*key.split("/"), r) for key, r in results.items()]
                    text = f"{table(HEAD, rows)}\n\n{words(here)}"
                    write("gpu", {"setting": here, "results": results}, text, out)  # now: the next one may end the machine


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.part:
        part = {"learner": learner, "engine": engine, "vllm": vllm, "sleep": sleep, "values": values}[args.part]
        process.run(lambda ranks: print(json.dumps(part(args, ranks))))
    else:
        main(args)
