"""GRPO and variants, asynchronously: some ranks generate continuously while others train; token staleness is bounded.

    torchrun --standalone --nproc-per-node 2 train_async.py                 # the demo: one generator, one learner
    torchrun --standalone --nproc-per-node 8 train_async.py --generators 4 --model Qwen/Qwen2.5-0.5B-Instruct \\
        --train-files gsm8k/train.parquet --val-files gsm8k/test.parquet --staleness-threshold 0.5 \\
        --publish-every 4 --ppo-mini-batch-size 32 --max-response-length 512 --lr 1e-6

`generate` is a generator's life, `train` a learner's, top to bottom. The schedule is in rl/samples/schedule.py, the
formulas in losses.py. With --staleness-threshold 0 this trains bit for bit what train_sync.py trains. A step is one fetch of
train_batch_size groups.
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C ends them, too
    from rl.ranks import first_line, signals

    signals.take()
    first_line.say()

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
from rl.generation.generator import make_generator
from rl.learning import forward_only
from rl.learning.batch import Batch, MicroBatch, micro_batches
from rl.learning.learner import FirstLogProbs, Learner, LossMeans
from rl.ranks import dist, process
from rl.ranks.timers import Timers
from rl.rewards.pool import ScoringPool
from rl.samples.channel import Outbox
from rl.samples.claims import draws
from rl.samples.control import ControlBlock
from rl.samples.group import Group
from rl.samples.schedule import ScheduleArgs
from rl.samples.stream import Stream
from rl.samples.tickets import Tickets
from rl.setup import CommonArgs, make_learner, set_up
from rl.split import Split, init_split
from rl.training_run import TrainingRun
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber


@dataclass
class Args(ScheduleArgs, CommonArgs):
    """Flags bear verl's or TRL's names where they have one; each group stands with its component in rl/."""


def make_batch(samples: Stream, step: int) -> list[Group] | None:
    """Waits for the groups of the step: the oldest of those that have come in. None if the run has to stop."""
    while not dist.stopping():
        if groups := samples.take(step):
            return groups
        samples.inbox.receive()
    return None


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
    """A generator's life: take new weights, start what the schedule lets start, step the engine, send what is finished."""
    generator = make_generator(args, job, split.ranks, ScoringPool(args))
    engine, shared = generator.engine, generator.shared
    outbox = Outbox(args, split)
    control, subscriber = ControlBlock(split), Subscriber(split, engine, overlaps=True)
    tickets = Tickets(split.store, args, job.total_steps * args.prompts_per_step, shared.engines, draws(args, split, job))
    validated = int(split.store.get("validated"))
    validating: int | None = None  # the step after which the weights were published that are being validated
    snapshot = 0
    while True:
        # What to do. New weights wait for a validation, which is of one version; no ticket starts while newer weights are due.
        state = subscriber.in_force(control.read(), busy=bool(generator.working))
        in_the_way = not state.stop and (generator.is_validating or (args.partial_rollout == "off" and engine.num_unfinished))
        version = engine.version if in_the_way else state.version
        fresh = tickets.take(generator.free_slots, len(generator.tickets), version, state) if shared.leads else []
        said = [state.stop, version, fresh, state.engines, state.step, tickets.held]
        stop, version, fresh, engines, step, held = shared.agree(said)
        if stop and version == engine.version:  # also the last weights are taken, and verified
            break
        if state.snapshot > snapshot:  # for a checkpoint: what is under way here continues after a restart
            snapshot = state.snapshot
            outbox.send_snapshot(snapshot, generator.unfinished())

        # New weights, between two engine steps.
        if version > engine.version:
            with generator.timer("update_weights"):
                subscriber.receive(version, args.partial_rollout == "recompute")
            outbox.report(generator.timer, generator.pool, subscriber.received)
            if args.validates(version, job.total_steps) and args.step_of(version, job.total_steps) > validated:
                generator.start_validation(split.share_of(engines, args.rollout_tp))
                validating = step

        # Fresh tickets, one engine step, and what is finished with it.
        for ticket in fresh:
            generator.start(ticket, tickets.partial(ticket))
        for group in generator.poll(wait=2e-3, held=held):
            outbox.send_group(group)
        if validating is not None and not generator.is_validating:
            outbox.send_rows(validating, engine.version, generator.take_rows(), parts=split.generators)
            validating = None
        outbox.flush()
    outbox.finish(unfinished=generator.tickets)
    generator.pool.close()


def train(args: Args, split: Split, job: Job) -> None:
    """A learner's life: wait for groups, learn, publish."""
    learner, kl_control, samples = make_learner(args, job, split.ranks), KLControl(args), Stream(args, split)
    publisher = Publisher(learner, split, args.weights_dtype(args.dtype), args.publish)
    run = TrainingRun(args, job, learner, split.learners + split.generators, samples, kl_control=kl_control)
    samples.open()
    publisher.publish(args.version_at(run.done + 1))
    samples.published(args.version_at(run.done + 1), run.done)

    for step in run.steps():
        version = args.version_at(step)
        with run.timer("wait"):
            groups = make_batch(samples, step)
        if groups is None:
            run.leave(step - 1)
        batch = run.begin(groups)

        metrics = learn(args, learner, kl_control, batch, run.timer)

        # Publish: the generators sample with the new weights from their next engine step on.
        if args.publishes_after(step, job.total_steps):
            with run.timer("update_weights"):
                publisher.publish(version + 1)
                samples.published(version + 1, step)

        metrics |= staleness_metrics(batch, version) | samples.metrics(run.timer) | run.validations(step)
        metrics |= {"fully_async/count/current_param_version": version}
        run.log(step, batch, metrics, samples.buffer.take_gone())
        run.save_if_due(step)
    publisher.wait()
    run.finish()


def main(args: Args, split: Split) -> None:
    job = set_up(args, __file__)
    (generate if split.role == "generator" else train)(args, split, job)


if __name__ == "__main__":
    args = flags.parse(Args, __doc__)
    meet = (args.generators, args.hang_timeout, args.node_timeout, args.elastic_generators, args.publish_over)
    process.run(lambda split: main(args, split), join=lambda: init_split(*meet))
