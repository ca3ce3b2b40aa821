"""GRPO and its kin, synchronously: every rank generates, then every rank learns.

    python train_sync.py                                                    # the demo, on whatever this machine has
    torchrun --standalone --nproc-per-node 2 train_sync.py --model Qwen/Qwen2.5-0.5B-Instruct \\
        --train-files gsm8k/train.parquet --val-files gsm8k/test.parquet --max-response-length 512 --lr 1e-6

The algorithm stands in `main`, top to bottom: generate -> score -> advantage -> update -> publish. The formulas are in
losses.py. Left out here: generating while learning (train_one_step_off.py, train_async.py).
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
from rl.batch import Batch, Group, MicroBatch, micro_batches
from rl.checkpoint import CheckpointArgs
from rl.data import DataArgs, PromptDataset, PromptOrder
from rl.engine import EngineArgs, make_engine
from rl.errors import UserError
from rl.generator import Generator, all_events, event_metrics, gather_groups, validate_on_all_ranks, validation_metrics
from rl.identity import Identity
from rl.learner import Learner, LearnerArgs, TokenMeans
from rl.lockstep import Team
from rl.pretrained import check_model, load_tokenizer, resolve
from rl.ranges import Range
from rl.run import LogArgs, Run
from rl.saver import Saver
from rl.scoring import RewardArgs, ScoringPool, check_sources
from rl.signals import stop_requested
from rl.timers import gather_ledgers
from rl.watchdog import WatchdogArgs


@dataclass
class Args(AlgorithmArgs, DataArgs, RewardArgs, EngineArgs, LearnerArgs, LogArgs, CheckpointArgs, WatchdogArgs):
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

    def total_steps(self, num_prompts: int) -> int:
        """Steps to train on so many training prompts."""
        if self.total_epochs is None:
            return self.total_training_steps
        return max(1, self.total_epochs * num_prompts // self.train_batch_size)

    def check(self) -> None:
        """Raises UserError for flags that cannot work."""
        mini = self.ppo_mini_batch_size or self.train_batch_size
        if self.train_batch_size % mini:
            raise UserError(
                f"--train-batch-size {self.train_batch_size} is not divisible by --ppo-mini-batch-size {mini}: "
                "every prompt must be trained. Choose a divisor."
            )
        if self.train_batch_size < dist.launched_ranks():
            ranks = dist.launched_ranks()
            raise UserError(f"--train-batch-size {self.train_batch_size} gives {ranks} ranks less than a prompt each.")


def generate(args: Args, generator: Generator, ranks: dist.Ranks, ticket: int) -> tuple[list[Group], int, dict[str, float]]:
    """Every rank serves its share of the tickets from `ticket` on; then every rank holds all groups. Groups that teach
    nothing are replaced by fresh tickets with --filter-groups. Returns the groups, the next ticket, and metrics."""
    kept, flat, rounds = [], [], 0
    while len(kept) < args.train_batch_size and rounds < args.max_num_gen_batches:
        rounds += 1
        tickets = range(ticket, ticket + args.train_batch_size - len(kept))
        ticket = tickets.stop
        give_up = stop_requested if args.rollout_tp == 1 else bool  # ranks that share an engine must stay together
        mine = generator.generate(tickets[ranks.rank :: ranks.world_size], give_up)
        for group in gather_groups(mine):
            (kept if group.has_signal or not args.filter_groups else flat).append(group)
    missing = args.train_batch_size - len(kept)
    metrics = {"train/num_gen_batches": rounds, "train/filtered_groups": len(flat), "train/filled_groups": missing}
    return kept + flat[:missing], ticket, metrics


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


def main(args: Args, ranks: dist.Ranks) -> None:
    torch.manual_seed(args.seed)
    path = resolve(args.model)
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    check_model(path, tokenizer, args)
    train_prompts = PromptDataset(args.train_files, "train", tokenizer, args)
    val_prompts = PromptDataset(args.val_files, "val", tokenizer, args) if args.test_freq else None
    check_sources(train_prompts.sources() | (val_prompts.sources() if val_prompts else {}), args)
    order = PromptOrder(len(train_prompts), args.seed, args.shuffle)
    total_steps = args.total_steps(len(train_prompts))
    pool = ScoringPool(args)

    prompts_per_step = args.ppo_mini_batch_size or args.train_batch_size
    optimizer_steps = total_steps * args.ppo_epochs * args.train_batch_size // prompts_per_step
    learner = Learner(path, args, ranks, optimizer_steps, args.temperature, args.needs_reference, args.trust_remote_code)
    max_length = args.max_prompt_length + args.max_response_length
    engine = make_engine(path, args, max_length, args.dtype, ranks.device, args.trust_remote_code)
    kl_control = KLControl(args)

    # Where it goes on from, if it does.
    ticket, identity = 0, Identity(args, "train_sync", path, train_prompts)
    resumed = checkpoint.resume(args, identity, learner, total_steps)
    if done := resumed.step:
        state = resumed.state
        ticket, kl_control.coef = state["ticket"], state["kl_coef"]
        pool.events.update(state["events"] if ranks.is_main else {})
    engine.update(learner.weights(), version=done)
    team = Team(ranks, args.rollout_tp)
    generator = team.generator_type(engine, train_prompts, order, pool, tokenizer, args, args.seed)
    run = Run(args, dist.describe_hardware(), total_steps, ranks.is_main, "train_sync", resumed.origin)
    saver = Saver(args, run, identity, learner, tokenizer, resumed.origin)

    def validate(step: int) -> dict[str, float]:
        with run.timer("testing"):
            rows = validate_on_all_ranks(generator, val_prompts, team.place)
        run.log_generations(step, rows[: args.log_val_generations])
        run.warn_unscored([row["error"] for row in rows if row["error"]])
        metrics = validation_metrics(rows) | {"training/validated_step": step}
        saver.validated(metrics)
        return metrics

    def save(step: int) -> None:
        with run.timer("save_checkpoint"):
            saver.save(step, {"ticket": ticket, "kl_coef": kl_control.coef, "events": all_events(pool)})

    if args.test_freq and args.val_before_train and not done:
        run.log(0, validate(0))
    for step in range(done + 1, total_steps + 1):
        with run.timer("gen"):
            groups, next_ticket, metrics = generate(args, generator, team.place, ticket)
        if dist.stopping():
            saver.leave(step - 1, save)  # this batch, whole or not, will be made again
        engine.sleep()
        batch, tickets, ticket = Batch.of(groups), range(ticket, next_ticket), next_ticket
        if step == done + 1:
            batch.check_scored()
        run.warn_unscored(batch.errors)

        metrics |= learn(args, learner, kl_control, batch, prompts_per_step, run)

        # Publish: the engine samples the next step with the new weights.
        with run.timer("update_weights"):
            engine.update(learner.weights(), version=step)

        metrics |= event_metrics(all_events(pool)) | learner.perf_metrics(batch, run.timer.seconds, ranks.world_size)
        metrics |= {"training/global_step": step, "training/epoch": order(ticket - 1)[0]}
        last = step == total_steps
        if args.test_freq and (last or step % args.test_freq == 0):
            metrics |= validate(step)
        run.log_tickets(step, batch.tickets, filtered=sorted({*tickets} - {*batch.tickets}))
        run.log(step, metrics | gather_ledgers("rank", run.timer))
        if last or (args.save_freq and step % args.save_freq == 0):
            save(step)
    pool.close()
    run.finish(saver.finish(total_steps))


if __name__ == "__main__":
    args = flags.parse(Args, __doc__)
    process.run(lambda ranks: main(args, ranks), join=lambda: dist.init(args.hang_timeout))
