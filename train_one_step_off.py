"""GRPO and its kin, one step off: the learners train on batch k while the generators make batch k + 1 with the weights of k.

    torchrun --standalone --nproc-per-node 2 train_one_step_off.py          # the demo: one generator, one learner
    torchrun --standalone --nproc-per-node 8 train_one_step_off.py --generators 4 --model Qwen/Qwen2.5-3B-Instruct \\
        --train-files gsm8k/train.parquet --val-files gsm8k/test.parquet --train-batch-size 128 --max-response-length 512

`generate` is a generator's life, `train` a learner's, top to bottom. Every batch is made whole by one version of the weights,
so the same flags and seed give the same run. The formulas are in losses.py. Left out here: more than one step of staleness,
and responses that outlive a publish (train_async.py).
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C ends them, too
    from rl import signals

    signals.take()

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

import losses
from rl import checkpoint, dist, flags, process
from rl.algorithm import AlgorithmArgs, KLControl, choose_tokens, correct_rollout
from rl.batch import Batch, Group, MicroBatch, micro_batches
from rl.checkpoint import CheckpointArgs
from rl.data import DataArgs, PromptDataset, PromptOrder
from rl.engine import EngineArgs, make_engine, rollout_dtype
from rl.errors import UserError
from rl.generator import Generator, gather_groups, validate_on_all_ranks
from rl.identity import Identity
from rl.learner import Learner, LearnerArgs, TokenMeans
from rl.lockstep import Team
from rl.pretrained import check_model, load_tokenizer, resolve
from rl.ranges import Range
from rl.run import LogArgs, Run
from rl.saver import Saver
from rl.schedule import Board, SplitArgs, staleness_metrics
from rl.scoring import RewardArgs, ScoringPool, check_sources
from rl.stream import Inbox, Outbox, Watch, open_ring
from rl.timers import gather_ledgers
from rl.watchdog import WatchdogArgs
from rl.weights import Publisher, Subscriber


@dataclass
class Args(SplitArgs, AlgorithmArgs, DataArgs, RewardArgs, EngineArgs, LearnerArgs, LogArgs, CheckpointArgs, WatchdogArgs):
    """Flags bear verl's or TRL's names where they have one. What is not below stands with its component in rl/."""

    model: str = "demo"
    """A Hugging Face directory or hub name; "demo" is made on the spot."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    seed: Annotated[int, Range(at_least=0)] = 0
    """Of the prompt order, the sampling and everything else random."""
    total_training_steps: Annotated[int, Range(at_least=1)] = 200
    """Steps to train: one step is one batch of prompts."""
    total_epochs: Annotated[int | None, Range(at_least=1)] = None
    """Train so many passes over the training prompts, in whole batches, instead of --total-training-steps."""
    train_batch_size: Annotated[int, Range(at_least=1)] = 8
    """Prompts a step, over all ranks; each gets --rollout-n responses."""
    ppo_mini_batch_size: Annotated[int | None, Range(at_least=1)] = None
    """Prompts per optimizer step, over all ranks; by default the whole batch."""
    test_freq: Annotated[int, Range(at_least=0)] = 20
    """Validate every so many steps and after the last; 0 never does."""
    val_before_train: bool = True
    """Validate before the first step, too."""

    @property
    def trains_stale(self) -> bool:
        return True

    def total_steps(self, num_prompts: int) -> int:
        """Steps to train on so many training prompts."""
        if self.total_epochs is None:
            return self.total_training_steps
        return max(1, self.total_epochs * num_prompts // self.train_batch_size)

    def validates(self, version: int, total_steps: int) -> bool:
        """Whether the generators validate this version of the weights, which is published after step `version`."""
        if not self.test_freq or version == 0:
            return bool(self.test_freq) and self.val_before_train
        return version == total_steps or version % self.test_freq == 0

    def check(self) -> None:
        """Raises UserError for flags that cannot work."""
        mini = self.ppo_mini_batch_size or self.train_batch_size
        if self.train_batch_size % mini:
            raise UserError(
                f"--train-batch-size {self.train_batch_size} is not divisible by --ppo-mini-batch-size {mini}: "
                "every prompt must be trained. Choose a divisor."
            )


def make_batch(args: Args, generator: Generator, ranks: dist.Ranks, ticket: int) -> tuple[list[Group], int, dict[str, float]]:
    """Every generator serves its share of the tickets from `ticket` on; then every one holds all groups. Groups that teach
    nothing are replaced by fresh tickets with --filter-groups. Returns the groups, the next ticket, and metrics."""
    kept, flat, rounds = [], [], 0
    while len(kept) < args.train_batch_size and rounds < args.max_num_gen_batches:
        rounds += 1
        tickets = range(ticket, ticket + args.train_batch_size - len(kept))
        ticket = tickets.stop
        mine = generator.generate(tickets[ranks.rank :: ranks.world_size])
        for group in gather_groups(mine):
            (kept if group.has_signal or not args.filter_groups else flat).append(group)
    missing = args.train_batch_size - len(kept)
    metrics = {"train/num_gen_batches": rounds, "train/filtered_groups": len(flat), "train/filled_groups": missing}
    return kept + flat[:missing], ticket, metrics


def generate(
    args: Args,
    split: dist.Split,
    path: str,
    prompts: PromptDataset,
    val_prompts: PromptDataset | None,
    order: PromptOrder,
    total_steps: int,
) -> None:
    """A generator's life: batch k (from 0) with the weights of version k - 1, the newest that are ready when it begins."""
    engine = make_engine(
        path, args, args.max_prompt_length + args.max_response_length, args.dtype, split.ranks.device, args.trust_remote_code
    )
    pool = ScoringPool(args)
    team = Team(split.ranks, args.rollout_tp)
    generator = team.generator_type(engine, prompts, order, pool, prompts.tokenizer, args, args.seed)
    outbox = Outbox(open_ring(split, args.ring_mb), split)
    board, subscriber = Board(split), Subscriber(split, engine)
    start = json.loads(split.store.get("start"))
    ticket = start["ticket"]
    for k in range(start["batch"], total_steps + 2):  # the last two versions are only validated
        version = max(start["version"], k - 1)
        if version > engine.version:
            with generator.timer("wait"):
                board.wait_for(version)
            with generator.timer("update_weights"):
                subscriber.receive(version)
            outbox.report(generator.timer, pool, subscriber.bytes)
            if args.validates(version, total_steps) and version > start["validated"]:
                rows = validate_on_all_ranks(generator, val_prompts, team.place)
                if split.ranks.is_main:
                    outbox.send_rows(version, rows)
        if k < total_steps:
            groups, ticket, metrics = make_batch(args, generator, team.place, ticket)
            if split.ranks.is_main:
                outbox.send_batch(groups, metrics | {"training/epoch": order(ticket - 1)[0]}, ticket)
    outbox.goodbye(unfinished=[])
    pool.close()


def next_batch(inbox: Inbox) -> tuple[list[Group], dict]:
    """Waits for the next batch; returns its groups, and the metrics of its making with the first ticket after it."""
    while not inbox.batches:
        inbox.receive()
    batch = inbox.batches.popleft()
    return [inbox.groups.popleft() for _ in range(batch["groups"])], batch


def actor_loss(args: Args, learner: Learner, batch: Batch, micro: MicroBatch, denominator: float):
    """The loss of one micro-batch (its share of the global mini-batch's) and what to report of it, per token."""
    log_prob, entropy = learner.log_probs(micro, entropy="loss" if args.entropy_coeff else "metric")  # [n], [n]
    if batch.fills_in:
        batch.actor_log_prob[micro.index] = log_prob.detach().cpu()
    old, advantage, mask, seq = batch.select(micro, "old_log_prob", "advantage", "mask", "seq")  # [n] each
    extra = dict(zip(args.loss_inputs, batch.select(micro, *args.loss_inputs), strict=True))
    policy_loss = losses.POLICY_LOSSES[args.loss_mode]
    token_loss, stats = policy_loss(log_prob, old, advantage, mask, seq, **args.loss_knobs, **extra)
    if not policy_loss.has_ratio:  # what older weights, or the step's earlier updates, sampled is weighed all the same
        token_loss = token_loss * losses.importance_weight(log_prob, old, mask)
    if batch.is_weight is not None:
        token_loss = token_loss * batch.select(micro, "is_weight")[0]
    stats |= {"pg_loss": token_loss, "entropy": entropy, "ppo_kl": old - log_prob.detach()}
    if args.entropy_coeff:
        token_loss = token_loss - args.entropy_coeff * entropy
    if args.use_kl_loss:
        (ref,) = batch.select(micro, "ref_log_prob")
        stats["kl_loss"] = losses.kl_penalty(log_prob, ref, mask, args.kl_loss_type)
        token_loss = token_loss + args.kl_loss_coef * stats["kl_loss"]
    stats["loss"] = token_loss
    return losses.aggregate(token_loss, mask, seq, args.aggregation, denominator), stats, mask


def learn(
    args: Args, learner: Learner, kl_control: KLControl, batch: Batch, prompts_per_step: int, run: Run
) -> dict[str, float]:
    """Trains on the batch: one optimizer step for every `prompts_per_step` prompts, --ppo-epochs times. Returns metrics."""
    minis = batch.mini_batches(prompts_per_step)  # [b] responses each
    micros = [micro_batches(batch, mini, args.ppo_max_token_len_per_gpu, learner.ranks) for mini in minis]
    all_micros = [micro for of_mini in micros for micro in of_mini]

    # Log-probs under the policy that starts the step, and under the reference.
    own_pass = args.needs_old_pass(len(minis) * args.ppo_epochs)
    with run.timer("old_log_prob"):
        if own_pass:
            batch.actor_log_prob = learner.log_probs_of("policy", all_micros, len(batch.token))
        else:  # filled in by actor_loss, whose first update is of that policy
            batch.actor_log_prob = torch.zeros(len(batch.token))
            batch.known = batch.among(minis[0])
        batch.old_log_prob = batch.rollout_log_prob if args.old_is_rollout else batch.actor_log_prob
    if args.needs_reference:
        with run.timer("ref"):
            batch.ref_log_prob = learner.log_probs_of("reference", all_micros, len(batch.token))

    # Rollout correction, rewards, advantages: over the whole batch, the same on every rank.
    with run.timer("adv"):
        metrics = correct_rollout(args, batch) if own_pass else {}
        batch.reward = batch.token_reward()
        if args.use_kl_in_reward:
            kl = losses.kl_penalty(batch.old_log_prob, batch.ref_log_prob, batch.mask, args.kl_penalty)
            batch.reward = batch.reward - kl_control.coef * kl
            metrics |= kl_control.update(float(losses.masked_mean(kl, batch.mask)), len(batch.score))
        estimator = losses.ADVANTAGES[args.adv_estimator]
        inputs = (batch.reward, batch.mask, batch.seq, batch.group)
        batch.advantage = estimator(*inputs, **args.estimator_inputs(batch))
        choose_tokens(args, batch, minis)

    # One optimizer step a mini-batch, its gradient gathered from this rank's micro-batches.
    with run.timer("update_actor"):
        means, norms = TokenMeans(), []
        for update, (mini, its_micros) in enumerate(list(zip(minis, micros, strict=True)) * args.ppo_epochs):
            batch.fills_in = update == 0 and not own_pass
            tokens = batch.tokens_of(mini)
            denominator = losses.denominator(
                batch.mask[tokens], batch.seq[tokens], args.aggregation, len(mini), args.max_response_length
            )
            for micro in its_micros:
                loss, stats, mask = actor_loss(args, learner, batch, micro, denominator)
                loss.backward()
                means.add(stats, mask)
            metrics |= learner.step()
            norms.append(metrics["actor/grad_norm"])
        metrics["actor/grad_norm"] = sum(norms) / len(norms)
        if not own_pass:
            dist.all_reduce_sum(batch.actor_log_prob)
            metrics |= correct_rollout(args, batch)
    return metrics | batch.metrics() | {f"actor/{name}": value for name, value in means.over_ranks().items()}


def train(args: Args, split: dist.Split, path: str, prompts: PromptDataset, total_steps: int) -> None:
    """A learner's life: wait for a batch, learn, publish."""
    ranks, num_ranks = split.ranks, split.learners + split.generators
    prompts_per_step = args.ppo_mini_batch_size or args.train_batch_size
    optimizer_steps = total_steps * args.ppo_epochs * args.train_batch_size // prompts_per_step
    learner = Learner(path, args, ranks, optimizer_steps, args.temperature, args.needs_reference, args.trust_remote_code)
    kl_control = KLControl(args)
    publisher, board = Publisher(learner, split, rollout_dtype(args, args.dtype)), Board(split)
    inbox = Inbox(open_ring(split, args.ring_mb), split)
    watch = Watch(split)

    # Where it goes on from, if it does: with the batch that was ready for the step after the checkpoint's.
    start, identity = (
        {"batch": 0, "ticket": 0, "version": 0, "validated": -1},
        Identity(args, "train_one_step_off", path, prompts),
    )
    resumed = checkpoint.resume(args, identity, learner, total_steps)
    if done := resumed.step:
        state, groups = resumed.state, resumed.groups
        kl_control.coef, start = state["kl_coef"], state["start"]
        watch.restore(state["watch"])
        inbox.groups.extend(groups)
        inbox.batches.extend([state["batch"]] if groups else [])
        inbox.restore(state["inbox"])
    if ranks.is_main:
        split.store.set("start", json.dumps(start))
    run = Run(args, dist.describe_hardware(), total_steps, ranks.is_main, "train_one_step_off", resumed.origin)
    saver = Saver(args, run, identity, learner, prompts.tokenizer, resumed.origin)
    made = {"next_ticket": start["ticket"]}

    def save(step: int, groups: Sequence[Group] = ()) -> None:
        """With the batch of the next step, if there is one. What the generators have begun will be made again, the same."""
        with run.timer("save_checkpoint"):
            start = {"batch": step + bool(groups), "ticket": made["next_ticket"], "version": step}
            start["validated"] = inbox.validated
            state = {"kl_coef": kl_control.coef, "watch": watch.state(), "inbox": inbox.state()}
            saver.save(step, state | {"start": start, "batch": made}, groups)

    publisher.publish(done)
    board.update(version=done)
    for step in range(done + 1, total_steps + 1):
        first_ticket = made["next_ticket"]
        with run.timer("wait"):
            groups, made = next_batch(inbox)
        stopping = dist.stopping()
        if step - 1 > saver.step and (stopping or (args.save_freq and (step - 1) % args.save_freq == 0)):
            save(step - 1, groups)
        if stopping:
            saver.leave(step - 1, save)
        batch, metrics = Batch.of(groups), made["metrics"]
        if step == done + 1:
            batch.check_scored()
        run.warn_unscored(batch.errors)

        metrics |= learn(args, learner, kl_control, batch, prompts_per_step, run)

        # Publish: the generators make the batch after the next with the new weights.
        with run.timer("update_weights"):
            publisher.publish(step)
            board.update(version=step)

        metrics |= staleness_metrics(batch, version=step - 1) | watch.metrics(inbox.reports, run.timer)
        metrics |= learner.perf_metrics(batch, run.timer.seconds, num_ranks)
        metrics |= {"training/global_step": step, "ring/occupancy": inbox.occupancy}
        with run.timer("testing"):
            wait_for = step if step == total_steps and args.test_freq else None
            validation = inbox.validation(run, args.log_val_generations, wait_for)
        if validation:
            saver.validated(validation)
            run.say(watch.words())
        run.log_tickets(step, batch.tickets, filtered=sorted({*range(first_ticket, made["next_ticket"])} - {*batch.tickets}))
        run.log(step, metrics | validation | gather_ledgers("learner", run.timer))
    if total_steps > saver.step:
        save(total_steps)
    publisher.wait()
    run.say(watch.words())
    run.finish(saver.finish(total_steps))


def main(args: Args, split: dist.Split) -> None:
    torch.manual_seed(args.seed)
    path = resolve(args.model)
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    check_model(path, tokenizer, args)
    train_prompts = PromptDataset(args.train_files, "train", tokenizer, args)
    val_prompts = PromptDataset(args.val_files, "val", tokenizer, args) if args.test_freq else None
    check_sources(train_prompts.sources() | (val_prompts.sources() if val_prompts else {}), args)
    order = PromptOrder(len(train_prompts), args.seed, args.shuffle)
    total_steps = args.total_steps(len(train_prompts))
    if split.role == "generator":
        generate(args, split, path, train_prompts, val_prompts, order, total_steps)
    else:
        train(args, split, path, train_prompts, total_steps)


if __name__ == "__main__":
    args = flags.parse(Args, __doc__)
    process.run(lambda split: main(args, split), join=lambda: dist.init_split(args.generators, args.hang_timeout))
