"""--max-tokens-per-micro-batch auto: the best size of a micro-batch for this machine, in tokens.

On an accelerator it is the most that memory holds: two micro-batches, of one and of two sequences of full length, are computed
forward and backward before the first step, and the rest follows from their peaks, because memory grows linearly with the
tokens. On a CPU, where larger ones take memory and save little time, it is CPU_TOKENS, or a group of full length up to
UNMEASURED_TOKENS. Without measuring it is UNMEASURED_TOKENS: with images, if ranks share a device, and if torch cannot say what
is free. Left out: memory that an engine on the same device frees when it sleeps; only memory that is free at the start counts.
"""

import dataclasses
import json

import numpy as np
import torch

from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import UNMEASURED_TOKENS, Learner
from rl.model import sampling_mask
from rl.ranks.device import devices_are_shared, is_accelerator, memory_left, peak_memory
from rl.ranks.dist import all_gather_bytes
from rl.samples.group import Group, Response

CPU_TOKENS = 4096  # benchmarks/learning/micro_batch.py
SPARE = 0.1  # of the device's memory stays free for the allocator; half of it for a number that is kept
MULTIPLE = 256  # the number is a multiple of this


def settled(args):
    """Return the flags with auto replaced by the unmeasured number, as a plan does."""
    if args.max_tokens_per_micro_batch != "auto":
        return args
    return dataclasses.replace(args, max_tokens_per_micro_batch=max(longest_on_a_rank(args), UNMEASURED_TOKENS))


def longest_on_a_rank(args) -> int:
    """Return the tokens that each rank holds of a prompt and response of full length."""
    return -(-(args.max_prompt_length + args.max_response_length) // args.sequence_parallel)


def choose_micro_batch_tokens(args, learner: Learner) -> int:
    """Return the most tokens of a micro-batch, the same on all learners, and at least one sequence of full length. A resumed
    run keeps its number unless it does not fit here. args: the script's. A collective."""
    longest = longest_on_a_rank(args)
    kept = learner.chosen_tokens
    if not is_accelerator(learner.ranks.device):
        group = args.rollout_n * longest  # in one micro-batch its prompt is computed once
        return max(longest, kept or min(max(CPU_TOKENS, group), UNMEASURED_TOKENS))
    if learner.policy.takes_images or devices_are_shared() or not memory_left():
        return max(longest, kept or UNMEASURED_TOKENS)
    learner.state_tensors()  # leave room for the moments
    _train(args, learner, 1)  # and for the gradients
    one, two = (peak_memory(lambda n=n: _train(args, learner, n)) for n in (1, 2))
    left, total = memory_left()
    for model in (learner, learner.critic) if learner.critic else (learner,):
        model.optimizer.zero_grad()
    learner.router_metrics()  # resets the counters
    spare = (SPARE / 2 if kept else SPARE) * total
    fits = longest + (left - spare - one) / max(1, two - one) * longest
    fits = min(json.loads(of_rank) for of_rank in all_gather_bytes(json.dumps(fits).encode()))
    update = args.schedule.prompts_per_update * args.rollout_n * longest * args.sequence_parallel  # tokens at most
    wanted = kept or max(longest, -(-update // learner.ranks.world_size))
    return max(longest, int(min(fits, wanted)) // MULTIPLE * MULTIPLE)


def _train(args, learner: Learner, sequences: int) -> None:
    """Compute the gradients of a micro-batch of this many sequences of full length. A collective."""
    given = learner.args
    rng = np.random.default_rng(0)
    groups = []
    for ticket in range(sequences * learner.ranks.data_size):
        prompt, response = (rng.integers(0, 16, n).astype(np.int32) for n in (args.max_prompt_length, args.max_response_length))
        zeros = np.zeros(len(response), np.int32)
        most = sampling_mask.most_tokens(args)
        record = np.zeros((len(response), most), np.int32) if most else None
        groups.append(
            Group(ticket, prompt, "", [Response(response, zeros.astype(np.float32), zeros, "length", support=record)])
        )
    batch = Batch.of(groups)
    budget = -(-sequences * (args.max_prompt_length + args.max_response_length) // args.sequence_parallel)
    learner.args = dataclasses.replace(given, router_replay="off")  # there are no routes
    try:
        for micro in micro_batches(batch, torch.arange(len(groups)), budget, learner.ranks):
            out = learner.forward(micro, "loss" if args.entropy_coeff else "metric")
            (out.log_prob.sum() + out.entropy.sum()).mul(1e-6).backward()
            if learner.critic:
                learner.critic.values(micro).sum().mul(1e-6).backward()
    finally:
        learner.args = given
