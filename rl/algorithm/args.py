"""The algorithm's flags, and what they imply. The algorithm itself is in the scripts, the formulas in losses.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import losses
from rl.errors import UserError
from rl.parts import Part
from rl.ranges import Content, Range, flag

Bounds = tuple[float | None, float]  # (None, cap) or a band
Criterion = tuple[str, str, float, float]  # level, divergence, low, high: see losses.rollout_rejection_mask
# The numbers of a loss that have a flag of their own: keyword -> field of LossArgs. All others are given by --loss-args
OWN_FLAGS = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "clip_c": "clip_ratio_c"}


@dataclass(frozen=True)
class RolloutCorrectionArgs(Part):
    """Corrections for tokens to which generator and learner give different probabilities."""

    _field = "correction"

    rollout_is: Literal[losses.IS_LEVELS] | None = None
    """Importance sampling: weight tokens by the ratio of the learner's probability to the generator's, at this level."""
    rollout_is_threshold: str | None = None
    """Cap of the weight ("2.0", the default), or a band outside which the weight is 0 ("0.5_5.0")."""
    rollout_is_batch_normalize: bool = False
    """Scale the weights to a mean of 1 over the batch."""
    rollout_rs: str | None = None
    """Rejection sampling: leave out tokens or responses whose log-probs disagree. Write level_divergence; separate several by
    commas. Levels: token, seq_sum, seq_mean, seq_max, batch; divergences: k1, k2, k3, binary_kl (losses.py)."""
    rollout_rs_threshold: str | None = None
    """A bound for each word of --rollout-rs, separated by commas: a band "0.999_1.001" for k1, a number for the others."""

    @property
    def weight_bounds(self) -> Bounds:
        """The bounds of the importance weights."""
        if not self.rollout_is_threshold:
            return None, 2.0
        from rl.algorithm.words import parse_threshold  # late: few runs correct

        return parse_threshold(self.rollout_is_threshold)

    @property
    def rejection_criteria(self) -> list[Criterion]:
        """The criteria of --rollout-rs; empty without rejection."""
        if not self.rollout_rs:
            return []
        from rl.algorithm.words import parse_criteria

        return parse_criteria(self.rollout_rs, self.rollout_rs_threshold or "")

    @property
    def corrects_rollout(self) -> bool:
        """Whether tokens are weighted or left out depending on the difference between generator and learner."""
        return bool(self.rollout_is or self.rejection_criteria)

    def check(self, args) -> None:
        """Raise UserError for bounds that cannot be parsed."""
        for flags, parsed in {
            "--rollout-is-threshold": "weight_bounds",
            "--rollout-rs, --rollout-rs-threshold": "rejection_criteria",
        }.items():
            try:
                getattr(self, parsed)
            except ValueError as error:
                raise UserError(f"{flags}: {error}.") from None


@dataclass(frozen=True)
class TeacherArgs(Part):
    """Distillation on the policy's own samples, from a second model, or from the policy with the answer in its prompt."""

    _field = "teacher"

    teacher: Annotated[str | None, Content("model")] = None
    """Model to learn from, with the policy's vocabulary: a Hugging Face directory or hub name, or "self" for the policy at the
    beginning of a step."""
    teacher_prompt: str | None = None
    """What the teacher reads instead of the prompt's last message, such as "{prompt} Here is a solution: {answer}". {prompt} is
    that message, {ground_truth} the row's ground truth, any other name a column or a key of extra_info.
    --max-prompt-length also holds for it. By default the teacher reads the policy's prompt."""
    teacher_coef: Annotated[float, Range(above=0)] = 1.0
    """Weight of the KL to the teacher, relative to the rewards."""
    teacher_top_k: Annotated[int, Range(at_least=0)] = 0
    """Compare the two distributions at this many of the teacher's most likely tokens, and at all others together. 0: only at
    the sampled token, as an advantage."""
    teacher_alone: bool = False
    """Rewards do not count: the policy only learns from the teacher."""

    @property
    def has_second_model(self) -> bool:
        return self.teacher not in (None, "self")

    def check(self, args) -> None:
        """Raise UserError for flags that a teacher makes meaningless."""
        if not self.teacher:
            for name in ("teacher_alone", "teacher_top_k"):
                if getattr(self, name):
                    raise UserError(f"{flag(name)}: without --teacher there is no teacher. Add it, or leave the flag out.")
            return
        from rl.algorithm.teacher import check_flags  # late, like all that a plain run does without

        check_flags(args)


@dataclass(frozen=True)
class CriticArgs(Part):
    """The critic of --adv-estimator gae, a second model that is trained to predict returns."""

    _field = "critic"

    critic_model: Annotated[str | None, Content("model")] = None
    """Model that the critic starts from, with the policy's vocabulary: a Hugging Face directory or hub name. By default
    --model."""
    critic_lr: Annotated[float, Range(above=0, at_most=1)] = 1e-4
    """Peak learning rate of the critic. The other flags of the optimizer are the policy's."""
    critic_ppo_epochs: Annotated[int, Range(at_least=1)] = 1
    """The critic's passes over each batch."""
    critic_warmup: Annotated[int, Range(at_least=0)] = 0
    """Training steps at the start in which only the critic learns. The policy's learning rate schedule begins afterwards."""
    lam: Annotated[float, Range(at_least=0, at_most=1)] = 1.0
    """GAE's lambda: 1 compares whole returns with the critic's values, 0 looks one token ahead."""
    cliprange_value: Annotated[float, Range(above=0)] = 0.5
    """How far an update may move the critic's values from the previous ones."""

    def check(self, args) -> None:
        """Raise UserError for flags that cannot be combined with a critic."""
        if not args.loss.needs_critic:
            return
        estimator = f"--adv-estimator {args.loss.adv_estimator}"
        if args.learner.adapted:
            raise UserError(f"{estimator} trains a whole critic, which --lora-rank is there to avoid. Leave one of them out.")
        if args.learner.expert_parallel > 1:
            raise UserError(f"--expert-parallel divides the policy's experts, not a critic's. Leave it out with {estimator}.")


@dataclass(frozen=True)
class LossArgs(Part):
    """Advantages, the policy loss and KL terms."""

    _field = "loss"
    _title = "algorithm"

    adv_estimator: Literal[tuple(losses.ADVANTAGES)] = "grpo"
    """Estimator that turns scores into advantages; each is a function in losses.py."""
    gamma: Annotated[float, Range(at_least=0, at_most=1)] = 1.0
    """Discount of later rewards, for reinforce_pp and gae."""
    loss_mode: Literal[tuple(losses.POLICY_LOSSES)] = "ppo_clip"
    """Policy loss; each is a function in losses.py."""
    loss_agg_mode: Literal[losses.AGGREGATIONS] | None = None
    """How the losses of all tokens become one number. Default: that of the loss's paper."""
    clip_ratio_low: Annotated[float | None, Range(above=0)] = None
    """Lower clip range of the policy ratio. Default: that of the loss's paper. Losses that do not clip ignore it."""
    clip_ratio_high: Annotated[float | None, Range(above=0)] = None
    """Upper clip range of the policy ratio. Default: that of the loss's paper. Losses that do not clip ignore it."""
    clip_ratio_c: Annotated[float | None, Range(above=1)] = None
    """Dual clip: bound of the ratio where the advantage is negative. 3 by default. Losses without a dual clip ignore it."""
    loss_args: tuple[str, ...] = ()
    """Further parameters of the policy loss, as name=value. For sapo: --loss-args tau_pos=1 tau_neg=1.1. The names and
    defaults are those of the function in losses.py."""
    entropy_coeff: Annotated[float, Range()] = 0.0
    """Weight of the bonus for the policy's entropy."""
    kl_loss_coef: Annotated[float, Range(at_least=0)] = 0.0
    """Weight of the KL to the reference policy (the starting model) in the loss, such as 0.001."""
    kl_loss_type: Literal[losses.KL_LOSSES] = "k3"
    """Estimator of the KL (losses.py). With "+" its gradient is also unbiased; k3r also weights stale tokens by their ratio."""
    kl_reward_type: Literal[tuple(losses.KL_ESTIMATORS)] = "k1"
    """Estimator of the KL in the reward."""
    kl_reward_coef: Annotated[float, Range(at_least=0)] = 0.0
    """Weight of the KL to the reference policy that is subtracted from each token's reward, such as 0.001."""
    use_rollout_log_probs: bool | None = None
    """Take the generator's log-probs as the old ones instead of recomputing them, so that the ratio corrects for staleness. By
    default True if batches may be stale, unless a correction or a loss compares the two."""
    filter_groups: bool = False
    """DAPO's dynamic sampling: replace groups whose scores are all equal, which give no signal, with fresh prompts. The
    penalty of --overlong-buffer-len does not count."""
    max_num_gen_batches: Annotated[int, Range(at_least=1)] = 10
    """Rounds of --filter-groups in a step. After them, groups without signal fill the rest of the batch."""

    @property
    def estimator(self) -> losses.Estimator:
        return losses.ADVANTAGES[self.adv_estimator]

    @property
    def policy_loss(self) -> losses.PolicyLoss:
        return losses.POLICY_LOSSES[self.loss_mode]

    @property
    def aggregation(self) -> str:
        return self.loss_agg_mode or losses.default_aggregation(self.adv_estimator, self.loss_mode)

    @property
    def loss_knobs(self) -> dict[str, float]:
        """The numeric parameters for the policy loss: those given by flags that it takes."""
        return self._given_of(self.policy_loss.knobs)

    @property
    def choice_knobs(self) -> dict[str, float]:
        """The numeric parameters for the choice of tokens, in losses that choose some."""
        return self._given_of(self.policy_loss.choice_knobs)

    def _given_of(self, knobs: dict[str, float]) -> dict[str, float]:
        given = {name: getattr(self, field) for name, field in OWN_FLAGS.items()}
        for word in self.loss_args:
            name, _, value = word.partition("=")
            given[name] = float(value)
        return {name: value for name, value in given.items() if name in knobs and value is not None}

    @property
    def needs_reference(self) -> bool:
        return self.kl_loss_coef > 0 or self.kl_reward_coef > 0

    @property
    def needs_greedy(self) -> bool:
        """Whether the estimator compares with a greedy response, which is sampled with each group."""
        return "baseline" in self.estimator.inputs

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator compares with a critic's values."""
        return "value" in self.estimator.inputs

    @property
    def compares_itself(self) -> bool:
        """Whether the loss itself weights tokens by the learner's probability over the generator's."""
        return "rollout_log_prob" in self.policy_loss.inputs

    def hint(self, unknown: Sequence[str]) -> str:
        """Return a sentence for each unknown flag that is a number of a loss or an estimator, or an earlier switch."""
        from rl.algorithm.words import hint_of  # late: it is for an error

        words = (word.partition("=")[0] for word in unknown if word.startswith("--"))
        return "".join(hint_of(word, self.loss_mode, OWN_FLAGS) for word in words)

    def check(self, args) -> None:
        """Raise UserError, with the reason, for flags that contradict each other."""
        try:
            losses.check_combination(self.adv_estimator, self.loss_mode, self.aggregation)
        except ValueError as error:
            raise UserError(f"--adv-estimator, --loss-mode, --loss-agg-mode: {error}") from None
        estimator = self.estimator
        if missing := {*estimator.inputs} - {"baseline", "value"}:
            raise UserError(
                f"--adv-estimator {self.adv_estimator} takes {' and '.join(sorted(missing))}, which the scripts do not "
                "compute. examples/forks has a diff that adds it."
            )
        if estimator.group_of_one == "zero" and args.sampling.rollout_n == 1 and not args.teacher.teacher_alone:
            raise UserError(
                f"--adv-estimator {self.adv_estimator} compares the responses to one prompt: with --rollout-n 1 every "
                "advantage is 0 and nothing is learnt. Give --rollout-n at least 2."
            )
        if self.filter_groups and args.sampling.rollout_n == 1:
            raise UserError(
                "--filter-groups keeps the groups whose scores differ: with --rollout-n 1 there are none, and every group is "
                "replaced. Give --rollout-n at least 2, or leave --filter-groups out."
            )
        self._check_old_log_probs(args)
        if self.loss_args:
            from rl.algorithm.words import check_loss_args  # late: few losses need numbers of their own

            check_loss_args(self.loss_args, self.loss_mode, OWN_FLAGS)

    def _check_old_log_probs(self, args) -> None:
        """Raise UserError unless the log-probs that loss and correction compare exist, and are only compared once."""
        if self.use_rollout_log_probs and args.correction.corrects_rollout:
            raise UserError(
                "--rollout-is and --rollout-rs compare recomputed log-probs with the generator's; with --use-rollout-log-probs "
                "there are none. Leave one of the two out."
            )
        if self.compares_itself and (self.use_rollout_log_probs or args.correction.rollout_is):
            raise UserError(
                f"--loss-mode {self.loss_mode} weighs tokens by recomputed over generator's log-probs by itself: leave "
                "--use-rollout-log-probs and --rollout-is out."
            )
        has_ratio = self.policy_loss.has_ratio
        if not has_ratio and args.schedule.trains_stale and not args.old_is_rollout and not args.correction.rollout_is:
            raise UserError(
                f"--loss-mode {self.loss_mode} has no ratio: its gradient is wrong for responses that older weights sampled, "
                "unless they are weighed. Leave --use-rollout-log-probs False out, or add --rollout-is token or sequence."
            )
