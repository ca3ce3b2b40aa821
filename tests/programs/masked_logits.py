"""Started by test_batch.py: two learners train a batch with masked tokens, once as they do, and once with logits
of all tokens, of which the loss leaves out the masked ones.

torchrun ... masked_logits.py MODEL...     a dense model, and a mixture of experts
"""

import dataclasses
import sys

import numpy as np
import torch
from helpers import make_group, relative, whole

import train_sync
from rl import parts
from rl.learning.batch import Batch
from rl.learning.division import Division
from rl.learning.learner import Learner
from rl.learning.micro_batches import MicroBatch
from rl.ranks import dist, process
from rl.ranks.timers import Timers
from rl.samples.group import Group

SIZES = [[9, 14], [12, 3], [8, 8], [20, 5]]
LAYOUTS = {
    "fsdp": {"max_tokens_per_micro_batch": 40},
    "fsdp, checkpointing, kl and entropy": {
        "max_tokens_per_micro_batch": 4096,
        "gradient_checkpointing": True,
        "use_kl_loss": True,
        "entropy_coeff": 0.1,
        "ppo_epochs": 2,
    },
    "ulysses": {"sequence_parallel": 2, "max_tokens_per_micro_batch": 20},
    "ulysses, one row": {"sequence_parallel": 2, "max_tokens_per_micro_batch": 4096, "entropy_coeff": 0.1},
}
ONE_RESPONSE = {"fsdp, one response": LAYOUTS["fsdp"], "ulysses, one response": LAYOUTS["ulysses, one row"]}
OF_EXPERTS = {"experts": {"expert_parallel": 2, "max_tokens_per_micro_batch": 40}}


def make_groups(one_response: bool) -> list[Group]:
    """The first group's responses are trained in part. Of the others one response has a token that is trained. one_response:
    only the first tokens of one response are trained at all."""
    rng, groups = np.random.default_rng(0), []
    for ticket, sizes in enumerate(SIZES):
        group = make_group(ticket, sizes, prompt=int(rng.integers(2, 9)), rng=rng)
        masks = [rng.random(n) < (0.5 if ticket == 0 else 0.0) for n in sizes]
        masks[0][-1] |= ticket == 1
        if one_response:
            masks = [(np.arange(n) < 5) & (number == 1) & (ticket == 0) for number, n in enumerate(sizes)]
        responses = [dataclasses.replace(r, mask=mask) for r, mask in zip(group.responses, masks, strict=True)]
        groups.append(dataclasses.replace(group, responses=responses))
    return groups


def learn(model: str, flags: dict, ranks, one_response: bool) -> tuple[list[torch.Tensor], dict, list[tuple[bool, int]]]:
    """(gradients of all updates, metrics, of each forward pass whether it has responses and its logits here) of a step."""
    args = parts.make(train_sync.Args, model=model, train_batch_size=4, lr_warmup_steps=0, ppo_mini_batch_size=2, **flags)
    learner = Learner(model, args.learner, ranks, 10, with_reference=args.loss.needs_reference)
    gradients, passes, step, log_probs = [], [], learner.step, learner.log_probs

    def recorded() -> dict:
        gradients.append(torch.cat([whole(p.grad).flatten().double() for p in learner.policy.parameters()]))
        return step()

    def noted(model, micro, *rest, **more):
        passes.append((micro.has_responses, len(micro.predict)))
        return log_probs(model, micro, *rest, **more)

    learner.step, learner.log_probs = recorded, noted
    batch = Batch.of(make_groups(one_response), Division.of(args, learner))
    metrics = train_sync.learn(args, learner, batch, Timers())
    metrics.pop("perf/forward_only")  # of the tokens with logits
    return gradients, metrics | learner.router_metrics(), passes


def check(model: str, name: str, flags: dict, ranks) -> None:
    what = (model, flags, ranks, name in ONE_RESPONSE)
    found, metrics, passes = learn(*what)
    of = MicroBatch.of
    MicroBatch.of = staticmethod(
        lambda batch, *rest: of(dataclasses.replace(batch, mask=torch.ones_like(batch.mask)), *rest)  # all logits
    )
    expected, of_all, every = learn(*what)
    MicroBatch.of = staticmethod(of)
    assert sum(n for _, n in passes) < sum(n for _, n in every) and len(passes) == len(every), name
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert relative(a, b) < (1e-6 if number == 0 else 2e-5) or not (a.any() or b.any()), (name, number, relative(a, b))
    assert found[0].any(), name
    differ = {key: (value, of_all[key]) for key, value in metrics.items() if abs(value - of_all[key]) > 1e-5 * (1 + abs(value))}
    assert metrics.keys() == of_all.keys() and not differ, (name, differ)
    trains_none = [int(any(has and not n for has, n in passes)), int(not sum(n for _, n in passes))]
    ever, never = dist.all_reduce_sum(torch.tensor(trains_none)).tolist()
    if ranks.is_main:
        print(f"{name}: {ever} ranks had a pass without logits, {never} no logits at all", flush=True)


def main(ranks) -> None:
    dense, experts = sys.argv[1:]
    for name, flags in (LAYOUTS | ONE_RESPONSE).items():
        check(dense, name, flags, ranks)
    for name, flags in OF_EXPERTS.items():
        check(experts, name, flags, ranks)


process.run(main)
