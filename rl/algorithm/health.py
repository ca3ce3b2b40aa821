"""Warnings about conditions that let a run learn less than it seems to, or something else, without stopping it. A warning is
printed when it first occurs, and when its count is tenfold.

Some are about the text of responses: whether a policy repeats itself or copies its prompt, and whether that pays. Only tokens
that the policy sampled count.

    text/distinct             responses to a prompt that differ, divided by the number of responses
    text/repeated/mean        share of a response's sequences of 4 tokens that it has written before
    text/copied/mean          share of a response's sequences of 8 tokens that are in its prompt
    text/<...>/better         the mean over the responses that score above their group's mean
    text/<...>/worse          ... and below it
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from rl.algorithm import whole_batch
from rl.algorithm.metrics import OF_REJECTION, Fates
from rl.data.job import Job
from rl.learning.batch import Batch
from rl.ranks import dist
from rl.record.run import Run
from rl.samples.group import Group, Response

REPEATED, COPIED = 4, 8  # tokens of a sequence
SHARES = ("repeated", "copied")


def text_metrics(groups: Sequence[Group], ranks: dist.Ranks) -> dict[str, float]:
    """Return text/*; NaN where there are no such responses. Each learner looks at a part of the groups. A collective."""
    own = [_look_at(group) for group in groups[ranks.rank :: ranks.world_size]]
    looked = [of_group for part in dist.all_gather_values(own) for of_group in part]
    out = {"text/distinct": mean(distinct for distinct, _ in looked)}
    responses = [response for _, of_group in looked for response in of_group]
    for place, name in enumerate(SHARES):
        out[f"text/{name}/mean"] = mean(shares[place] for _, shares in responses)
        out[f"text/{name}/better"] = mean(shares[place] for change, shares in responses if change > 0)
        out[f"text/{name}/worse"] = mean(shares[place] for change, shares in responses if change < 0)
    return out


def _look_at(group: Group) -> tuple[float, list[tuple[float, list[float]]]]:
    """Return the share of distinct responses, and of each scored response its score less the mean, and its SHARES."""
    scored = [response for response in group.scored if response.sampled]
    if not scored:
        return math.nan, []
    middle = sum(response.score for response in scored) / len(scored)
    found = [(response.score - middle, own) for response, own in zip(scored, shares(group, scored), strict=True)]
    return len({tuple(_sampled(response)) for response in scored}) / len(scored), found


def shares(group: Group, responses: Sequence[Response]) -> list[list[float]]:
    """Return the SHARES of responses of the group."""
    prompt = {*_sequences(group.prompt_ids.tolist(), COPIED)}
    return [[_repeated(text), _copied(text, prompt)] for text in map(_sampled, responses)]


def _sampled(response: Response) -> list[int]:
    tokens = response.token_ids if response.mask is None else response.token_ids[response.mask]
    return tokens.tolist()


def _repeated(tokens: list[int]) -> float:
    sequences = _sequences(tokens, REPEATED)
    return 1 - len({*sequences}) / len(sequences) if sequences else 0.0


def _copied(tokens: list[int], prompt: set[tuple[int, ...]]) -> float:
    sequences = _sequences(tokens, COPIED)
    return sum(sequence in prompt for sequence in sequences) / len(sequences) if sequences else 0.0


def _sequences(tokens: list[int], n: int) -> list[tuple[int, ...]]:
    return [*zip(*(tokens[place:] for place in range(n)), strict=False)]


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


SCORE = "critic/score/mean"
MUCH_REJECTED = 0.8  # share of a step's tokens from which on there is a warning
MUCH_MORE = 0.1  # rise of a share of text/* from which on there is a warning
WINDOW = 20  # steps: the newest are compared with the first
FEW_EFFECTIVE = 0.3  # effective sample size of the importance weights below which there is a warning
APART = 0.05  # mean difference of a token's two probabilities above which there is a warning; bf16 alone makes 0.01
ONE_APART = 0.1  # the same of a single token, where all computes in fp32


def _mean_by(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return name -> mean of its numbers."""
    numbers: dict[str, list[float]] = {}
    for name, value in pairs:
        numbers.setdefault(name, []).append(value)
    return {name: mean(its) for name, its in numbers.items()}


class Health:
    """The warnings of a run, from each of its steps."""

    def __init__(self, args, job: Job, record: Run, skipped: int):
        """skipped: optimizer steps that a resumed run has skipped before."""
        self.args, self.job, self.record = args, job, record
        self.counts: Counter[str] = Counter()
        self._skipped = skipped
        # of this process's steps
        self._texts: list[dict[str, float]] = []
        self._scores: list[tuple[int, dict[str, float]]] = []  # (step, data source -> mean score)
        self._validated: dict[str, list[tuple[int, float]]] = {}  # data source -> (step, accuracy)

    def at_start(self) -> None:
        """Warn of problems that are known before the first step."""
        right = self.args.data.truncation == "right"
        lost = "their ends, and so the chat template's call for an answer" if right else "their beginnings"
        detail = f"--truncation {self.args.data.truncation} cuts off {lost}."
        for which, prompts in (("training", self.job.prompts), ("validation", self.job.val_prompts)):
            count = prompts.truncated if prompts else 0
            self._warn("cut_prompts", f"{which} prompts longer than --max-prompt-length", count, detail)

    def of_step(self, step: int, batch: Batch, metrics: dict[str, float], fates: Fates) -> dict[str, int]:
        """Warn of the step's problems; return warnings/*. fates: the batch's. A collective."""
        args = self.args
        responses = len(batch.lengths)
        if args.sampling.training.truncates and not args.sampling.keep_sampling_mask:
            detail = "Their log-probs are of the truncated distribution, the learner's of the full one: ratios and KL are off."
            detail += " Leave these flags out if that matters, or add --keep-sampling-mask, with --top-k."
            self._warn(
                "truncated_sampling",
                "responses sampled with --top-p, --top-k, --min-p or another rule that leaves tokens out",
                responses,
                detail,
            )
        is_raw = args.loss.estimator.group_of_one == "score" and not args.teacher.teacher_alone
        if is_raw and (alone := whole_batch.groups_of_one(batch)):
            detail = f"--adv-estimator {args.loss.adv_estimator} compares within a group: here the advantage is the raw score"
            if args.sampling.rollout_n > 1:
                detail += ", since the others were not trained. With dr_grpo or rloo it is 0"
            self._warn("single_response_groups", "groups with one trained response", alone, f"{detail}.")
        if not fates.has_signal:
            from rl.algorithm import no_signal  # late: it seldom happens

            cause, word, why = no_signal.diagnose(args, batch, fates)
            self.counts["no_signal_steps"] += 1
            if cause != no_signal.OTHER:
                self.counts[f"no_signal/{cause}"] += 1
            self.record.warn(f"steps without any signal{word}", 1, f"In step {step}, {why}")
        self._warn_of_difference(step, metrics)
        self._warn_of_correction(step, metrics, fates)
        if responses and bool(batch.truncated.all()):
            detail = "Raise --max-response-length, or check that the model's end token is the one that its answers end with."
            self._warn("endless_steps", "steps in which every response ran into --max-response-length", 1, detail)
        new = metrics["actor/skipped_steps"] - self._skipped
        self._skipped = metrics["actor/skipped_steps"]
        detail = "Their gradient was not finite: training diverges. Try a lower --lr, or --dtype float32. To look for "
        detail += f"the cause, compute the step again: python replay.py RUN --from-step {step}, from a checkpoint before it."
        self._warn("skipped_updates", "optimizer steps skipped", new, detail)
        sources = [batch.sources[place] for place in batch.group.tolist()]
        self._scores.append((step, _mean_by(zip(sources, batch.score.tolist(), strict=True))))
        self._warn_of_texts(step, metrics)
        return {f"warnings/{kind}": count for kind, count in self.counts.items()}

    def of_validation(self, step: int, rows: list[dict]) -> None:
        """Warn of a data source whose accuracy has fallen twice in a row, by more than chance, while its training score rose:
        the policy may be exploiting the grader. rows: of the validation after that step."""
        known = [(row["data_source"], row["acc"]) for row in rows if row["acc"] is not None]
        for source, accuracy in _mean_by(known).items():
            found = self._validated.setdefault(source, [])
            found.append((step, accuracy))
            if len(found) < 3:
                continue
            (first, best), (middle, less), _ = found[-3:]
            values = [acc for name, acc in known if name == source]
            chance = 2 * statistics.pstdev(values) / len(values) ** 0.5
            before = self._mean_score(source, first, middle)
            since = self._mean_score(source, middle, step)
            if best > less > accuracy and best - accuracy > chance and since > before:
                detail = f"{source}: {best:.3f}, {less:.3f}, {accuracy:.3f} after steps {first}, {middle} and {step}; the mean "
                detail += f"training score rose from {before:.3f} to {since:.3f}. Read what they have in common: view.py."
                what = "validations whose accuracy falls while the training score rises"
                self._warn("validation_falls", what, 1, detail)

    def _mean_score(self, source: str, after: int, until: int) -> float:
        return mean(means[source] for step, means in self._scores if after < step <= until and source in means)

    def _warn_of_texts(self, step: int, metrics: dict[str, float]) -> None:
        """Warn if responses repeat themselves or copy their prompt more than at first, and score more for it."""
        self._texts.append({name: value for name, value in metrics.items() if name.startswith("text/") or name == SCORE})
        if len(self._texts) < 2 * WINDOW:
            return
        ends = self._texts[:WINDOW], self._texts[-WINDOW:]
        first, last = (_mean_by(pair for metrics in steps for pair in metrics.items()) for steps in ends)
        for share, kind in zip(SHARES, ("more_repeated", "more_copied"), strict=True):
            name, better, worse = (f"text/{share}/{which}" for which in ("mean", "better", "worse"))
            pays = last[better] > last[worse] and last[SCORE] > first[SCORE]
            if pays and last[name] - first[name] > MUCH_MORE:
                detail = (
                    f"{name} was {first[name]:.2f} in the first {WINDOW} steps, and {last[name]:.2f} in those up to {step}: "
                )
                detail += f"{last[better]:.2f} in responses above their group's mean score, {last[worse]:.2f} in those below. "
                detail += "Read some of them: view.py."
                self._warn(kind, f"steps in which {share} text has become frequent and scores well", 1, detail)

    def _warn_of_difference(self, step: int, metrics: dict[str, float]) -> None:
        """Warn if generator and learner do not compute the same policy, where no staleness explains that."""
        args = self.args
        if args.schedule.trains_stale or self.counts["truncated_sampling"]:
            return
        apart, one = (metrics.get(f"training/rollout_probs_diff_{name}", 0.0) for name in ("mean", "max"))
        # with the generator's log-probs as the old ones, the learner's may be of weights that this step has moved
        own = args.learner.dtype
        exact = own == "float32" and args.engine.weights_dtype(own) == torch.float32 and not args.old_is_rollout
        if apart > APART or (exact and one > ONE_APART):
            detail = f"In step {step} by {apart:.3f} on average and at most {one:.2f}, without stale samples: the policy that "
            detail += "samples is not the one that learns. If you have changed the sampling, change the learner's log-probs as "
            detail += "well (docs/forking.md). A mixture of experts needs --router-replay R3."
            self._warn("different_policy", "steps in which generator and learner give tokens other probabilities", 1, detail)

    def _warn_of_correction(self, step: int, metrics: dict[str, float], fates: Fates) -> None:
        """Warn if the rollout correction leaves little of a step."""
        if fates.rejected_share >= MUCH_REJECTED:
            count = int(fates.rejected.sum())
            detail = f"In step {step} {fates.rejected_share:.0%} of the tokens, {count} responses as a whole. {OF_REJECTION}."
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
