"""The conditions under which each flag has an effect with the other flags: one table, one policy.

The method `check` of a dataclass refuses impossible settings and flags that contradict each other. A flag that is given but
cannot have an effect is not refused: a warning at the start names it. Command lines from verl have many of them, such as
--kl-loss-coef 0.001 --no-use-kl-loss. Left out: flags without an effect on this machine, or with this model or data.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl import flag_words, parts
from rl.ranges import flag
from rl.ranks import launch


@dataclass(frozen=True)
class Need:
    """A condition for a flag to have an effect."""

    words: str | Callable[[Any], str]  # end of "--kl-reward-coef does nothing ...", or a function of the flags
    is_met: Callable[[Any], bool]  # called with the script's flags
    unless: tuple = ()  # values that change nothing, so that no warning is needed


def _with(name: str, unless: tuple = ()) -> Need:
    """Return the need that the flag `name` is on."""
    return Need(f"without {flag(name)}", lambda args: bool(parts.get(args, name)), unless)


def _knob(name: str, chooser: str = "loss_mode", formulas: str = "POLICY_LOSSES") -> Need:
    """Return the need that the formula chosen by the flag `chooser` has this knob. formulas: the name of its table in
    losses.py."""

    def takers() -> list[str]:
        import losses  # late: a replay decides which losses.py is imported

        table = getattr(losses, formulas)
        return [word for word, formula in table.items() if name in formula.knobs | getattr(formula, "choice_knobs", {})]

    words = lambda args: f"with {flag(chooser)} {getattr(args, chooser)} (taken by {', '.join(takers())})"  # noqa: E731
    return Need(words, lambda args: getattr(args, chooser) in takers())


def _no_policy_loss(args) -> bool:
    """Return whether the policy loss is 0: no token has an advantage, and the loss has no other term."""
    return args.teacher_alone and args.teacher_top_k and not args.use_kl_in_reward


def _has_other_term(args) -> bool:
    """Return whether the policy loss has a term without an advantage."""
    import losses  # late, as above

    loss = losses.POLICY_LOSSES[args.loss_mode]
    return bool(loss.trains_all or loss.chooses)


def _aggregates(args, *tables: str) -> bool:
    """Return whether the aggregation is that of the chosen formula. tables: of losses.py; the first one has the formula."""
    import losses  # late, as above

    chosen = {"POLICY_LOSSES": args.loss_mode, "ADVANTAGES": args.adv_estimator}
    first, *others = [getattr(losses, table)[chosen[table]].aggregation for table in tables]
    return args.loss_agg_mode is None and first is not None and not any(others)


def _sums(args) -> str:
    import losses  # late, as above

    by_token = ", ".join(name for name, estimator in losses.ADVANTAGES.items() if estimator.by_token)
    return f"with --adv-estimator {args.adv_estimator}, which adds up a response's rewards (by token: {by_token})"


def _is_by_token(args) -> bool:
    import losses  # late, as above

    return losses.ADVANTAGES[args.adv_estimator].by_token


KL_LOSS, KL_REWARD = _with("use_kl_loss"), _with("use_kl_in_reward")
WEIGHTS = Need("without --rollout-is", lambda args: args.rollout_is is not None, (False,))
REJECTION = Need("without --rollout-rs", lambda args: bool(args.rejection_criteria))
REFERENCE = Need(
    "without --use-kl-loss, --use-kl-in-reward or a model as --teacher",
    lambda args: bool(args.needs_reference or args.has_second_model),
    (False,),
)
NO_STEPS = Need("with --total-training-steps, which overrides it", lambda args: args.total_training_steps is None)
VALIDATION = Need("without --test-freq above 0", lambda args: args.test_freq > 0 or args.val_only, (False, -1, 0))
WANDB = Need("without --logger wandb", lambda args: "wandb" in args.logger, ("disabled",))
VLLM = Need("with --engine embedded", lambda args: args.engine != "embedded")
VLLM_ON = dataclasses.replace(VLLM, unless=(False,))
STALE = Need(
    "without --staleness-threshold above 0 or --publish-every above 1", lambda args: args.schedule.trains_stale, ("off",)
)
TURNS = Need("without --env, --tools, --agent or --serve-policy", lambda args: args.has_environment)
POOL = Need("with --reward over environments, which has the limits of --env", lambda args: not args.scores_environments)
ALONE = "with --teacher-alone"
SCORES = Need(f"{ALONE}, where no score counts", lambda args: not args.teacher_alone or args.use_kl_in_reward)
ADVANTAGE = Need(f"{ALONE} and --teacher-top-k, whose loss has no advantage", lambda args: not _no_policy_loss(args))
TERM = dataclasses.replace(ADVANTAGE, is_met=lambda args: not _no_policy_loss(args) or _has_other_term(args))
CRITIC = Need("without --adv-estimator gae", lambda args: args.needs_critic)

# Every other flag has an effect whatever the other flags are, or is refused
NEEDS: dict[str, tuple[Need, ...]] = {
    # the algorithm
    "gamma": (_knob("gamma", "adv_estimator", "ADVANTAGES"), SCORES),
    "adv_estimator": (
        Need(SCORES.words, lambda args: SCORES.is_met(args) or _aggregates(args, "ADVANTAGES", "POLICY_LOSSES"), ("grpo",)),
    ),
    "loss_mode": (Need(ADVANTAGE.words, lambda args: TERM.is_met(args) or _aggregates(args, "POLICY_LOSSES"), ("ppo_clip",)),),
    **dict.fromkeys(("loss_args", "rollout_is"), (TERM,)),
    "clip_ratio_low": (_knob("clip_low"), ADVANTAGE),
    "clip_ratio_high": (_knob("clip_high"), ADVANTAGE),
    "clip_ratio_c": (_knob("clip_c"), ADVANTAGE),
    "kl_loss_coef": (_with("use_kl_loss", unless=(0,)),),
    "kl_loss_type": (KL_LOSS,),
    "kl_reward_type": (KL_REWARD,),
    "kl_reward_coef": (_with("use_kl_in_reward", unless=(0,)),),
    "max_num_gen_batches": (_with("filter_groups"),),
    "teacher_coef": (_with("teacher"),),
    **dict.fromkeys(("critic_model", "critic_lr", "critic_ppo_epochs", "critic_warmup", "lam", "cliprange_value"), (CRITIC,)),
    **dict.fromkeys(("sft_coef", "sft_batch_size"), (_with("sft_files"),)),
    "teacher_top_k": (_with("teacher", unless=(0,)),),
    "teacher_prompt": (_with("teacher"),),
    "teacher_max_prompt_length": (_with("teacher_prompt"),),
    "rollout_is_threshold": (WEIGHTS, TERM),
    "rollout_is_batch_normalize": (WEIGHTS, dataclasses.replace(TERM, unless=(False,))),
    "rollout_rs_threshold": (REJECTION,),
    # the run, its data and its validation
    "total_epochs": (NO_STEPS,),
    "total_rollout_steps": (NO_STEPS,),
    **dict.fromkeys(("val_before_train", "val_files", "val_max_samples", "log_val_generations"), (VALIDATION,)),
    **dict.fromkeys(("val_n", "val_temperature"), (dataclasses.replace(VALIDATION, unless=()),)),
    "val_top_p": (
        dataclasses.replace(VALIDATION, unless=()),
        Need("with --val-temperature 0, which is greedy", lambda args: args.val_temperature > 0, (1,)),
    ),
    "truncation": (Need("with --filter-overlong-prompts", lambda args: not args.filter_overlong_prompts, ("error",)),),
    # rewards
    **dict.fromkeys(("reward_timeout", "reward_workers"), (POOL,)),
    "overlong_penalty_factor": (_with("overlong_buffer_len"),),
    # environments
    **dict.fromkeys(("max_turns", "tool_format", "env_timeout"), (TURNS,)),
    "turn_rewards": (dataclasses.replace(TURNS, unless=(False,)), Need(_sums, _is_by_token, (False,))),
    # the engine
    "gpu_memory_utilization": (VLLM,),
    "enforce_eager": (VLLM_ON,),
    # the learner
    **dict.fromkeys(("lora_alpha", "lora_target"), (Need("without --lora-rank", lambda args: args.adapted),)),
    "min_lr_ratio": (Need("with --lr-scheduler-type constant", lambda args: args.lr_scheduler_type == "cosine"),),
    # the record, the job and the schedule
    "project_name": (WANDB,),
    "push_to": (Need("with --val-only, which trains nothing", lambda args: not args.val_only),),
    "partial_rollout": (STALE,),
}
# replay.py repeats only the learner of a recorded run; these flags belong to the parts that it leaves out
NOT_REPLAYED = {"test_freq", "val_before_train", "log_val_generations", "record_samples", "resume_mode"}
NOT_REPLAYED |= {"generators", "val_only", "push_to"}


def given(flags: type, words: Sequence[str]) -> set[str]:
    """Return the fields of the dataclass and its parts whose flags are on the command line."""
    fields = {*parts.leaves(flags)}
    today = flag_words.current(words, fields)
    names = {word[2:].partition("=")[0].replace("-", "_") for word in today if word.startswith("--")}
    return fields & (names | {name.removeprefix("no_") for name in names})


def without_effect(args, names: Iterable[str]) -> dict[str, str]:
    """Return the flags among `names` that cannot have an effect, each with a sentence (without a full stop) that says so."""
    found = {}
    for name in [name for name in parts.leaves(type(args)) if name in NEEDS and name in {*names}]:
        missing = [need for need in NEEDS[name] if parts.get(args, name) not in need.unless and not _is_met(need, args)]
        words = [need.words if isinstance(need.words, str) else need.words(args) for need in missing]
        if words:
            found[name] = f"{flag(name)} does nothing {' and '.join(words)}"
    return found


def _is_met(need: Need, args) -> bool:
    try:
        return bool(need.is_met(args))
    except AttributeError:  # a fork has removed the other flag
        return True


def warn(lines: Iterable[str]) -> None:
    """Print the sentences as one warning line, on the job's first rank."""
    lines = list(lines)
    if lines and launch.here().rank == 0:
        print(f"warning: {'; '.join(lines)}.", file=sys.stderr, flush=True)
