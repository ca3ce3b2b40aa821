"""GRPO and its kin, asynchronously: some ranks generate without a pause, the others learn; how stale a token may be is bounded.

    torchrun --standalone --nproc-per-node 2 train_async.py                 # the demo: one generator, one learner
    torchrun --standalone --nproc-per-node 8 train_async.py --generators 4 --model Qwen/Qwen2.5-0.5B-Instruct \\
        --train-files gsm8k/train.parquet --val-files gsm8k/test.parquet --staleness-threshold 0.5 \\
        --trigger-parameter-sync-step 4 --ppo-mini-batch-size 32 --max-response-length 512 --lr 1e-6

`generate` is a generator's life, `train` a learner's, top to bottom. The schedule stands in rl/schedule.py, the formulas in
losses.py. With --staleness-threshold 0 this trains bit for bit what train_sync.py trains. A step is one fetch of
ppo_mini_batch_size * require_batches groups.
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C ends them, too
    from rl import signals

    signals.take()

from dataclasses import dataclass
from typing import Annotated

import torch

import losses
from rl import checkpoint, dist, flags, process
from rl.algorithm import AlgorithmArgs, KLControl, choose_tokens, correct_rollout
from rl.batch import Batch, MicroBatch, micro_batches
from rl.checkpoint import CheckpointArgs
from rl.data import DataArgs, PromptDataset, PromptOrder
from rl.engine import EngineArgs, make_engine, rollout_dtype
from rl.generator import VALIDATION
from rl.identity import Identity
from rl.learner import Learner, LearnerArgs, TokenMeans
from rl.lockstep import Team
from rl.pretrained import check_model, load_tokenizer, resolve
from rl.ranges import Range
from rl.run import LogArgs, Run
from rl.saver import Saver
from rl.schedule import Board, Intake, ScheduleArgs, Tickets, drawn, open_tickets, staleness_metrics, started
from rl.scoring import RewardArgs, ScoringPool, check_sources
from rl.stream import Inbox, Outbox, Watch, open_ring
from rl.timers import gather_ledgers
from rl.watchdog import WatchdogArgs
from rl.weights import Publisher, Subscriber


@dataclass
class Args(ScheduleArgs, AlgorithmArgs, DataArgs, RewardArgs, EngineArgs, LearnerArgs, LogArgs, CheckpointArgs, WatchdogArgs):
    """Flags bear verl's or TRL's names where they have one. What is not below stands with its component in rl/."""

    model: str = "demo"
    """A Hugging Face directory or hub name; "demo" is made on the spot."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    seed: Annotated[int, Range(at_least=0)] = 0
    """Of the prompt order, the sampling and everything else random."""
    total_training_steps: Annotated[int, Range(at_least=1)] = 200
    """Steps to train: one step is one fetch of ppo_mini_batch_size * require_batches prompts."""
    total_epochs: Annotated[int | None, Range(at_least=1)] = None
    """Train so many passes over the training prompts, in whole steps, instead of --total-training-steps."""
    test_freq: Annotated[int, Range(at_least=0)] = 20
    """Validate every so many steps, at the next publish, and after the last; 0 never does."""
    val_before_train: bool = True
    """Validate before the first step, too."""

    @property
    def trains_stale(self) -> bool:
        return self.staleness_threshold > 0 or self.trigger_parameter_sync_step > 1

    def total_steps(self, num_prompts: int) -> int:
        """Steps to train on so many training prompts."""
        if self.total_epochs is None:
            return self.total_training_steps
        return max(1, self.total_epochs * num_prompts // self.required)

    def step_of(self, version: int, total_steps: int) -> int:
        """The step after which this version of the weights is published."""
        return min(version * self.trigger_parameter_sync_step, total_steps)

    def validates(self, version: int, total_steps: int) -> bool:
        """Whether the generators validate this version of the weights."""
        if not self.test_freq or version == 0:
            return bool(self.test_freq) and self.val_before_train
        step, before = self.step_of(version, total_steps), self.step_of(version - 1, total_steps)
        return step == total_steps or step // self.test_freq > before // self.test_freq

    def validated_by(self, version: int, total_steps: int) -> int | None:
        """The last step whose weights are validated up to this version; None if there is none."""
        versions = (v for v in range(version, -1, -1) if self.validates(v, total_steps))
        return next((self.step_of(v, total_steps) for v in versions), None)


def generate(
    args: Args,
    split: dist.Split,
    path: str,
    prompts: PromptDataset,
    val_prompts: PromptDataset | None,
    order: PromptOrder,
    total_steps: int,
) -> None:
    """A generator's life: take new weights, start what the schedule lets start, step the engine, send what is finished."""
    engine = make_engine(
        path, args, args.max_prompt_length + args.max_response_length, args.dtype, split.ranks.device, args.trust_remote_code
    )
    pool = ScoringPool(args)
    team = Team(split.ranks, args.rollout_tp)
    generator = team.generator_type(engine, prompts, order, pool, prompts.tokenizer, args, args.seed)
    outbox = Outbox(open_ring(split, args.ring_mb), split)
    board, subscriber = Board(split), Subscriber(split, engine)
    tickets = Tickets(split.store, args, total_steps * args.required)
    validation_rows = None  # of the validation under way
    validated, snapshot = int(split.store.get("validated")), 0
    while True:
        # What to do. New weights wait for a validation, which is of one version; no ticket starts while newer weights are due.
        state = board.read()
        in_the_way = generator.is_validating or (args.partial_rollout == "off" and engine.num_unfinished)
        swap = state.version > engine.version and not in_the_way
        version = max(engine.version + 1, state.version if engine.version < 0 else 0) if swap else engine.version
        fresh = tickets.take(generator.room, version, state) if team.leads else []
        stop, swap, fresh = team.agree([state.stop, swap, fresh])
        if stop:
            break
        if state.snapshot > snapshot:  # for a checkpoint: what is under way here goes on after a restart
            snapshot = state.snapshot
            outbox.send_snapshot(snapshot, generator.unfinished() if team.leads else [])

        # New weights, between two engine steps.
        if swap:
            with generator.timer("update_weights"):
                version = state.version if engine.version < 0 else engine.version + 1
                subscriber.receive(version, args.partial_rollout == "recompute")
            outbox.report(generator.timer, pool, subscriber.bytes)
            if args.validates(engine.version, total_steps) and args.step_of(engine.version, total_steps) > validated:
                generator.start_validation(val_prompts, range(team.place.rank, len(val_prompts), team.place.world_size))
                validation_rows = []

        # Fresh tickets, one engine step, and what is finished with it.
        for ticket in fresh:
            generator.start(ticket, tickets.so_far(ticket))
        for key, work in generator.poll(wait=2e-3):
            if key >= VALIDATION:
                validation_rows += generator.rows(key, work)
            else:
                outbox.send_group(generator.group(key, work))
        if validation_rows is not None and not generator.is_validating:
            outbox.send_rows(args.step_of(engine.version, total_steps), validation_rows, parts=split.generators)
            validation_rows = None
        outbox.flush()
    outbox.goodbye(unfinished=[key for key in generator.working if key < VALIDATION and team.leads])
    pool.close()


def next_batch(step: int, inbox: Inbox, intake: Intake, board: Board) -> Batch | None:
    """Waits for the groups of the step: the oldest of those that have come in. None if the run has to stop."""
    while not dist.stopping():
        while inbox.groups:
            intake.add(inbox.groups.popleft())
        groups = intake.take(step)
        board.update(dropped=intake.dropped.total())  # each makes room for another ticket
        if groups is not None:
            return Batch.of(groups)
        inbox.receive()
    return None


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


def train(args: Args, split: dist.Split, path: str, prompts: PromptDataset, order: PromptOrder, total_steps: int) -> None:
    """A learner's life: wait for a batch, learn, publish."""
    ranks, num_ranks = split.ranks, split.learners + split.generators
    optimizer_steps = total_steps * args.ppo_epochs * args.require_batches
    learner = Learner(path, args, ranks, optimizer_steps, args.temperature, args.needs_reference, args.trust_remote_code)
    kl_control = KLControl(args)
    publisher, board = Publisher(learner, split, rollout_dtype(args, args.dtype)), Board(split)
    inbox, intake = Inbox(open_ring(split, args.ring_mb), split), Intake(args, args.filter_groups, args.max_num_gen_batches)
    watch = Watch(split)

    # Where it goes on from, if it does. Tickets that were under way go on, those of which nothing is left begin again.
    again, drawn_before, identity = [], 0, Identity(args, "train_async", path, prompts)
    resumed = checkpoint.resume(args, identity, learner, total_steps)
    if done := resumed.step:
        state = resumed.state
        kl_control.coef, drawn_before = state["kl_coef"], state["drawn"]
        watch.restore(state["watch"])
        inbox.restore(state["inbox"])
        again = intake.restore(state["intake"], resumed.groups, drawn_before)
    if ranks.is_main:
        open_tickets(split.store, drawn_before, drawn_before - len(again), again, resumed.unfinished)
        split.store.set("validated", str(inbox.validated))
    run = Run(args, dist.describe_hardware(), total_steps, ranks.is_main, "train_async", resumed.origin)
    saver = Saver(args, run, identity, learner, prompts.tokenizer, resumed.origin)

    def save(step: int) -> None:
        with run.timer("save_checkpoint"):
            board.update(snapshot=step)
            saver.copy(step)  # while the generators answer
            unfinished = inbox.unfinished_at(step)
            groups = [*intake.waiting.values(), *inbox.groups]
            state = {"kl_coef": kl_control.coef, "intake": intake.state(), "inbox": inbox.state(), "watch": watch.state()}
            saver.save(step, state | {"drawn": drawn(split.store)}, groups, unfinished)

    publisher.publish(args.version_at(done + 1))
    board.update(version=args.version_at(done + 1), dropped=intake.dropped.total())
    for step in range(done + 1, total_steps + 1):
        version = args.version_at(step)
        with run.timer("wait"):
            batch = next_batch(step, inbox, intake, board)
        if batch is None:
            saver.leave(step - 1, save)
        if step == done + 1:
            batch.check_scored()
        run.warn_unscored(batch.errors)

        metrics = learn(args, learner, kl_control, batch, args.ppo_mini_batch_size, run)

        # Publish: the generators sample with the new weights from their next engine step on.
        last = step == total_steps
        if last or step % args.trigger_parameter_sync_step == 0:
            with run.timer("update_weights"):
                publisher.publish(version + 1)
                intake.published()
                board.update(version=version + 1)

        metrics |= staleness_metrics(batch, version) | intake.metrics(started(split.store))
        metrics |= watch.metrics(inbox.reports, run.timer)
        metrics |= learner.perf_metrics(batch, run.timer.seconds, num_ranks)
        metrics |= {"training/global_step": step, "training/epoch": order(intake.newest)[0]}
        metrics |= {"fully_async/count/current_param_version": version, "ring/occupancy": inbox.occupancy}
        saves = last or (args.save_freq and step % args.save_freq == 0)
        with run.timer("testing"):  # what is validated while a checkpoint is taken could not be validated again
            newest = version + 1 if last else args.version_at(step + 1) - 1
            wait_for = args.validated_by(newest, total_steps) if saves else None
            validation = inbox.validation(run, args.log_val_generations, wait_for)
        if validation:
            saver.validated(validation)
            run.say(watch.words())
        run.log_tickets(step, batch.tickets, **intake.take_gone())
        run.log(step, metrics | validation | gather_ledgers("learner", run.timer))
        if saves:
            save(step)

    # The end: every ticket that was started has been trained, was dropped, or is still somewhere.
    publisher.wait()
    board.update(stop=True)
    while len(inbox.goodbyes) < split.generators:
        inbox.receive()
    for group in inbox.groups:
        intake.add(group)
    run.say(intake.account(inbox.unfinished(), started(split.store)))
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
        train(args, split, path, train_prompts, order, total_steps)


if __name__ == "__main__":
    args = flags.parse(Args, __doc__)
    process.run(lambda split: main(args, split), join=lambda: dist.init_split(args.generators, args.hang_timeout))
