"""GRPO and variants, one step off: the learners train on batch k while the generators make batch k + 1 with the weights of k.

    torchrun --standalone --nproc-per-node 2 train_one_step_off.py          # the demo: one generator, one learner
    torchrun --standalone --nproc-per-node 8 train_one_step_off.py --generators 4 --model Qwen/Qwen2.5-3B-Instruct \\
        --train-files gsm8k/train.parquet --val-files gsm8k/test.parquet --train-batch-size 128 --max-response-length 512

`generate` is a generator's life, `train` a learner's, top to bottom. Every batch is made whole by one version of the weights,
so the same flags and seed give the same run. The formulas are in losses.py. Left out here: more than one step of staleness,
and responses that outlive a publish (train_async.py).
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C ends them, too
    from rl.ranks import first_line, signals

    signals.take()
    first_line.say()

import json
from dataclasses import dataclass

import losses
from rl import flags
from rl.algorithm import whole_batch
from rl.algorithm.kl_control import KLControl
from rl.algorithm.metrics import batch_metrics, staleness_metrics
from rl.algorithm.rollout_correction import correct_rollout
from rl.algorithm.rollout_metrics import rollout_metrics
from rl.algorithm.token_choice import choose_tokens
from rl.data.job import Job
from rl.generation.generator import Generator, make_generator
from rl.learning import delivery, forward_only
from rl.learning.batch import Batch, MicroBatch, micro_batches
from rl.learning.learner import FirstLogProbs, Learner, LossMeans
from rl.ranks import process
from rl.ranks.timers import Timers
from rl.rewards.pool import ScoringPool
from rl.samples import outlines
from rl.samples.channel import Outbox
from rl.samples.control import ControlBlock
from rl.samples.group import Group
from rl.samples.schedule import BatchArgs
from rl.samples.stream import Batches
from rl.setup import CommonArgs, make_learner, set_up
from rl.split import Split, SplitArgs, init_split
from rl.training_run import TrainingRun
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber


@dataclass
class Args(SplitArgs, BatchArgs, CommonArgs):
    """Flags bear verl's or TRL's names where they have one; each group stands with its component in rl/."""

    @property
    def trains_stale(self) -> bool:
        return True


def make_batch(args: Args, generator: Generator, ticket: int) -> tuple[list[Group], int, dict[str, float]]:
    """Every engine serves its share of the tickets from `ticket` on; then every rank knows all groups. Groups without signal
    are replaced by fresh tickets with --filter-groups. Returns the groups, the next ticket, and metrics."""
    kept, dropped, rounds, shared = [], [], 0, generator.shared
    while len(kept) < args.train_batch_size and rounds < args.max_num_gen_batches:
        rounds += 1
        tickets = range(ticket, ticket + args.train_batch_size - len(kept))
        ticket = tickets.stop
        for group in outlines.share(generator.generate(tickets[shared.index :: shared.engines])):
            if args.filter_groups and not group.has_signal:
                dropped.append(group)
            else:
                kept.append(group)
    missing = args.train_batch_size - len(kept)  # filled with groups that were dropped: the batch has its size
    metrics = {"train/num_gen_batches": rounds, "train/filtered_groups": len(dropped), "train/filled_groups": missing}
    return kept + dropped[:missing], ticket, metrics


# actor_loss and learn are the same text in the three scripts, so that a copy of one can change them; a test compares them.


def actor_loss(args: Args, batch: Batch, micro: MicroBatch, log_prob, entropy, denominator: float):
    """One micro-batch's loss, from its log_prob and entropy, [n] each: its shares of the terms of the global mini-batch's loss
    and of their sum "loss"; what else to report, per token; and the tokens' mask [n]."""
    advantage, mask, seq = batch.select(micro, "advantage", "mask", "seq")  # [n] each
    # None were computed where this update's own policy is the old one: the ratio is 1, and its gradient that of log_prob.
    old = log_prob.detach() if batch.old_log_prob is None else batch.select(micro, "old_log_prob")[0]
    extra = dict(zip(args.loss_inputs, batch.select(micro, *args.loss_inputs), strict=True))
    policy_loss = losses.POLICY_LOSSES[args.loss_mode]
    token_loss, stats = policy_loss(log_prob, old, advantage, mask, seq, **args.loss_knobs, **extra)
    if not policy_loss.has_ratio:  # what older weights, or the step's earlier updates, sampled is weighed all the same
        token_loss = token_loss * losses.importance_weight(log_prob, old, mask)
    if batch.is_weight is not None:
        token_loss = token_loss * batch.select(micro, "is_weight")[0]
    stats["ppo_kl"] = old - log_prob.detach()

    def share(x):  # [n] -> its share of the mini-batch's aggregate
        return losses.aggregate(x, mask, seq, args.aggregation, denominator)

    terms = {"pg_loss": share(token_loss), "entropy": share(entropy)}
    loss = terms["pg_loss"]
    if args.entropy_coeff:
        loss = loss - args.entropy_coeff * terms["entropy"]
    if args.use_kl_loss:
        (ref,) = batch.select(micro, "ref_log_prob")
        terms["kl_loss"] = share(losses.kl_penalty(log_prob, ref, mask, args.kl_loss_type))
        loss = loss + args.kl_loss_coef * terms["kl_loss"]
    return terms | {"loss": loss}, stats, mask


def learn(args: Args, learner: Learner, kl_control: KLControl, batch: Batch, timer: Timers) -> dict[str, float]:
    """Trains on the batch: one optimizer step a mini-batch of prompts, --ppo-epochs times. Returns metrics."""
    minis = batch.mini_batches(args.prompts_per_update)  # [b] responses each
    micros = [micro_batches(batch, mini, learner.micro_batch_tokens, learner.ranks) for mini in minis]
    updates = list(zip(minis, micros, strict=True)) * args.ppo_epochs

    # Log-probs before the first update: under the old policy, where the loss needs them by then, and under the reference.
    recompute = args.recompute_old_log_probs(len(updates))
    with timer("old_log_prob"):
        if recompute:
            batch.actor_log_prob = learner.log_probs_of("policy", batch, micros)
        batch.old_log_prob = batch.rollout_log_prob if args.old_is_rollout else batch.actor_log_prob
    if args.needs_reference:
        with timer("ref"):
            batch.ref_log_prob = learner.log_probs_of("reference", batch, micros)

    # Rollout correction, rewards, advantages: token tensors are this rank's; rl/algorithm/whole_batch.py reduces over ranks.
    with timer("adv"):
        metrics = {}
        correct_rollout(args, batch)
        batch.reward = batch.token_reward()
        if args.use_kl_in_reward:
            kl = losses.kl_penalty(batch.old_log_prob, batch.ref_log_prob, batch.mask, args.kl_reward_type)
            batch.reward = batch.reward - kl_control.coef * kl
            metrics |= kl_control.update(whole_batch.mean_of_responses(kl, batch), len(batch.score))
        estimator = losses.ADVANTAGES[args.adv_estimator]  # of the batch's reward, mask, seq and group
        batch.advantage = whole_batch.advantage(estimator, batch, **args.estimator_inputs(batch))
        choose_tokens(args, batch, minis)
        forward_only.mark(args, batch, micros)

    # One optimizer step a mini-batch, its gradient gathered from this rank's micro-batches.
    with timer("update_actor"):
        means, norms, first = LossMeans(learner.ranks), [], FirstLogProbs(batch)
        for update, (mini, its_micros) in enumerate(updates):
            denominator = whole_batch.denominator(batch, mini, args.aggregation, args.max_response_length)
            for micro in its_micros:
                log_prob, entropy = learner.log_probs(micro, entropy="loss" if args.entropy_coeff else "metric")  # [n], [n]
                terms, stats, mask = actor_loss(args, batch, micro, log_prob, entropy, denominator)
                terms["loss"].backward()
                means.add(terms, stats, mask)
                if update == 0:
                    first.add(micro, log_prob)
            metrics |= learner.step()
            norms.append(metrics["actor/grad_norm"])
        metrics["actor/grad_norm"] = sum(norms) / len(norms)
        if not recompute:  # generator and learner are compared all the same
            batch.actor_log_prob = first.values
    return metrics | rollout_metrics(args, batch) | batch_metrics(batch) | means.over_ranks("actor", len(updates))


def generate(args: Args, split: Split, job: Job) -> None:
    """A generator's life: batch k (from 0) with the weights of version k - 1, the newest that are ready when it begins."""
    generator = make_generator(args, job, split.ranks, ScoringPool(args))
    outbox = Outbox(args, split)
    control, subscriber = ControlBlock(split), Subscriber(split, generator.engine)
    start = json.loads(split.store.get("start"))
    ticket = start["ticket"]
    for k in range(start["batch"], job.total_steps + 2):  # the last two versions are only validated
        version = max(start["version"], k - 1)
        if version > generator.engine.version:
            with generator.timer("held" if k < job.total_steps else "wait"):
                control.wait_for(version)
            with generator.timer("update_weights"):
                subscriber.receive(version)
            outbox.report(generator.timer, generator.pool, subscriber.received)
            if args.validates(version, job.total_steps) and version > start["validated"]:
                rows = generator.validate()
                if split.ranks.is_main:
                    outbox.send_rows(version, version, rows)
        if k < job.total_steps:
            groups, ticket, metrics = make_batch(args, generator, ticket)
            groups = delivery.to_first(groups)
            if split.ranks.is_main:
                outbox.send_batch(groups, metrics, ticket)
    outbox.finish(unfinished=[])
    generator.pool.close()


def train(args: Args, split: Split, job: Job) -> None:
    """A learner's life: wait for a batch, learn, publish."""
    learner, kl_control, samples = make_learner(args, job, split.ranks), KLControl(args), Batches(args, split)
    publisher = Publisher(learner, split, args.weights_dtype(args.dtype), args.publish)
    run = TrainingRun(args, job, learner, split.learners + split.generators, samples, kl_control=kl_control)
    samples.open()
    publisher.publish(run.done)
    samples.published(run.done, run.done)

    for step in run.steps():
        with run.timer("wait"):
            samples.wait()
        run.save_if_due(step - 1)  # with this batch: the weights that made it are gone
        run.leave_if_stopped(step - 1)
        groups, metrics, filtered = samples.take()
        batch = run.begin(groups)

        metrics |= learn(args, learner, kl_control, batch, run.timer)

        # Publish: the generators make the batch after the next with the new weights.
        with run.timer("update_weights"):
            publisher.publish(step)
            samples.published(step, step)

        metrics |= staleness_metrics(batch, version=step - 1) | samples.metrics(run.timer) | run.validations(step)
        run.log(step, batch, metrics, {"filtered": filtered})
    run.save_if_due(job.total_steps)
    publisher.wait()
    run.finish()


def main(args: Args, split: Split) -> None:
    job = set_up(args, __file__)
    (generate if split.role == "generator" else train)(args, split, job)


if __name__ == "__main__":
    args = flags.parse(Args, __doc__)
    meet = (args.generators, args.hang_timeout, args.node_timeout, None, args.publish_over)
    process.run(lambda split: main(args, split), join=lambda: init_split(*meet))
