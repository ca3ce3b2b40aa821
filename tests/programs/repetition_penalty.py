"""Started by test_forking.py with the fork repetition_penalty: prints how far log-probs of the engine and of the learner, and
the learner's gradient, are from transformers', and how far from those without the penalty.

python repetition_penalty.py OUT
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
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from rl.generation.embedded.engine import TransformersEngine
from rl.generation.engine import Request, SamplingParams
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.learning.micro_batches import micro_batches
from rl.ranks import dist, process
from rl.samples.group import Group, Response

PENALTY, TEMPERATURE = 1.7, 0.7
PROMPTS = [[3, 4, 5], [6, 7], [20, 21, 22, 23]]


def sampled(path: str) -> list[Group]:
    """Three groups of three responses. The tokens of one are partly masked, as those of an environment."""
    engine = TransformersEngine(path, max_length=64, end_tokens={1})
    engine.version = 0
    sampling = SamplingParams(TEMPERATURE, max_tokens=20, repetition_penalty=PENALTY)
    requests = [Request((i, j), prompt, sampling, 10 * i + j) for i, prompt in enumerate(PROMPTS) for j in range(3)]
    outputs = drain(engine, requests)

    def response(i: int, j: int) -> Response:
        made = response_of(outputs[i, j])
        return replace(made, score=float(j), mask=np.arange(len(made.token_ids)) % 3 > 0 if j == 2 else None)

    return [Group(i, np.array(p, np.int32), "", [response(i, j) for j in range(3)]) for i, p in enumerate(PROMPTS)]


def defined(model, batch: Batch, penalty: float) -> torch.Tensor:
    """The log-probs [N], in double precision."""
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    found = []
    for prompt, response in zip(batch.prompts, batch.token.split(batch.lengths.tolist()), strict=True):
        row = torch.cat([torch.from_numpy(prompt), response]).long()[None]
        logits = model(row).logits
        for place in range(len(prompt), row.shape[1]):
            seen = row[:, :place].unique(dim=1)  # it scatters, and a token that is there twice would have its gradient twice
            scores = processor(seen, logits[:, place - 1]) / TEMPERATURE
            found.append(scores.log_softmax(-1)[0, row[0, place]])
    return torch.stack(found)


def main(ranks: dist.Ranks) -> None:
    path = save_model("qwen3", Path(sys.argv[1]) / "model")
    batch = Batch.of(sampled(path))
    learner = Learner(path, LearnerArgs(), ranks, 10, TEMPERATURE, repetition_penalty=PENALTY)
    weight = torch.randn(len(batch.token), generator=torch.Generator().manual_seed(0))
    learned = torch.zeros(len(batch.token))
    for micro in micro_batches(batch, torch.arange(len(batch.lengths)), 40, ranks):
        log_prob = learner.forward(micro, "metric").log_prob
        (log_prob * weight[micro.index]).sum().backward()
        learned[micro.index] = log_prob.detach()
    own = torch.cat([p.grad.flatten() for p in learner.policy.parameters()]).double()
    errors = []
    for penalty in (PENALTY, 1.0):
        model = AutoModelForCausalLM.from_pretrained(path).double()
        expected = defined(model, batch, penalty)
        (expected * weight)[batch.mask].sum().backward()
        theirs = torch.cat([p.grad.flatten() for p in model.parameters()])
        gaps = [(x - expected.detach())[batch.mask].abs().max() for x in (batch.rollout_log_prob, learned)]
        errors.append([*map(float, gaps), float((own - theirs).norm() / theirs.norm())])
    print(json.dumps(errors))


process.run(main)
