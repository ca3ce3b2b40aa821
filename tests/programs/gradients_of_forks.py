"""Started by test_forking.py with one of examples/forks: prints how far, relatively, the gradient of what it adds is from
transformers' gradient of the definition, and of one without its term.

python gradients_of_forks.py FORK OUT          score_centering, repetition_penalty or imitation
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from helpers import drain, flat_gradient, make_demonstrations, make_group, padded_loss, relative, response_of, save_model
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import train_async
import train_one_step_off
import train_sync
from rl import parts
from rl.generation.embedded import TransformersEngine
from rl.generation.engine import Request, SamplingParams
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, Division, micro_batches
from rl.learning.learner import Learner
from rl.ranks import process
from rl.ranks.timers import Timers
from rl.samples.group import Group

PROMPTS = [[3, 4, 5], [6, 7], [20, 21, 22, 23]]
TEMPERATURE = 0.7


def sampled(path: str, sampling: SamplingParams, more) -> Batch:
    """Three groups of three responses, whose scores differ. more: (number of a response, output) -> its further fields."""
    engine = TransformersEngine(path, max_length=64, end_tokens={1})
    engine.version = 0
    requests = [Request((i, j), prompt, sampling, 10 * i + j) for i, prompt in enumerate(PROMPTS) for j in range(3)]
    made = {at: replace(response_of(of), score=float(at[1]), **more(at[1], of)) for at, of in drain(engine, requests).items()}
    return Batch.of([Group(i, np.array(p, np.int32), "", [made[i, j] for j in range(3)]) for i, p in enumerate(PROMPTS)])


def gradients(script, args, learner: Learner, batch: Batch) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The gradient of each update, the weights staying what they are, and the step's metrics."""
    found = []

    def step() -> dict[str, float]:
        found.append(flat_gradient(learner.policy).double())
        learner.optimizer.zero_grad()
        return {"actor/grad_norm": 0.0, "actor/lr": 0.0, "actor/skipped_steps": 0}

    learner.step = step
    metrics = script.learn(args, learner, batch, Timers())
    return found, metrics


def rows_of(batch: Batch):
    """Yield of each response its place in the batch, its prompt's length, and the token ids of both [1, T]."""
    at = 0
    for prompt, length in zip(batch.prompts, batch.lengths.tolist(), strict=True):
        own = slice(at, at + length)
        yield own, len(prompt), torch.cat([torch.from_numpy(prompt), batch.token[own]]).long()[None]
        at += length


# ---------------------------------------------------------------------------------------------------- score_centering

TOP_K, TOP_P = 4, 0.8
FLAGS = {"loss_mode": "reinforce", "keep_sampling_mask": True, "top_k": TOP_K, "top_p": TOP_P, "temperature": TEMPERATURE}
FLAGS |= {"score_centering": True, "loss_agg_mode": "token-sum", "train_batch_size": 3, "max_tokens_per_micro_batch": 40}


def centered(batch: Batch, sampler, policy, centers: bool) -> torch.Tensor:
    """The gradient of the sum of -A (lp - sum over v of q_v lp_v), in double precision and by transformers alone. q: of the
    sampler over the tokens that top-k and top-p leave; lp: of the policy over the same tokens."""
    total = 0.0
    for own, front, row in rows_of(batch):
        logits = [model(row).logits[0, front - 1 : -1] / TEMPERATURE for model in (sampler, policy)]
        for theirs, ours, token, advantage in zip(*logits, batch.token[own], batch.targets.advantage[own], strict=True):
            order = theirs.argsort(descending=True)[:TOP_K]
            p = theirs[order].softmax(0)
            kept = order[p.cumsum(0) - p < TOP_P]
            q = theirs[kept].softmax(0).detach()
            expected = (q * ours[kept].log_softmax(0)).sum() if centers else 0.0
            total = total - float(advantage) * (ours[token.long()] - ours[kept].logsumexp(0) - expected)
    policy.zero_grad()
    total.backward()
    return flat_gradient(policy)


def score_centering(out: Path, ranks) -> list[list[float]]:
    """Of a step; the other is that of reinforce without the baseline."""
    path, moved = save_model("qwen3", out / "sampler"), str(out / "moved")
    model = AutoModelForCausalLM.from_pretrained(path)
    sampler = AutoModelForCausalLM.from_pretrained(path).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(moved)
    args = parts.make(train_sync.Args, model=moved, **FLAGS)
    batch = sampled(path, args.sampling.training, lambda _, output: {"support": output.support})
    ((found,), _) = gradients(train_sync, args, Learner(moved, args.learner, ranks, 10, TEMPERATURE), batch)
    assert batch.targets.advantage.count_nonzero() > 10
    return [[relative(found, centered(batch, sampler, model.double(), centers))] for centers in (True, False)]


# ------------------------------------------------------------------------------------------------- repetition_penalty

PENALTY = 1.7


def penalised(model, batch: Batch, penalty: float) -> torch.Tensor:
    """The log-probs [N], in double precision."""
    processor, found = RepetitionPenaltyLogitsProcessor(penalty), []
    for _, front, row in rows_of(batch):
        logits = model(row).logits
        for place in range(front, row.shape[1]):
            seen = row[:, :place].unique(dim=1)  # it scatters, and a token that is there twice would have its gradient twice
            scores = processor(seen, logits[:, place - 1]) / TEMPERATURE
            found.append(scores.log_softmax(-1)[0, row[0, place]])
    return torch.stack(found)


def repetition_penalty(out: Path, ranks) -> list[list[float]]:
    """Of log-probs of the engine and of the learner, and of their gradient. The tokens of one response are partly masked, as
    those of an environment."""
    path = save_model("qwen3", out / "model")
    sampling = SamplingParams(TEMPERATURE, max_tokens=20, repetition_penalty=PENALTY)
    batch = sampled(path, sampling, lambda j, of: {"mask": np.arange(len(of.token_ids)) % 3 > 0 if j == 2 else None})
    learner = Learner(path, LearnerArgs(), ranks, 10, TEMPERATURE, repetition_penalty=PENALTY)
    weight = torch.randn(len(batch.token), generator=torch.Generator().manual_seed(0))
    learned = torch.zeros(len(batch.token))
    for micro in micro_batches(batch, torch.arange(len(batch.lengths)), 40, ranks):
        log_prob = learner.forward(micro, "metric").log_prob
        (log_prob * weight[micro.index]).sum().backward()
        learned[micro.index] = log_prob.detach()
    errors = []
    for penalty in (PENALTY, 1.0):
        model = AutoModelForCausalLM.from_pretrained(path).double()
        expected = penalised(model, batch, penalty)
        (expected * weight)[batch.mask].sum().backward()
        gaps = [float((x - expected.detach())[batch.mask].abs().max()) for x in (batch.rollout_log_prob, learned)]
        errors.append([*gaps, relative(flat_gradient(learner.policy), flat_gradient(model))])
    return errors


# ---------------------------------------------------------------------------------------------------------- imitation

COEF, SIZE = 0.3, 3


def imitation(out: Path, ranks) -> list[list[float]]:
    """Of what its term adds to each update of step 3, which is the coefficient times the loss of the same conversations, and of
    the metric; in each script."""
    from rl.algorithm.imitation import Imitation

    path, rows, errors = save_model("qwen2-untied", out / "model"), make_demonstrations(1, 2, 3, 2, 1, 1, 2), []

    def updates(script, **flags) -> tuple[list[torch.Tensor], dict[str, float]]:
        args = parts.make(script.Args, train_batch_size=4, ppo_mini_batch_size=2, rollout_n=3, **flags)
        learner = Learner(path, args.learner, ranks, 10)
        learner.imitation, learner.steps = Imitation(args, rows), 2
        batch = Batch.of([make_group(ticket, (5, 3, 7)) for ticket in range(4)], Division.of(args, learner))
        return gradients(script, args, learner, batch)

    for script in (train_sync, train_one_step_off, train_async):
        for tokens in (22, 8192):  # one row after the other, or all together
            flags = {"max_tokens_per_micro_batch": tokens, "max_prompt_length": 14, "max_response_length": 8}
            sft = {"sft_files": ("demo",), "sft_coef": COEF, "sft_batch_size": SIZE}
            alone, plain = updates(script, **flags)
            mixed, metrics = updates(script, **flags, **sft)
            order, losses = Imitation(parts.make(script.Args, **flags, **sft), rows).order, []
            for update in range(2):  # steps 1 and 2 have taken two times two updates' rows
                first = (2 * 2 + update) * SIZE
                loss, expected = padded_loss(path, [rows[order(ticket)[1]] for ticket in range(first, first + SIZE)])
                losses.append(loss)
                errors.append(relative(mixed[update] - alone[update], COEF * expected))
            errors.append(abs(metrics.pop("actor/sft_nll") / (sum(losses) / 2) - 1))
            assert metrics == plain, "nothing that is reported of the samples counts them"
    return [errors, []]


process.run(lambda ranks: print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]), ranks))))
