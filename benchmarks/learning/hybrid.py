"""A hybrid model's step: packed rows with shared prompts against transformers' own model on one sequence at a time.

    OMP_NUM_THREADS=1 python benchmarks/learning/hybrid.py      # about 3 minutes; writes benchmarks/results/hybrid.{json,md}

- one at a time: transformers' forward pass of each response with its prompt, log-probs, backward; then AdamW. Its rows cannot
  be packed, and padded ones compute the padding.
- packed: forward, log-probs and backward over our packed rows, each prompt computed once for its eight responses; then AdamW.
- update: `learn` of train_sync.py as it is by default, as in learner.py.
- dense: "packed" of a Qwen3 model with the same width, layers and MLPs.
A random Qwen3.5 model in fp32: eight layers, six of them gated delta nets, and three of the groups of learner.py.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tyro
from common import RESULTS, Rounds, over, ratios, setting, table, words, write
from learning.learner import make_groups
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

import train_sync
from examples.demo.sums import build_tokenizer
from rl.flags import read
from rl.learning.batch import Batch, Division, micro_batches, tokens_of
from rl.learning.learner import Learner
from rl.model.attention import ATTENTION
from rl.model.policy import Policy
from rl.ranks import process
from rl.ranks.dist import Ranks
from rl.ranks.timers import Timers

SIZES = {"toy": (64, 2), "8M": (256, 8)}  # hidden, layers
GROUPS = 3  # of the eight of learner.py


@dataclass
class Args:
    size: str = "8M"
    """Which model: toy, 8M."""
    budget: int = 64
    """Most tokens of a response; a prompt has half as many."""
    rounds: int = 9
    """Measurements of each side; the first round is not counted."""
    minutes: float = 15
    """No round begins that would end later than this."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


def save_models(folder: str, hidden: int, layers: int) -> dict[str, str]:
    """Directories of both kinds of model."""
    tokenizer = build_tokenizer()
    sizes = dict(vocab_size=64, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=4 * hidden, head_dim=64)
    sizes |= dict(num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, max_position_embeddings=4096)
    sizes |= dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    kinds = ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(layers)]
    kinds[-1] = "full_attention"
    nets = dict(linear_num_key_heads=hidden // 128 or 1, linear_num_value_heads=hidden // 64)
    nets |= dict(linear_key_head_dim=64, linear_value_head_dim=64, layer_types=kinds)
    out = {}
    for name, config in (("hybrid", Qwen3_5TextConfig(**sizes | nets)), ("dense", Qwen3Config(**sizes))):
        torch.manual_seed(0)
        out[name] = f"{folder}/{name}"
        AutoModelForCausalLM.from_config(config).save_pretrained(out[name])
        tokenizer.save_pretrained(out[name])
    return out


class Step:
    """Forward, backward and AdamW's step of a model, by `log_probs` of a batch's parts."""

    def __init__(self, path: str, attention: str):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = 0  # that one step computes

    def take(self, log_probs) -> None:
        self.tokens = 0
        for computed, found in log_probs:
            (-found.sum() / 1000).backward()
            self.tokens += computed
        self.optimizer.step()
        self.optimizer.zero_grad()


def packed(step: Step, micros: list):
    """Log-probs of micro-batches, each with the tokens that it computes."""
    policy = Policy(step.model)
    return lambda: ((m.layout.tokens, policy(m.inputs, m.layout, m.predict, m.labels, 1.0, "none")[0]) for m in micros)


def one_at_a_time(step: Step, batch: Batch):
    """The same of one sequence at a time, by transformers' own forward pass."""

    def log_probs():
        for number, prompt in enumerate(batch.prompts):
            response = batch.token[tokens_of(batch, torch.tensor([number]))].long()
            ids = torch.cat([torch.tensor(prompt.tolist()), response])[None]
            logits = step.model(input_ids=ids, logits_to_keep=len(response) + 1, use_cache=False).logits[0, :-1]
            yield ids.shape[1], logits.log_softmax(-1).gather(1, response[:, None])

    return log_probs


def measure(args: Args, folder: str, ranks: Ranks) -> dict:
    budget, paths = args.budget, save_models(folder, *SIZES[args.size])
    flags = ["--model", paths["hybrid"], "--max-response-length", str(budget), "--train-batch-size", str(GROUPS)]
    flags += ["--max-prompt-length", str(max(64, budget))]
    sync = read(train_sync.Args, args=flags)
    learner = Learner(paths["hybrid"], sync.learner, ranks, total_steps=1000)
    batch = Batch.of(make_groups(64, budget)[:GROUPS])
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), learner.args.max_tokens_per_micro_batch, ranks)
    own, dense, theirs = Step(paths["hybrid"], ATTENTION), Step(paths["dense"], ATTENTION), Step(paths["hybrid"], "sdpa")
    alone, rows, of_dense = one_at_a_time(theirs, batch), packed(own, micros), packed(dense, micros)

    def update() -> None:
        given = Batch.of(make_groups(64, budget)[:GROUPS], Division.of(sync, learner))
        train_sync.learn(sync, learner, given, Timers())

    sides = {"one at a time": lambda: theirs.take(alone()), "packed": lambda: own.take(rows())}
    sides |= {"update": update, "dense": lambda: dense.take(of_dense())}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in Rounds(args.rounds, args.minutes):
        for side, take in sides.items():
            started = time.perf_counter()
            take()
            if number:
                seconds[side].append(time.perf_counter() - started)
    parameters = {name: sum(p.numel() for p in step.model.parameters()) for name, step in (("hybrid", own), ("dense", dense))}
    return {"parameters": parameters, "computed": {"one at a time": theirs.tokens, "packed": own.tokens}, "seconds": seconds}


def main(args: Args, ranks: Ranks) -> None:
    here = setting("transformers", threads=torch.get_num_threads(), budget=args.budget)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, folder, ranks)
    rows, seconds = [], found["seconds"]
    for side, values in seconds.items():
        size = found["parameters"]["dense" if side == "dense" else "hybrid"]
        tokens = found["computed"]["one at a time" if side == "one at a time" else "packed"]
        rows.append([side, f"{size / 1e6:.1f}M", f"{tokens:,}", over(values), over(ratios(values, seconds["packed"]))])
    text = table(["side", "model", "tokens computed", "seconds a step", "over packed"], rows)
    write("hybrid", {"setting": here} | found, f"{text}\n\n{words(here)}; interleaved rounds, median (min - max)", args.out)
    print(f"update over packed: {statistics.median(ratios(seconds['update'], seconds['packed'])):.2f}", flush=True)


if __name__ == "__main__":
    arguments = tyro.cli(Args, description=__doc__)
    process.run(lambda ranks: main(arguments, ranks))
