"""GRPO and its kin, synchronously: every rank generates, then every rank learns.

    python train_sync.py                                                    # the demo, on whatever this machine has
    torchrun --standalone --nproc-per-node 2 train_sync.py --model Qwen/Qwen2.5-0.5B-Instruct \\
        --train-files gsm8k/train.parquet --val-files gsm8k/test.parquet --max-response-length 512 --lr 1e-6

The algorithm stands in `main`, top to bottom: generate -> score -> advantage -> update -> publish. The formulas are in
losses.py. Left out here: generating while learning (train_one_step_off.py, train_async.py).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import tyro

import losses
from rl import dist
from rl.batch import Batch, Group, MicroBatch, join_records, micro_batches, split_records
from rl.checkpoint import export_hf
from rl.data import DataArgs, PromptDataset, PromptOrder
from rl.engine import EngineArgs, make_engine
from rl.errors import UserError
from rl.generator import Generator, event_metrics, validate_on_all_ranks, validation_metrics
from rl.learner import Learner, LearnerArgs, TokenMeans
from rl.metrics import MetricsArgs, Run
from rl.model import check_lengths, load_config, load_tokenizer, resolve
from rl.rewards import RewardArgs, ScoringPool, check_sources


@dataclass
class Args(DataArgs, RewardArgs, EngineArgs, LearnerArgs, MetricsArgs):
    """Flags bear verl's or TRL's names where they have one. What is not below stands with its component in rl/."""

    model: str = "demo"
    """A Hugging Face directory or hub name; "demo" is made on the spot."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    seed: int = 0
    """Of the prompt order, the sampling and everything else random."""
    total_training_steps: int = 200
    """Steps to train: one step is one batch of prompts."""
    total_epochs: int | None = None
    """Train so many passes over the training prompts, in whole batches, instead of --total-training-steps."""
    train_batch_size: int = 8
    """Prompts a step, over all ranks; each gets --rollout-n responses."""
    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step, over all ranks; by default the whole batch."""
    test_freq: int = 20
    """Validate every so many steps and after the last; 0 never does."""
    val_before_train: bool = True
    """Validate before the first step, too."""
    save_freq: int = 0
    """Export the model every so many steps; it is always exported after the last."""

    adv_estimator: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How scores become advantages (losses.py)."""
    loss_mode: Literal["ppo_clip"] = "ppo_clip"
    """The policy loss (losses.py)."""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
    ] = "token-mean"
    """What the per-token losses are summed over and divided by, globally."""
    clip_ratio_low: float | None = None
    """Lower clip range of the policy ratio; by default that of the loss's paper."""
    clip_ratio_high: float | None = None
    """Upper clip range of the policy ratio; by default that of the loss's paper."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the ratio where the advantage is negative."""
    use_kl_loss: bool = False
    """Add --kl-loss-coef times the KL to the reference policy (the starting model) to the loss."""
    kl_loss_coef: float = 1e-3
    """Weight of the KL loss."""
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL (losses.py)."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_rollout_log_probs: bool = False
    """Take the generator's log-probs as the old ones instead of recomputing them."""

    def total_steps(self, num_prompts: int) -> int:
        """Steps to train on so many training prompts."""
        if self.total_epochs is None:
            return self.total_training_steps
        return max(1, self.total_epochs * num_prompts // self.train_batch_size)

    def check(self, world_size: int) -> None:
        """Raises UserError for sizes that cannot work."""
        mini = self.ppo_mini_batch_size or self.train_batch_size
        if self.train_batch_size % mini:
            raise UserError(
                f"--train-batch-size {self.train_batch_size} is not divisible by --ppo-mini-batch-size {mini}: "
                "every prompt must be trained. Choose a divisor."
            )
        if self.train_batch_size < world_size:
            raise UserError(f"--train-batch-size {self.train_batch_size} gives {world_size} ranks less than a prompt each.")
        for flag in ("train_batch_size", "rollout_n", "max_response_length", "total_training_steps", "ppo_epochs"):
            if getattr(self, flag) < 1:
                raise UserError(f"--{flag.replace('_', '-')} must be at least 1, it is {getattr(self, flag)}.")


def actor_loss(args: Args, learner: Learner, batch: Batch, micro: MicroBatch, denominator: float):
    """The loss of one micro-batch (its share of the global mini-batch's) and what to report of it, per token."""
    log_prob, entropy = learner.log_probs(micro, entropy="loss" if args.entropy_coeff else "metric")  # [n], [n]
    old, advantage, mask, seq = batch.select(micro, "old_log_prob", "advantage", "mask", "seq")  # [n] each
    clips = {"clip_low": args.clip_ratio_low, "clip_high": args.clip_ratio_high, "clip_c": args.clip_ratio_c}
    token_loss, stats = losses.POLICY_LOSSES[args.loss_mode](log_prob, old, advantage, mask, seq, **clips)
    stats |= {"pg_loss": token_loss, "entropy": entropy}
    if args.entropy_coeff:
        token_loss = token_loss - args.entropy_coeff * entropy
    if args.use_kl_loss:
        (ref,) = batch.select(micro, "ref_log_prob")
        stats["kl_loss"] = losses.kl_penalty(log_prob, ref, mask, args.kl_loss_type)
        token_loss = token_loss + args.kl_loss_coef * stats["kl_loss"]
    stats["loss"] = token_loss
    return losses.aggregate(token_loss, mask, seq, args.loss_agg_mode, denominator), stats, mask


def main(args: Args, ranks: dist.Ranks) -> None:
    args.check(ranks.world_size)
    torch.manual_seed(args.seed)
    path = resolve(args.model)
    config, tokenizer = load_config(path, args.trust_remote_code), load_tokenizer(path, args.trust_remote_code)
    check_lengths(config, args.max_prompt_length, args.max_response_length, args.ppo_max_token_len_per_gpu)
    train_prompts = PromptDataset(args.train_files, "train", tokenizer, args)
    val_prompts = PromptDataset(args.val_files, "val", tokenizer, args) if args.test_freq else None
    check_sources(train_prompts.sources() | (val_prompts.sources() if val_prompts else {}), args)
    order = PromptOrder(len(train_prompts), args.seed, args.shuffle)
    total_steps = args.total_steps(len(train_prompts))
    pool = ScoringPool(args)

    prompts_per_step = args.ppo_mini_batch_size or args.train_batch_size
    optimizer_steps = total_steps * args.ppo_epochs * args.train_batch_size // prompts_per_step
    learner = Learner(path, args, ranks, optimizer_steps, args.temperature, args.use_kl_loss, args.trust_remote_code)
    max_length = args.max_prompt_length + args.max_response_length
    engine = make_engine(path, args, max_length, args.dtype, ranks.device, args.trust_remote_code)
    engine.update(learner.weights(), version=0)
    generator = Generator(engine, train_prompts, order, pool, tokenizer, args, args.seed)
    run = Run(args, dist.describe_hardware(), total_steps, enabled=ranks.is_main, script="train_sync")

    def validate(step: int) -> dict[str, float]:
        with run.timer("testing"):
            rows = validate_on_all_ranks(generator, val_prompts, ranks)
        run.log_generations(step, rows[: args.log_val_generations])
        return validation_metrics(rows)

    if args.test_freq and args.val_before_train:
        run.log(0, validate(0))
    for step in range(1, total_steps + 1):
        # Generate and score: every rank serves its share of the tickets, then every rank holds the whole batch.
        with run.timer("gen"):
            tickets = range((step - 1) * args.train_batch_size, step * args.train_batch_size)
            mine = generator.generate(tickets[ranks.rank :: ranks.world_size])
            shares = dist.all_gather_bytes(join_records([group.to_bytes() for group in mine]))
            batch = Batch.of([Group.from_bytes(record) for share in shares for record in split_records(share)])
            engine.sleep()

        # One optimizer step a mini-batch; this rank's part of each, packed into micro-batches.
        minis = batch.mini_batches(prompts_per_step)  # [b] responses each
        micros = [micro_batches(batch, mini, args.ppo_max_token_len_per_gpu, ranks) for mini in minis]
        all_micros = [micro for of_mini in micros for micro in of_mini]

        # Log-probs under the policy that starts the step, and under the reference.
        with run.timer("old_log_prob"):
            if args.use_rollout_log_probs:
                batch.old_log_prob = batch.rollout_log_prob
            else:
                batch.old_log_prob = learner.log_probs_of("policy", all_micros, len(batch.token))
        if args.use_kl_loss:
            with run.timer("ref"):
                batch.ref_log_prob = learner.log_probs_of("reference", all_micros, len(batch.token))

        with run.timer("adv"):
            estimator = losses.ADVANTAGES[args.adv_estimator]
            batch.advantage = estimator(batch.token_reward(), batch.mask, batch.seq, batch.group)

        with run.timer("update_actor"):
            means = TokenMeans()
            for mini, its_micros in list(zip(minis, micros, strict=True)) * args.ppo_epochs:
                tokens = batch.tokens_of(mini)
                denominator = losses.denominator(
                    batch.mask[tokens], batch.seq[tokens], args.loss_agg_mode, len(mini), args.max_response_length
                )
                for micro in its_micros:
                    loss, stats, mask = actor_loss(args, learner, batch, micro, denominator)
                    loss.backward()
                    means.add(stats, mask)
                optimizer_metrics = learner.step()

        # Publish: the engine samples the next step with the new weights.
        with run.timer("update_weights"):
            engine.update(learner.weights(), version=step)

        metrics = batch.metrics() | optimizer_metrics
        metrics |= {f"actor/{name}": value for name, value in means.over_ranks().items()}
        metrics |= event_metrics(pool) | learner.perf_metrics(batch.total_lengths(), run.timings)
        metrics |= {"training/global_step": step, "training/epoch": order(tickets[-1])[0]}
        last = step == total_steps
        if args.test_freq and (last or step % args.test_freq == 0):
            metrics |= validate(step)
        if last or (args.save_freq and step % args.save_freq == 0):
            with run.timer("save_checkpoint"):
                checkpoint = export_hf(learner, tokenizer, run.dir / f"step_{step:06d}")
        run.log(step, metrics)
    pool.close()
    run.finish(checkpoint)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    dist.run(lambda ranks: main(args, ranks))
