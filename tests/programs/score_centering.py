"""Started by test_forking.py with the fork score_centering: prints how far the gradient of its learn is from the definition,
relatively, and from that of reinforce without the baseline.

python score_centering.py OUT
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from helpers import drain, response_of, save_model
from transformers import AutoModelForCausalLM

import train_sync
from rl import parts
from rl.generation.embedded.engine import TransformersEngine
from rl.generation.engine import Request
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.ranks import process
from rl.ranks.timers import Timers
from rl.samples.group import Group, Response

TOP_K, TOP_P, TEMPERATURE = 4, 0.8, 0.7
FLAGS = {"loss_mode": "reinforce", "keep_sampling_mask": True, "top_k": TOP_K, "top_p": TOP_P, "temperature": TEMPERATURE}
FLAGS |= {"score_centering": True, "loss_agg_mode": "token-sum", "train_batch_size": 3, "max_tokens_per_micro_batch": 40}


def sampled(path: str, args: train_sync.Args) -> list[Group]:
    """Three groups of three responses, whose scores differ."""
    engine = TransformersEngine(path, max_length=64, end_tokens={1})
    engine.version = 0
    prompts, sampling = [[3, 4, 5], [6, 7], [20, 21, 22, 23]], args.sampling.training
    outputs = drain(engine, [Request((i, j), prompts[i], sampling, 10 * i + j) for i in range(3) for j in range(3)])

    def response(i: int, j: int) -> Response:
        return replace(response_of(outputs[i, j]), score=float(j), support=outputs[i, j].support)

    return [Group(i, np.array(p, np.int32), "", [response(i, j) for j in range(3)]) for i, p in enumerate(prompts)]


def defined(batch: Batch, sampler, policy, centers: bool) -> torch.Tensor:
    """The gradient of the sum of -A (lp - sum over v of q_v lp_v), in double precision and by transformers alone. q: of the
    sampler over the tokens that top-k and top-p leave; lp: of the policy over the same tokens."""
    total, at = 0.0, 0
    for prompt, length in zip(batch.prompts, batch.lengths.tolist(), strict=True):
        own = slice(at, at + length)
        row = torch.cat([torch.from_numpy(prompt), batch.token[own]]).long()[None]
        logits = [model(row).logits[0, len(prompt) - 1 : -1] / TEMPERATURE for model in (sampler, policy)]
        for theirs, ours, token, advantage in zip(*logits, batch.token[own], batch.targets.advantage[own], strict=True):
            order = theirs.argsort(descending=True)[:TOP_K]
            p = theirs[order].softmax(0)
            kept = order[p.cumsum(0) - p < TOP_P]
            q = theirs[kept].softmax(0).detach()
            expected = (q * ours[kept].log_softmax(0)).sum() if centers else 0.0
            total = total - float(advantage) * (ours[token.long()] - ours[kept].logsumexp(0) - expected)
        at += length
    policy.zero_grad()
    total.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def main(ranks):
    path = save_model("qwen3", Path(sys.argv[1]) / "sampler")
    model = AutoModelForCausalLM.from_pretrained(path)
    sampler = AutoModelForCausalLM.from_pretrained(path).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    moved = str(Path(sys.argv[1]) / "moved")
    model.save_pretrained(moved)

    args = parts.make(train_sync.Args, model=moved, **FLAGS)
    learner = Learner(moved, args.learner, ranks, 10, TEMPERATURE)
    batch = Batch.of(sampled(path, args))
    found = []

    def step() -> dict[str, float]:
        found.append(torch.cat([p.grad.flatten() for p in learner.policy.parameters()]).double())
        return {"actor/grad_norm": 1.0}

    learner.step = step
    train_sync.learn(args, learner, batch, Timers())
    plain, expected = (defined(batch, sampler, model.double(), centers) for centers in (False, True))
    assert batch.targets.advantage.count_nonzero() > 10 and len(found) == 1
    print(json.dumps([float((found[0] - other).norm() / other.norm()) for other in (expected, plain)]))


process.run(main)
