"""The algorithm's flags, and what they imply. The algorithm itself is in the scripts, the formulas in losses.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import losses
from rl.algorithm.critic import CriticArgs
from rl.algorithm.imitation import ImitationArgs
from rl.algorithm.rollout_correction import RolloutCorrectionArgs
from rl.algorithm.teacher import TeacherArgs
from rl.errors import UserError
from rl.ranges import MayChange, Range

CLIPS = {"clip_low": "--clip-ratio-low", "clip_high": "--clip-ratio-high", "clip_c": "--clip-ratio-c"}  # by a loss's keyword


@dataclass
class AlgorithmArgs(TeacherArgs, ImitationArgs, CriticArgs, RolloutCorrectionArgs):
    """Advantages, the policy loss and KL terms."""

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
    use_kl_loss: bool = False
    """Add --kl-loss-coef times the KL to the reference policy (the starting model) to the loss."""
    kl_loss_coef: Annotated[float, Range(at_least=0)] = 1e-3
    """Weight of the KL loss."""
    kl_loss_type: Literal[losses.KL_LOSSES] = "k3"
    """Estimator of the KL (losses.py). With "+" its gradient is also unbiased; k3r also weights stale tokens by their ratio."""
    use_kl_in_reward: bool = False
    """Subtract --kl-reward-coef times the KL to the reference policy from each token's reward."""
    kl_reward_type: Literal[tuple(losses.KL_ESTIMATORS)] = "k1"
    """Estimator of the KL in the reward (--use-kl-in-reward)."""
    kl_reward_coef: Annotated[float, Range(at_least=0)] = 1e-3
    """Weight of the KL in the reward."""
    use_rollout_log_probs: bool | None = None
    """Take the generator's log-probs as the old ones instead of recomputing them, so that the ratio corrects for staleness. By
    default True if batches may be stale, unless a correction or a loss compares the two."""
    backward_without_advantage: MayChange[bool] = False
    """Also compute gradients of responses whose advantages are all 0. These gradients are 0, so by default such responses only
    get a forward pass, for the metrics."""
    filter_groups: bool = False
    """DAPO's dynamic sampling: replace groups whose scores are all equal, which give no signal, with fresh prompts. The
    penalty of --overlong-buffer-len does not count."""
    max_num_gen_batches: Annotated[int, Range(at_least=1)] = 10
    """Rounds of --filter-groups in a step. After them, groups without signal fill the rest of the batch."""

    @property
    def aggregation(self) -> str:
        return self.loss_agg_mode or losses.default_aggregation(self.adv_estimator, self.loss_mode)

    @property
    def loss_knobs(self) -> dict[str, float]:
        """The numeric parameters for the policy loss: those given by flags that it takes."""
        return self._given_of(losses.POLICY_LOSSES[self.loss_mode].knobs)

    @property
    def choice_knobs(self) -> dict[str, float]:
        """The numeric parameters for the choice of tokens, in losses that choose some."""
        return self._given_of(losses.POLICY_LOSSES[self.loss_mode].choice_knobs)

    def _given_of(self, knobs: dict[str, float]) -> dict[str, float]:
        given = {"clip_low": self.clip_ratio_low, "clip_high": self.clip_ratio_high, "clip_c": self.clip_ratio_c}
        for word in self.loss_args:
            name, _, value = word.partition("=")
            given[name] = float(value)
        return {name: value for name, value in given.items() if name in knobs and value is not None}

    @property
    def needs_reference(self) -> bool:
        return self.use_kl_loss or self.use_kl_in_reward

    @property
    def needs_greedy(self) -> bool:
        """Whether the estimator compares with a greedy response, which is sampled with each group."""
        return "baseline" in losses.ADVANTAGES[self.adv_estimator].inputs

    @property
    def old_is_rollout(self) -> bool:
        """Whether the old log-probs are the generator's."""
        if self.use_rollout_log_probs is not None:
            return self.use_rollout_log_probs
        return self.schedule.trains_stale and not self.corrects_rollout and not self.compares_itself

    @property
    def compares_itself(self) -> bool:
        """Whether the loss itself weights tokens by the learner's probability over the generator's."""
        return "rollout_log_prob" in losses.POLICY_LOSSES[self.loss_mode].inputs

    def recompute_old_log_probs(self, updates: int) -> bool:
        """Return whether log-probs of the policy before the step need a separate forward pass. They do not if the old ones are
        the generator's, or for a batch with one update, whose ratio is 1, unless something needs them earlier."""
        chooses = losses.POLICY_LOSSES[self.loss_mode].chooses
        asked = self.corrects_rollout or self.use_kl_in_reward or chooses is not None
        return not self.old_is_rollout and (updates > 1 or asked)

    @property
    def skips_backward(self) -> bool:
        """Whether micro-batches without an advantage only get a forward pass: the loss has no term that trains them."""
        loss = losses.POLICY_LOSSES[self.loss_mode]
        trains_all = self.use_kl_loss or self.entropy_coeff or self.teacher or loss.chooses or loss.trains_all
        return not (trains_all or self.backward_without_advantage)

    @property
    def packs_flat_apart(self) -> bool:
        """Whether groups with equal scores, whose advantages are 0, get separate micro-batches."""
        is_by_group = losses.ADVANTAGES[self.adv_estimator].group_of_one is not None
        return self.skips_backward and is_by_group and not self.use_kl_in_reward

    def hint(self, unknown: Sequence[str]) -> str:
        """Return a sentence for each unknown flag that is a numeric parameter of a loss or an estimator."""
        return "".join(self._hint_of(word.partition("=")[0]) for word in unknown if word.startswith("--"))

    def _hint_of(self, flag: str) -> str:
        name = flag.removeprefix("--").replace("-", "_")
        modes = [mode for mode, loss in losses.POLICY_LOSSES.items() if name in loss.knobs | loss.choice_knobs]
        estimators = [own for own, estimator in losses.ADVANTAGES.items() if name in estimator.knobs]
        if name in CLIPS:
            return f" {flag}: here {CLIPS[name]}."
        if modes:
            mode = self.loss_mode if self.loss_mode in modes else ", ".join(modes)
            return f" {flag} is a number of --loss-mode {mode}: --loss-args {name}=NUMBER."
        if estimators:
            return f" {flag} is a number of --adv-estimator {', '.join(estimators)}, whose default in losses.py holds."
        return ""

    def check(self) -> None:
        """Raise UserError, with the reason, for flags that contradict each other."""
        try:
            losses.check_combination(self.adv_estimator, self.loss_mode, self.aggregation)
        except ValueError as error:
            raise UserError(f"--adv-estimator, --loss-mode, --loss-agg-mode: {error}") from None
        estimator = losses.ADVANTAGES[self.adv_estimator]
        if missing := {*estimator.inputs} - {"baseline", "value"}:
            raise UserError(
                f"--adv-estimator {self.adv_estimator} takes {' and '.join(sorted(missing))}, which the scripts do not "
                "compute. examples/forks has a diff that adds it."
            )
        if estimator.group_of_one == "zero" and self.rollout_n == 1 and not self.teacher_alone:
            raise UserError(
                f"--adv-estimator {self.adv_estimator} compares the responses to one prompt: with --rollout-n 1 every "
                "advantage is 0 and nothing is learnt. Give --rollout-n at least 2."
            )
        if self.filter_groups and self.rollout_n == 1:
            raise UserError(
                "--filter-groups keeps the groups whose scores differ: with --rollout-n 1 there are none, and every group is "
                "replaced. Give --rollout-n at least 2, or leave --filter-groups out."
            )
        self._check_old_log_probs()
        self._check_loss_args()

    def _check_old_log_probs(self) -> None:
        """Raise UserError unless the log-probs that loss and correction compare exist, and are only compared once."""
        if self.use_rollout_log_probs and self.corrects_rollout:
            raise UserError(
                "--rollout-is and --rollout-rs compare recomputed log-probs with the generator's; with --use-rollout-log-probs "
                "there are none. Leave one of the two out."
            )
        if self.compares_itself and (self.use_rollout_log_probs or self.rollout_is):
            raise UserError(
                f"--loss-mode {self.loss_mode} weighs tokens by recomputed over generator's log-probs by itself: leave "
                "--use-rollout-log-probs and --rollout-is out."
            )
        has_ratio = losses.POLICY_LOSSES[self.loss_mode].has_ratio
        if not has_ratio and self.schedule.trains_stale and not self.old_is_rollout and not self.rollout_is:
            raise UserError(
                f"--loss-mode {self.loss_mode} has no ratio: its gradient is wrong for responses that older weights sampled, "
                "unless they are weighed. Leave --use-rollout-log-probs False out, or add --rollout-is token or sequence."
            )

    def _check_loss_args(self) -> None:
        """Raise UserError unless each word of --loss-args names a numeric parameter of the loss."""
        loss = losses.POLICY_LOSSES[self.loss_mode]
        known = {name: value for name, value in (loss.knobs | loss.choice_knobs).items() if name not in CLIPS}
        for word in self.loss_args:
            name, _, value = word.partition("=")
            if name in CLIPS:
                raise UserError(f"--loss-args {word}: this number has a flag of its own, {CLIPS[name]}.")
            if name not in known:
                takes = ", ".join(f"{k}={v:g}" for k, v in known.items()) or "none"
                raise UserError(
                    f"--loss-args {word}: --loss-mode {self.loss_mode} takes {takes} (its defaults). A knob stands behind the "
                    "* of its function in losses.py, with a number as its default."
                )
            try:
                usable = 0 < float(value) < math.inf
            except ValueError:
                usable = False
            if not usable:
                raise UserError(f"--loss-args {word}: write {name}=NUMBER, above 0, such as {name}={known[name]:g}.")
