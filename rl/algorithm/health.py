"""Warnings about conditions that let a run learn less than it seems to, or something else, without stopping it.

Each kind is printed when it first occurs and whenever its count has grown tenfold.
"""

from collections import Counter

import losses
from rl.algorithm import whole_batch
from rl.algorithm.fates import EQUAL, MASKED, OTHER, REJECTED, TRUNCATED, UNSCORED, Fates, causes
from rl.data.job import Job
from rl.learning.batch import Batch
from rl.record.run import Run

MUCH_REJECTED = 0.8  # share of a step's tokens from which on there is a warning
FEW_EFFECTIVE = 0.3  # effective sample size of the importance weights below which there is a warning
# Why a step has no signal, in a word and in a sentence, and the remedy.
CAUSES = {
    REJECTED: (
        ": rejection",
        "scores differ, but --rollout-rs or --rollout-is-threshold left out the responses that do",
        "Widen the bounds, or bring generator and learner closer together (--rollout-dtype, a lower --staleness-threshold)",
    ),
    UNSCORED: (
        ": not scored",
        "too few responses could be scored",
        "Correct the reward function, or what it needs: the warning of --on-reward-error has its last error",
    ),
    MASKED: (
        ": nothing sampled",
        "the policy sampled a token of one response at most",
        "Find out why environments end before the policy's first token",
    ),
    TRUNCATED: (
        ": cut off",
        "every response ran into --max-response-length, and all score the same",
        "Raise --max-response-length, or check that the model's end token is the one that its answers end with",
    ),
    EQUAL: (": equal scores", "all scores are equal", "Prompts may be too easy or too hard, or the reward broken"),
    OTHER: ("", "scores differ, but --adv-estimator makes every advantage 0", "Take another one"),
}


class Health:
    """The warnings of a run, from each of its steps."""

    def __init__(self, args, job: Job, record: Run, skipped: int):
        """skipped: optimizer steps that a resumed run has skipped before."""
        self.args, self.job, self.record = args, job, record
        self.counts: Counter[str] = Counter()
        self._skipped = skipped

    def at_start(self) -> None:
        """Warn of problems that are known before the first step."""
        right = self.args.truncation == "right"
        lost = "their ends, and so the chat template's call for an answer" if right else "their beginnings"
        detail = f"--truncation {self.args.truncation} cuts off {lost}."
        for which, prompts in (("training", self.job.prompts), ("validation", self.job.val_prompts)):
            count = prompts.truncated if prompts else 0
            self._warn("cut_prompts", f"{which} prompts longer than --max-prompt-length", count, detail)

    def of_step(self, step: int, batch: Batch, metrics: dict[str, float], fates: Fates | None = None) -> dict[str, int]:
        """Warn of the step's problems; return warnings/*. fates: the batch's, if they are known already. A collective."""
        args = self.args
        responses = len(batch.lengths)
        fates = fates or Fates.of(batch)
        if args.sampling.truncates and not args.keep_sampling_mask:
            detail = "Their log-probs are of the truncated distribution, the learner's of the full one: ratios and KL are off."
            detail += " Leave these flags out if that matters, or add --keep-sampling-mask, with --top-k."
            self._warn(
                "truncated_sampling",
                "responses sampled with --top-p, --top-k or another rule that leaves tokens out",
                responses,
                detail,
            )
        is_raw = losses.ADVANTAGES[args.adv_estimator].group_of_one == "score" and not args.teacher_alone
        if is_raw and (alone := whole_batch.groups_of_one(batch)):
            detail = f"--adv-estimator {args.adv_estimator} compares within a group: here the advantage is the raw score"
            detail += "." if args.rollout_n == 1 else ", since the others were not trained. With dr_grpo or rloo it is 0."
            self._warn("single_response_groups", "groups with one trained response", alone, detail)
        if not fates.has_signal:
            self._warn_of_no_signal(step, batch, fates)
        self._warn_of_correction(step, metrics, fates)
        if responses and bool(batch.truncated.all()):
            detail = "Raise --max-response-length, or check that the model's end token is the one that its answers end with."
            self._warn("endless_steps", "steps in which every response ran into --max-response-length", 1, detail)
        new = metrics["actor/skipped_steps"] - self._skipped
        self._skipped = metrics["actor/skipped_steps"]
        detail = "Their gradient was not finite: training diverges. Try a lower --lr, or --dtype float32. To look for "
        detail += f"the cause, add --record-samples DIR, and compute the step again: python replay.py RUN --from-step {step}."
        self._warn("skipped_updates", "optimizer steps skipped", new, detail)
        return {f"warnings/{kind}": count for kind, count in self.counts.items()}

    def _warn_of_no_signal(self, step: int, batch: Batch, fates: Fates) -> None:
        """Warn with the cause. If a group's scores differ, the cause of its missing signal is the step's cause, because equal
        scores in other groups are no fault. Otherwise it is the most frequent cause."""
        found = causes(self.args, batch, fates).most_common()
        found.sort(key=lambda item: (item[0] != REJECTED, item[0] != OTHER))
        grouped = losses.ADVANTAGES[self.args.adv_estimator].group_of_one or self.args.needs_greedy
        parts = [(f"{count} of {len(batch.sizes)} groups: " if grouped else "") + CAUSES[cause][1] for cause, count in found]
        chief = found[0][0]
        word, _, remedy = CAUSES[chief]
        detail = f"In step {step}, {'; '.join(parts)}. {remedy}."
        self.counts["no_signal_steps"] += 1
        if chief != OTHER:
            self.counts[f"no_signal/{chief}"] += 1
        self.record.warn(f"steps without any signal{word}", 1, detail)

    def _warn_of_correction(self, step: int, metrics: dict[str, float], fates: Fates) -> None:
        """Warn if the rollout correction leaves little of a step."""
        if fates.rejected_share >= MUCH_REJECTED:
            count = int(fates.rejected.sum())
            remedy = CAUSES[REJECTED][2]
            detail = f"In step {step} {fates.rejected_share:.0%} of the tokens, {count} responses as a whole. {remedy}."
            self._warn("rejected", "steps of which the rollout correction rejects nearly all", 1, detail)
        effective = metrics.get("rollout_corr/rollout_is_eff_sample_size", 1.0)
        if effective < FEW_EFFECTIVE:
            detail = f"In step {step} it is {effective:.0%}: few tokens decide, for the batch is far from the policy. Lower "
            detail += "--staleness-threshold or --lr. Or generator and learner do not compute the same: see "
            detail += "training/rollout_probs_diff_mean."
            self._warn("few_effective", "steps whose importance weights have a small effective sample size", 1, detail)

    def _warn(self, kind: str, what: str, count: int, detail: str) -> None:
        self.counts[kind] += count
        self.record.warn(what, count, detail)
