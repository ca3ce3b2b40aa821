"""Warnings: what makes a run learn less, or something else, than it looks, without stopping it.

Each kind is printed when it first comes up and whenever its count has grown tenfold. It is a metric, too: warnings/<kind>, its
count since this process began.
"""

from collections import Counter

import losses
from rl import shares
from rl.batch import Batch
from rl.run import Run
from rl.setup import CommonArgs, Job


class Health:
    """Looks at each step of a run."""

    def __init__(self, args: CommonArgs, job: Job, record: Run, skipped: int):
        """skipped: optimizer steps that the run left out before, if it goes on."""
        self.args, self.job, self.record = args, job, record
        self.counts: Counter[str] = Counter()
        self._skipped = skipped

    def at_start(self) -> None:
        """Warns of what is known before the first step."""
        cut = {"training": self.job.prompts.truncated}
        cut["validation"] = self.job.val_prompts.truncated if self.job.val_prompts else 0
        for which, count in cut.items():
            right = self.args.truncation == "right"
            lost = "their ends, and so the chat template's call for an answer" if right else "their beginnings"
            detail = f"--truncation {self.args.truncation} cuts off {lost}."
            self._warn("cut_prompts", f"{which} prompts longer than --max-prompt-length", count, detail)

    def of_step(self, step: int, batch: Batch, metrics: dict[str, float]) -> dict[str, int]:
        """Warns of what the step shows; returns warnings/*. A collective."""
        args, responses = self.args, len(batch.lengths)
        if args.top_p < 1 or args.top_k > 0:
            detail = "Their log-probs are of the truncated distribution, the learner's of the full one: ratios and KL are off."
            self._warn("truncated_sampling", "responses sampled with --top-p or --top-k", responses, detail)
        is_raw = losses.ADVANTAGES[args.adv_estimator].group_of_one == "score"
        if is_raw and (alone := shares.groups_of_one(batch)):
            detail = f"--adv-estimator {args.adv_estimator} compares within a group: here the advantage is the raw score"
            detail += "." if args.rollout_n == 1 else ", since the others were not trained. With dr_grpo or rloo it is 0."
            self._warn("single_response_groups", "groups with one trained response", alone, detail)
        if not (metrics["critic/advantages/max"] > 0 or metrics["critic/advantages/min"] < 0):
            detail = f"In step {step} no group's scores differ: prompts may be too easy or too hard, or the reward broken."
            self._warn("no_signal_steps", "steps without any signal", 1, detail)
        if responses and bool(batch.truncated.all()) and not args.ignore_eos:
            detail = "Raise --max-response-length, or check that the model's end token is the one that its answers end with."
            self._warn("endless_steps", "steps in which every response ran into --max-response-length", 1, detail)
        new, self._skipped = metrics["actor/skipped_steps"] - self._skipped, metrics["actor/skipped_steps"]
        detail = "Their gradient was not finite: training diverges. Try a lower --lr, or --dtype float32."
        self._warn("skipped_updates", "optimizer steps skipped", new, detail)
        return {f"warnings/{kind}": count for kind, count in self.counts.items()}

    def _warn(self, kind: str, what: str, count: int, detail: str) -> None:
        self.counts[kind] += count
        self.record.warn(what, count, detail)
