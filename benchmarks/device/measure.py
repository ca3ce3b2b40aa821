"""One measurement on this machine's accelerator, in a process of its own. The last line that it prints is JSON.

    python benchmarks/device/measure.py save --shape Qwen2.5-0.5B --path /tmp/qwen       # random weights in that shape
    python benchmarks/device/measure.py learner --shape Qwen2.5-0.5B --path /tmp/qwen --gradient-checkpointing
    python benchmarks/device/measure.py facts --toy                                      # tiny, on any machine

The learner computes in bf16, with fp32 master weights and AdamW, and takes the flags of train_sync.py.
- learner: `learn` of train_sync.py, one optimizer step of four micro-batches of 8,192 packed tokens (eight sequences of 1,024
  in each); MFU counts no recomputation (rl/learning/flops.py).
- publish: LocalWeights.publish into the embedded engine of the same process, each tensor compared, and digests of all.
- engine: 256 requests of 256 tokens (prompts of 128) by the embedded engine, and by transformers' generate(); end tokens are
  ignored.
- values: log-probs of the embedded engine and of transformers' own attention, both in bf16, and of the latter in fp32.
- vllm: as engine and values, by vLLM; the seconds in which it sleeps, wakes and takes new weights; the memory that it frees.
- profile: the longest operations of a learner's step and of 32 decoding steps, and the lines at which the host waits.
operations.py has the others: facts, sdpa, packing, delta, experts.
"""

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from common import random_model
from device.operations import BF16, OPERATIONS, median, profiled, timed
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

import train_sync
from rl.flags import read
from rl.generation.embedded import TransformersEngine
from rl.generation.engine import Engine, EngineArgs, Output, Request, SamplingParams
from rl.learning.batch import Batch
from rl.learning.flops import train_flops_per_token
from rl.learning.learner import Learner
from rl.ranks import device, process
from rl.ranks.dist import Ranks
from rl.ranks.timers import Timers
from rl.samples.group import Group, Response
from rl.setup import LocalWeights
from rl.weights.publish import digest
from rl.weights.publish import read as read_digests
from tools.doctor.measure import memory_left

SHAPES = {  # class, hidden size, layers, heads, heads of keys, MLP, vocabulary
    "Qwen2.5-0.5B": (Qwen2Config, 896, 24, 14, 2, 4864, 151_936),
    "Qwen2.5-1.5B": (Qwen2Config, 1536, 28, 12, 2, 8960, 151_936),
    "Qwen3-0.6B": (Qwen3Config, 1024, 28, 16, 8, 3072, 151_936),
    "Qwen3-4B": (Qwen3Config, 2560, 36, 32, 8, 9728, 151_936),
    "toy": (Qwen2Config, 64, 1, 2, 2, 128, 64),
}
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def config_of(shape: str) -> PretrainedConfig:
    kind, *sizes = SHAPES[shape]
    of_all = dict(tie_word_embeddings=True, max_position_embeddings=32_768, eos_token_id=1, pad_token_id=0)
    return kind(**dict(zip(FIELDS, sizes, strict=True)), **of_all)


def save(args: argparse.Namespace, ranks: Ranks) -> dict:
    """Write random weights in bf16, made on the device, with the demo's characters for a tokenizer."""
    started = time.perf_counter()
    config = config_of(args.shape)
    random_model(args.path, 64, 1, config.vocab_size, fill=True)  # for its tokenizer
    torch.manual_seed(0)
    with torch.device(ranks.device):
        model = AutoModelForCausalLM.from_config(config, dtype=BF16)
    model.save_pretrained(args.path)
    return {"seconds": time.perf_counter() - started}


# --------------------------------------------------------------------------------------------------------------- learners


def training(
    args: argparse.Namespace, ranks: Ranks, sizes: tuple[int, int, int], shared: int = 1
) -> tuple[Learner, Callable[[], Batch], Callable[[Batch], dict]]:
    """Return a learner, what makes a batch, and what takes a step. sizes: sequences of a batch, tokens of a prompt and of a
    response. shared: responses to a prompt; with 1 nothing is shared, and all tokens are computed."""
    sequences, prompt, response = sizes
    own = ["--model", args.path, "--dtype", "bfloat16", "--max-response-length", str(response), "--lr", "1e-6", *args.flags]
    own += ["--max-tokens-per-micro-batch", str(8 * (prompt + response)), "--rollout-n", str(shared)]
    sync = read(train_sync.Args, args=own)
    learner = Learner(args.path, sync.learner, ranks, total_steps=1000)
    rng = np.random.default_rng(0)
    vocabulary = SHAPES[args.shape][-1]
    chance = np.full(response, -np.log(vocabulary), np.float32)

    def tokens(n: int) -> np.ndarray:
        return rng.integers(4, vocabulary, n).astype(np.int32)

    def make() -> Batch:
        old = np.zeros(response, np.int32)
        rows = [Response(tokens(response), chance, old, "stop", 1 + number % 2) for number in range(sequences)]
        groups = [rows[first : first + shared] for first in range(0, sequences, shared)]
        return Batch.of([Group(ticket, tokens(prompt), "demo", group) for ticket, group in enumerate(groups)])

    return learner, make, lambda batch: train_sync.learn(sync, learner, batch, Timers())


def learner(args: argparse.Namespace, ranks: Ranks) -> dict:
    sequences, prompt, response = sizes = (8, 8, 24) if args.toy else (32, 256, 768)
    model, make, step = training(args, ranks, sizes)
    seconds = timed(step, make=make)
    rate = sequences * (prompt + response) / float(np.median(seconds))
    peak = device.peak_flops()
    mfu = rate * train_flops_per_token(model.config, prompt + response) / peak if peak else None
    return {"tokens_per_s": rate, "mfu": mfu, "seconds": seconds} | device.memory_gb()


def publish(args: argparse.Namespace, ranks: Ranks) -> dict:
    model, make, step = training(args, ranks, (8, 8, 24) if args.toy else (8, 128, 128))
    engine = embedded(args, ranks, 256, 8)
    step(make())
    weights = LocalWeights(model, engine, BF16)
    version = itertools.count()
    seconds = median(lambda: weights.publish(next(version)))
    own = list(engine.model.parameters())
    size = sum(parameter.nbytes for parameter in own) / 1e9
    wrong = [name for name, sent in model.weights(BF16) if not torch.equal(engine.read_back(name), sent.to(BF16))]
    digests = median(lambda: read_digests([digest(parameter, ranks.device) for parameter in own]))
    out = {"publish_seconds": seconds, "gb": size, "gb_per_s": size / seconds, "digest_seconds": digests}
    return out | {"WRONG": wrong[:3], "equal to the bit": not wrong} | device.memory_gb()


# ---------------------------------------------------------------------------------------------------------------- engines


def embedded(args: argparse.Namespace, ranks: Ranks, longest: int, requests: int) -> TransformersEngine:
    return TransformersEngine(args.path, longest, requests, dtype=BF16, device=ranks.device)


def load(engine: Engine, args: argparse.Namespace, seed: int, count: int, prompt: int, sampling: SamplingParams) -> np.ndarray:
    """Hand the engine random prompts, and return them, [count, prompt]."""
    prompts = np.random.default_rng(seed).integers(4, SHAPES[args.shape][-1], (count, prompt))
    for number, ids in enumerate(prompts.tolist()):
        engine.add(Request(number, ids, sampling, seed * count + number))
    return prompts


def outputs_of(engine: Engine) -> Iterator[Output]:
    while engine.num_unfinished:
        yield from engine.step()


def requests_of(args: argparse.Namespace) -> tuple[int, int, int]:
    """Return the number of requests, and the tokens of a prompt and of a response."""
    return (8, 8, 8) if args.toy else (256, 128, 256)


def decoded(engine: Engine, args: argparse.Namespace) -> dict:
    """Return an engine's tokens/s."""
    requests, prompt, response = requests_of(args)
    sampling = SamplingParams(max_tokens=response, ignore_eos=True)
    seed = itertools.count()
    make = lambda: load(engine, args, next(seed), requests, prompt, sampling)  # noqa: E731
    seconds = timed(lambda _: list(outputs_of(engine)), 2, 1, make)
    return {"tokens_per_s": requests * response / float(np.median(seconds)), "seconds": seconds} | device.memory_gb()


def engine(args: argparse.Namespace, ranks: Ranks) -> dict:
    requests, prompt, response = requests_of(args)
    ours = embedded(args, ranks, prompt + response, requests)
    return decoded(ours, args) | {"generate_tokens_per_s": generated(ours.model.config, args, ranks)}


@torch.no_grad()
def generated(config: PretrainedConfig, args: argparse.Namespace, ranks: Ranks) -> float:
    """Return the tokens/s of transformers' generate() for the same requests in one batch, sampled."""
    requests, prompt, response = requests_of(args)
    model = AutoModelForCausalLM.from_pretrained(args.path, dtype=BF16).to(ranks.device).eval()
    prompts = torch.randint(4, config.vocab_size, (requests, prompt), device=ranks.device)
    all_of_them = dict(min_new_tokens=response, max_new_tokens=response, do_sample=True, top_k=0, pad_token_id=0)
    (seconds,) = timed(lambda: model.generate(prompts, attention_mask=torch.ones_like(prompts), **all_of_them), 1, 1)
    return requests * response / seconds


def values(args: argparse.Namespace, ranks: Ranks) -> dict:
    return compared(embedded(args, ranks, 256, 32), args, ranks)


@torch.no_grad()
def compared(engine: Engine, args: argparse.Namespace, ranks: Ranks) -> dict:
    """Return how far an engine's log-probs are from those of transformers, after a publish. Raise ValueError if too far."""
    count, prompt, response = (4, 8, 8) if args.toy else (32, 128, 64)
    bf16, fp32 = (AutoModelForCausalLM.from_pretrained(args.path, dtype=d).to(ranks.device).eval() for d in (BF16, torch.float))
    engine.update(bf16.named_parameters(), 0)
    off = {}
    for temperature in (1.0, 0.6):
        sampling = SamplingParams(temperature, max_tokens=response, ignore_eos=True)
        prompts = load(engine, args, 0, count, prompt, sampling).tolist()
        outputs = list(outputs_of(engine))
        ids = torch.tensor([prompts[output.id] + output.token_ids for output in outputs], device=ranks.device)
        found = {"engine": torch.tensor([output.log_probs for output in outputs])}
        for name, model in (("bf16", bf16), ("fp32", fp32)):
            logits = model(ids[:, :-1]).logits[:, prompt - 1 :].float() / temperature
            found[name] = logits.log_softmax(-1).gather(2, ids[:, prompt:, None])[..., 0].cpu()
        for a, b in itertools.combinations(found, 2):
            differences = (found[a] - found[b]).abs()
            off[f"{a} to {b}, T {temperature}"] = {"mean": float(differences.mean()), "max": float(differences.max())}
    print(off)
    if wrong := [name for name, of in off.items() if name.startswith("engine to bf16") and not of["mean"] < 0.05]:
        raise ValueError(f"the engine's log-probs are wrong: {wrong[0]}: {off[wrong[0]]}")
    return {"log-probs off": off} | device.memory_gb()


def vllm(args: argparse.Namespace, ranks: Ranks) -> dict:
    from rl.generation.vllm.engine import VLLMEngine

    requests, prompt, response = requests_of(args)
    flags = EngineArgs(max_num_seqs=requests, max_num_batched_tokens=8192, gpu_memory_utilization=0.5)
    engine = VLLMEngine(args.path, flags, prompt + response, BF16, ranks.device)
    speed = decoded(engine, args)
    out = compared(engine, args, ranks) | speed
    model = AutoModelForCausalLM.from_pretrained(args.path, dtype=BF16).to(ranks.device)
    before = memory_left() if engine.sleeps else None
    (out["sleep_seconds"],) = timed(engine.sleep, 1, 0)
    out["freed_gb"] = (memory_left()[0] - before[0]) / 2**30 if before else None
    (out["wake_and_publish_seconds"],) = timed(lambda: engine.update(model.named_parameters(), 1), 1, 0)
    return out


def profile(args: argparse.Namespace, ranks: Ranks) -> dict:
    out = {}
    sizes, shared = ((8, 8, 24), 4) if args.toy else ((32, 256, 768), 8)
    learner, make, step = training(args, ranks, sizes, shared)
    batches = [make() for _ in range(5)]
    texts = [profiled("learner", lambda step=step: step(batches.pop()), 2, out)]
    del learner, step
    gc.collect()
    device.empty_cache()

    requests, prompt, steps = (4, 8, 8) if args.toy else (128, 128, 32)
    engine = embedded(args, ranks, prompt + 6 * steps, requests)
    load(engine, args, 0, requests, prompt, SamplingParams(max_tokens=6 * steps, ignore_eos=True))
    texts.append(profiled("decode", lambda: [engine.step() for _ in range(steps)], 1, out))
    out["decode, ms a step"] = out["decode, seconds"] / steps * 1e3
    Path(args.text).write_text("\n".join(texts))
    return out


OF_MODELS = (save, learner, publish, engine, values, vllm, profile)
MEASUREMENTS = {measurement.__name__: measurement for measurement in (*OF_MODELS, *OPERATIONS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("--shape", choices=SHAPES, default="toy")
    parser.add_argument("--path", help="the model's directory")
    parser.add_argument("--text", default="profile.txt", help="of profile: the file of its tables")
    parser.add_argument("--toy", action="store_true", help="tiny sizes")
    args, flags = parser.parse_known_args()
    args.flags = flags
    process.run(lambda ranks: print(json.dumps(MEASUREMENTS[args.what](args, ranks))))


if __name__ == "__main__":
    main()
