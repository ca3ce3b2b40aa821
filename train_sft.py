"""A supervised start: the model learns to write given answers before it is trained by reward.

    python train_sft.py                                                     # the demo's sums
    torchrun --standalone --nproc-per-node 2 train_sft.py --model Qwen/Qwen2.5-0.5B-Instruct --train-files sft.parquet \\
        --val-files sft_val.parquet --lr 1e-5 --total-epochs 2

The algorithm is in `learn`: the mean of -log p over the tokens of all answers of a step. The directories that it saves can be
the --model of the other scripts. Left out: training by reward (train_sync.py and the others).
"""

from dataclasses import dataclass
from functools import partial

import torch

import losses
from rl import flags
from rl.algorithm import whole_batch
from rl.algorithm.whole_batch import LossMeans
from rl.data.job import Job
from rl.learning.batch import Batch, Division, Tokens, micro_batches
from rl.learning.learner import Learner
from rl.ranks import dist, process
from rl.ranks.timers import Timers
from rl.supervised import SupervisedArgs, SupervisedRun, SupervisedSchedule, set_up, to_groups


@dataclass
class Args(SupervisedArgs):
    """Flags have verl's names if there are any; each group is defined with its component in rl/."""

    schedule: SupervisedSchedule = SupervisedSchedule()


def learn(args: Args, learner: Learner, batch: Batch, timer: Timers) -> dict[str, float]:
    """Train on the batch with one optimizer step. Return metrics."""
    learner.begin_step()  # sets the learning rate
    with timer("update_actor"):
        means = LossMeans(batch)
        every = torch.arange(len(batch.lengths))
        denominator = whole_batch.denominator(batch, every, "token-mean", 0)  # trained tokens of all ranks
        for micro in micro_batches(batch, every, args.learner.max_tokens_per_micro_batch, learner.ranks):
            t = Tokens.of(batch, micro)
            log_prob = learner.forward(micro).log_prob  # [n]
            loss = losses.aggregate(-log_prob, t.mask, t.seq, "token-mean", denominator)
            loss.backward()
            means.add(t, log_prob, {"loss": loss}, {"nll": -log_prob})
        means.end_update(learner.step())
    return means.metrics()


def validate(args: Args, learner: Learner, job: Job) -> float:
    """Return the mean of -log p over all tokens of the validation answers. A collective."""
    total = torch.zeros(2, dtype=torch.float64)  # sum of the negative log-probs, and their number
    for first in range(0, len(job.val_prompts), args.schedule.prompts_per_step):
        rows = range(first, min(first + args.schedule.prompts_per_step, len(job.val_prompts)))
        batch = Batch.of(to_groups(job.val_prompts, {row: row for row in rows}), Division.of(args, learner))
        micros = micro_batches(batch, torch.arange(len(batch.lengths)), args.learner.max_tokens_per_micro_batch, learner.ranks)
        nll = -learner.log_probs_of("policy", batch, [micros])
        total += whole_batch.sum_over_ranks(batch, torch.stack([nll[batch.mask].double().sum(), batch.mask.sum()]))
    return float(total[0] / total[1])


def main(args: Args, ranks: dist.Ranks) -> None:
    job = set_up(args, __file__)
    learner = Learner(job.path, args.learner, ranks, job.total_steps, trust_remote_code=args.trust_remote_code, seed=args.seed)
    run = SupervisedRun(args, job, learner, ranks.world_size)
    if job.val_prompts and args.validates(0, job.total_steps) and not run.done:
        run.record.log(0, {"val/nll": validate(args, learner, job)})
    for step in run.steps():
        run.stop_if_asked(step - 1)
        batch = run.batch(step)
        metrics = learn(args, learner, batch, run.timer)
        if job.val_prompts and args.validates(step, job.total_steps):
            with run.timer("testing"):
                metrics["val/nll"] = validate(args, learner, job)
        run.log(step, batch, metrics)
        run.save_if_due(step)
    run.finish()


if __name__ == "__main__":
    args = flags.parse(Args, __doc__)
    process.run(partial(main, args), join=partial(dist.join, args))
