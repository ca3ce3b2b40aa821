"""GRPO and variants, asynchronously: some ranks generate continuously while others train; token staleness is bounded.

    torchrun --standalone --nproc-per-node 2 train_async.py                 # the demo: one generator, one learner
    torchrun --standalone --nproc-per-node 8 train_async.py --generators 4 --model Qwen/Qwen2.5-0.5B-Instruct \\
        --train-files gsm8k/train.parquet --max-response-length 512 --lr 1e-6 --publish-every 4 --ppo-mini-batch-size 32

`generate` is a generator's life, `train` a learner's, top to bottom. The formulas are in losses.py. With --staleness-threshold
0 the result is that of train_sync.py, bit for bit.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import losses
from rl import flags
from rl.algorithm import whole_batch
from rl.algorithm.staleness import staleness_metrics
from rl.data.job import Job
from rl.generator_loop import GeneratorLoop
from rl.learning.batch import Batch, Tokens, micro_batches
from rl.learning.learner import Forward, Learner
from rl.ranks import process
from rl.ranks.timers import Timers
from rl.samples.split_schedule import AsyncSchedule
from rl.samples.stream import Stream
from rl.setup import CommonArgs, make_learner, set_up
from rl.split import Split, join
from rl.split_run import SplitRun
from rl.weights.publish import Publisher


@dataclass
class Args(CommonArgs):
    """Flags have verl's or TRL's names if there are any; each group is defined with its component in rl/."""

    schedule: AsyncSchedule = AsyncSchedule()


# actor_loss and learn are the same text in the three scripts, so that a copy of one can change them; a test compares them.


def actor_loss(args: Args, t: Tokens, out: Forward, denominator: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute the loss of one micro-batch from its tokens and the policy's forward pass over them, [n] each. Return terms, the
    micro-batch's shares of the global mini-batch's loss terms and of their sum "loss", and stats, statistics per token, [n]."""
    log_prob = out.log_prob
    # If the old policy is the one being updated, the ratio is 1 and its gradient that of log_prob.
    old = log_prob.detach() if t.old_log_prob is None else t.old_log_prob
    advantage = t.advantage
    if args.teacher.teacher and not args.teacher.teacher_top_k:
        advantage = advantage + args.teacher.teacher_coef * losses.reverse_kl_advantage(log_prob, t.teacher_log_prob, t.mask)
    policy_loss = args.loss.policy_loss
    inputs = {name: getattr(t, name) for name in policy_loss.inputs}
    token_loss, stats = policy_loss(log_prob, old, advantage, t.mask, t.seq, **args.loss.loss_knobs, **inputs)
    if not policy_loss.has_ratio:  # tokens sampled before a publish or an update need a weight
        token_loss = token_loss * losses.importance_weight(log_prob, old, t.mask)
    if t.is_weight is not None:
        token_loss = token_loss * t.is_weight
    stats["ppo_kl"] = old - log_prob.detach()

    def aggregate(x: Tensor) -> Tensor:  # [n] -> the micro-batch's share of the mini-batch's aggregate
        return losses.aggregate(x, t.mask, t.seq, args.loss.aggregation, denominator)

    terms = {"pg_loss": aggregate(token_loss), "entropy": aggregate(out.entropy)}
    loss = terms["pg_loss"]
    if args.loss.entropy_coeff:
        loss = loss - args.loss.entropy_coeff * terms["entropy"]
    if args.loss.kl_loss_coef:
        terms["kl_loss"] = aggregate(losses.kl_penalty(log_prob, t.ref_log_prob, t.mask, args.loss.kl_loss_type, old))
        loss = loss + args.loss.kl_loss_coef * terms["kl_loss"]
    if args.teacher.teacher:
        stats["teacher_kl"] = log_prob - t.teacher_log_prob
    if args.teacher.teacher_top_k:
        terms["teacher_top_kl"] = aggregate(losses.top_k_reverse_kl(out.top_log_prob, t.teacher_top_log_prob, t.mask))
        loss = loss + args.teacher.teacher_coef * terms["teacher_top_kl"]
    return terms | {"loss": loss}, stats


def learn(args: Args, learner: Learner, batch: Batch, timer: Timers) -> dict[str, float]:
    """Train on the batch: one optimizer step for each mini-batch of prompts, --ppo-epochs times. Return metrics."""
    minis = batch.mini_batches(args.schedule.prompts_per_update)  # [b] responses each
    micros = [micro_batches(batch, mini, args.learner.max_tokens_per_micro_batch, learner.ranks) for mini in minis]
    targets = batch.targets  # filled in below, from top to bottom
    learner.begin_step(has_signal=not batch.is_unscored)  # sets the learning rate

    # Before the first update: log-probs under the old policy, if the loss needs them by then, and under other models.
    recompute = args.recompute_old_log_probs(len(minis) * args.learner.ppo_epochs)
    if recompute:
        with timer("old_log_prob"):
            targets.actor_log_prob = learner.log_probs_of("policy", batch, micros)
    targets.old_log_prob = batch.rollout_log_prob if args.old_is_rollout else targets.actor_log_prob
    if args.loss.needs_reference:
        with timer("ref"):
            targets.ref_log_prob = learner.log_probs_of("reference", batch, micros)
    if args.teacher.teacher:
        with timer("teacher"):
            targets.teacher_log_prob, targets.teacher_top = learner.teacher.targets_of(learner, batch, micros)
    if args.loss.needs_critic:
        with timer("values"):
            targets.value = learner.critic.values_of(batch, micros)

    # Rollout correction, rewards, advantages. Each rank has its own tokens; rl/algorithm/whole_batch.py reduces over ranks.
    with timer("adv"):
        metrics = {}
        if args.correction.corrects_rollout:
            targets.is_weight, targets.rejected = whole_batch.correct_rollout(args.correction, batch)
        targets.reward = whole_batch.token_reward(batch)
        if args.teacher.teacher_alone:
            targets.reward = torch.zeros_like(targets.reward)
        if args.loss.kl_reward_coef:
            targets.kl = losses.kl_penalty(targets.old_log_prob, targets.ref_log_prob, batch.trained, args.loss.kl_reward_type)
            targets.reward = targets.reward - args.loss.kl_reward_coef * targets.kl
            metrics["actor/reward_kl_penalty_coeff"] = args.loss.kl_reward_coef
        targets.advantage = whole_batch.advantage(args.loss.estimator, batch, args.loss.gamma, args.critic.lam)
        if args.loss.policy_loss.chooses:
            targets.chosen = whole_batch.chosen(args.loss.policy_loss, batch, minis, args.loss.choice_knobs)
    if args.loss.needs_critic:
        with timer("update_critic"):
            metrics |= learner.critic.learn(batch, minis, micros)

    # The updates. A mini-batch's gradient is accumulated over this rank's micro-batches.
    with timer("update_actor"):
        means = whole_batch.LossMeans(batch)
        if args.skips_backward:  # of responses without an advantage
            micros = whole_batch.forward_only(batch, micros)
        for mini, its_micros in list(zip(minis, micros, strict=True)) * args.learner.ppo_epochs:
            denominator = whole_batch.denominator(batch, mini, args.loss.aggregation, args.sampling.max_response_length)
            for micro in its_micros:
                t = Tokens.of(batch, micro)
                out = learner.forward(micro, "loss" if args.loss.entropy_coeff else "metric", t.teacher_top_token)
                terms, stats = actor_loss(args, t, out, denominator)
                terms["loss"].backward()
                means.add(t, out.log_prob, terms, stats)
            means.end_update(learner.step())
        if not recompute:  # generator and learner are compared anyway
            targets.actor_log_prob = means.first_log_prob
    return metrics | means.metrics()


def generate(args: Args, split: Split, job: Job) -> None:
    """A generator's life: take new weights, start the prompts that the staleness bound allows, sample one token of every
    response, send the scored groups."""
    loop = GeneratorLoop(args, split, job)
    generator = loop.generator
    while todo := loop.decide():  # the same on all ranks of an engine; None when the run stops
        loop.send_snapshot(todo.snapshot)  # the unfinished responses, if a checkpoint asks for them
        if todo.version > generator.engine.version:  # between two tokens: unfinished responses continue under the new weights
            loop.update_weights(todo.version, recompute_kv=args.schedule.partial_rollout == "recompute")
        # The tickets respect the staleness bound: prompt k of the run starts under the weights of version v only if
        #     k - dropped < (v + 1 + staleness_threshold) * prompts_per_publish      (AReaL, arXiv 2505.24298, eq. 3)
        for ticket in todo.tickets:
            loop.start(ticket)
        ended = generator.decode()  # responses, which other processes score while the rest is sampled
        for group in generator.score(ended, idle=todo.idle):
            loop.send(group)
        loop.send_validation()  # if one has ended
        loop.flush()  # what the ring had no room for before
    loop.finish()


def train(args: Args, split: Split, job: Job) -> None:
    """A learner's life: wait for groups, learn, publish."""
    learner = make_learner(args, job, split.ranks)
    samples = Stream(args, split)
    publisher = Publisher(learner, split, args.engine.weights_dtype(args.learner.dtype), announce=samples.published)
    run = SplitRun(args, job, learner, split.learners + split.generators, samples)
    samples.open()
    publisher.publish(args.schedule.version_at(run.done + 1), run.done)

    for step in run.steps():
        version = args.schedule.version_at(step)
        with run.timer("wait"):
            samples.wait(step)  # also returns if the run has to stop
        run.stop_if_asked(step - 1, samples.next(step))
        groups = samples.take(step)  # the oldest ones received
        batch = run.begin(groups)

        metrics = learn(args, learner, batch, run.timer)

        # Publish: the generators sample with the new weights from their next token on.
        if args.schedule.publishes_after(step, job.total_steps):
            with run.timer("update_weights"):
                publisher.publish(version + 1, step)

        metrics |= staleness_metrics(batch, version) | run.receive_validations(step)
        metrics |= run.report(step, batch, metrics, samples.take_gone())
        run.log(step, batch, metrics)
        run.save_if_due(step)
    publisher.wait()
    run.finish()


def main(args: Args, split: Split) -> None:
    job = set_up(args, __file__)
    (generate if split.role == "generator" else train)(args, split, job)


if __name__ == "__main__":
    args = flags.parse(Args, __doc__)
    process.run(partial(main, args), join=partial(join, args))
