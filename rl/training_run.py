"""The surroundings of the algorithm in a learner's loop: resume, checkpoints, validation, the record, the end.

`LearnerRun` is what every run has; `TrainingRun` adds samples, their scores and validations; rl/split_run.py, generators.

Each part of the script's state that a checkpoint holds has `state()`, which returns a value for JSON, and `restore(state)`.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from rl.algorithm.health import Health, text_metrics
from rl.algorithm.metrics import (
    Fates,
    SourceCounts,
    batch_metrics,
    hardly_scored,
    perf_metrics,
    rollout_metrics,
    validation_metrics,
)
from rl.background import in_background
from rl.checkpoint.files import Resumed, identity_of
from rl.checkpoint.saver import Saver
from rl.data.job import Job
from rl.errors import Stopped, UserError
from rl.generation.generator import Generator
from rl.learning.batch import Batch, Division
from rl.learning.learner import Learner
from rl.ranks import dist, launch, stops
from rl.ranks.timers import gather_ledgers
from rl.record import validations
from rl.record.run import Run
from rl.rewards.score import OUT, ScoringEvents, event_of, unasked
from rl.samples.group import Group, all_gather_groups
from rl.samples.recorder import Recorder
from rl.setup import CommonArgs, RunArgs


class LearnerRun:
    """A learner's run, from its first step, or the last saved one, to its end."""

    plotted = "reward"  # the curve drawn at the end
    role = "rank"  # in ledger/*

    def __init__(self, args: RunArgs, job: Job, learner: Learner, num_ranks: int, after: int = 0):
        """Restore the learner from the checkpoint if the run resumes. num_ranks: ranks of the whole job. after: the step whose
        state the learner already has, in a run that does not restore it here. Raise UserError if the run cannot resume. A
        collective of the learners."""
        self.args, self.job, self.learner, self.num_ranks = args, job, learner, num_ranks
        self._identity = identity_of(args, job.script, job.path, job.prompts) if learner.ranks.is_main else None
        resumed = Resumed()
        may_exist = launch.restarts() or args.log.experiment_name or args.checkpoint.resume_mode not in ("auto", "disable")
        if may_exist and not args.val_only:
            from rl.checkpoint.resume import resume  # late: a new run has nothing to resume

            resumed = resume(args, self._identity, learner, job.total_steps)
        self.done = resumed.step or after  # the last step trained before
        self._restore(resumed)
        self.record = Run(args, job, dist.describe_hardware(), learner.ranks.is_main, resumed.origin)
        if learner.adapters:
            self.record.say(learner.adapters.in_words(learner.policy.model))
        if job.teacher_prompts:
            self.record.say(job.teacher_prompts.in_words())
        self.timer = self.record.timer
        self.saver = Saver(args, job, self.record, self._identity, learner, resumed.origin)

    def _restore(self, resumed: Resumed) -> None:
        """Restore what a run has besides its learner."""

    def steps(self) -> range:
        """Return the remaining steps to train. From now on a stop waits for the end of a step."""
        stops.begin_training()
        return range(self.done + 1, self.job.total_steps + 1)

    def log(self, step: int, batch: Batch, metrics: dict[str, float]) -> None:
        """Record the step, with its throughput and each rank's ledger. A collective."""
        seconds = {name: value for name, value in self.timer.seconds.items() if name != "testing"}
        forward_only = metrics.get("perf/forward_only", 0.0)
        metrics = metrics | perf_metrics(self.learner, batch, seconds, self.num_ranks, forward_only)
        metrics |= self.learner.router_metrics()
        metrics |= {"training/global_step": step, "training/epoch": self.job.order(max(batch.tickets))[0]}
        metrics |= gather_ledgers(self.role, self.timer)
        self.record.log(step, metrics)

    def save_if_due(self, step: int) -> None:
        """Save a checkpoint after the last step and every --save-freq steps. A collective."""
        if step > self.saver.step and self._saves_after(step):
            self._save(step)

    def stop_if_asked(self, step: int) -> None:
        """If a rank has received SIGTERM, save that step, the last one trained, and raise Stopped. A collective."""
        if not dist.stopping():
            return
        checkpoint = self._save_last(step)
        kept = f"it resumes from {checkpoint}" if checkpoint else "nothing was trained yet"
        is_main = self.learner.ranks.is_main
        raise Stopped(f"SIGTERM to {stops.asked()}: stopped after step {step}; {kept}" if is_main else "")

    def finish(self) -> Path | None:
        """Wait for the last checkpoint, and close the record. Return the checkpoint. A collective."""
        checkpoint = None if self.args.val_only else self.saver.finish(self.job.total_steps)
        self.record.finish(checkpoint, self.plotted)
        return checkpoint

    def _save_last(self, step: int) -> Path | None:
        """Save the last step, unless it is saved. Return the checkpoint; None if nothing was trained. A collective."""
        if step > self.saver.step:
            self._save(step)
        return self.saver.finish(step) if step else None

    def _saves_after(self, step: int) -> bool:
        every = self.args.checkpoint.save_freq
        return step == self.job.total_steps or (every > 0 and step % every == 0)

    def _save(self, step: int) -> None:
        with self.timer("save_checkpoint"):
            self.saver.save(step, *self._snapshot(step))

    def _snapshot(self, step: int) -> tuple[dict, list[Group], list[Group]]:
        """Return what a checkpoint holds besides the learner: (state, groups that wait to be trained, groups under way)."""
        return {}, [], []


class TrainingRun(LearnerRun):
    """A run that trains on samples, which its ranks generate, or which have been recorded."""

    def __init__(
        self,
        args: CommonArgs,
        job: Job,
        learner: Learner,
        num_ranks: int,
        generator: Generator | None = None,
        after: int = 0,
        **parts: Any,
    ):
        """Also restore the samples and the parts. generator: this rank's, if it learns and generates in turns."""
        self.generator = generator
        if job.environments and not generator:  # only generators use them
            job.environments.close()
        self._events = ScoringEvents()
        self.parts = parts | {"events": self._events}
        self._texts: dict[str, float] = {}  # metrics of the newest batch
        self._unscored = 0  # groups of the newest steps that have no score, if a step has none at all
        super().__init__(args, job, learner, num_ranks, after)
        self._begun = self.done  # the last step begun
        self._unfinished = generator.unfinished() if generator else []  # of this rank, at the newest batch
        self.health = Health(args, job, self.record, learner.skipped)
        self.health.at_start()
        self.sources = SourceCounts(job.prompts, job.order, args.sampling.rollout_n)
        for text in () if args.reward.own_reward else unasked(job.prompts):  # the user's function may look for anything
            self.record.say(f"warning: {text}")
        self.recorder = None  # on the first learner
        self._recording: Future | None = None  # that of the last step begun
        if args.log.record_samples != "off" and learner.ranks.is_main:
            self.recorder = Recorder(self.record.dir, self.done, args.log.record_samples == "all")
            start = {"after": self.done, "total_steps": job.total_steps, "hardware": dist.describe_hardware()}
            self.recorder.begin(self._identity | start)

    def _restore(self, resumed: Resumed) -> None:
        if resumed.step:
            for name, part in self.parts.items():
                part.restore(resumed.state[name])
            if self.generator:
                for group in self.generator.share(resumed.unfinished):
                    self.generator.start(group.ticket, group)

    def stop_if_asked(self, step: int, groups: Sequence[Group] = ()) -> None:
        """Also save, and raise UserError, if an outage has left without a score any of `groups`, which the next step would
        train, or all of them: the resumed run samples their prompts again."""
        super().stop_if_asked(step)
        errors = [response.error for group in groups for response in group.responses if response.error]
        out = [error for error in errors if event_of(error) == OUT]
        is_unscored = len(groups) > 0 and all(group.is_unscored for group in groups)
        self._unscored = self._unscored + len(groups) if is_unscored else 0
        if is_unscored and step == self.done:
            raise UserError(
                f"none of the first step's {len(errors)} responses could be scored: {errors[-1]}. "
                "Correct the reward function, or provide what it needs."
            )
        if out or self._unscored > 1:  # a grader may always fail on one prompt: it would come again for ever
            raise self._outage(step, (out or errors)[-1], self._save_last(step))

    def begin(self, groups: list[Group]) -> Batch:
        """Begin a step: make its batch, and begin to record the groups. A collective of the learners."""
        batch = Batch.of(groups, Division.of(self.args, self.learner))
        if self.job.prompts.prep:
            from rl.learning.batch_images import BatchImages  # late: only models that take images need it

            batch.images = BatchImages(self.job.prompts, self.job.order, groups, self.learner.ranks)
        self._events.add(batch.errors)
        self._begun += 1
        if self.generator:
            self._unfinished = self.generator.unfinished()
        left_out = self._take_left_out()
        if self.recorder:
            with self.timer("record"):
                self._wait_for_record()
                self._recording = in_background(partial(self._write_down, self._begun, groups, left_out), "record")
        self._texts = text_metrics(groups, self.learner.ranks)
        self.record.warn_unscored(batch.errors)
        return batch

    def _take_left_out(self) -> Mapping[str, list[Group]]:
        """Return the groups that the newest batch has left out, by reason."""
        return {"filtered": self.generator.left_out} if self.generator else {}

    def _write_down(self, step: int, groups: Sequence[Group], left_out: Mapping[str, Sequence[Group]]) -> None:
        """Record the groups of a step, in a thread."""
        self.recorder.write(step, groups, [group for its in left_out.values() for group in its])
        rows = [self._about(group) for group in groups]
        rows += [self._about(group) | {"left_out": reason} for reason, its in left_out.items() for group in its]
        self.record.log_groups(step, rows)

    def _wait_for_record(self) -> None:
        """Return when the last step begun is recorded. Raise UserError if that failed."""
        if self._recording:
            self._recording.result()

    def _about(self, group: Group) -> dict:
        """Return what groups.jsonl says of a group: all but its tokens."""
        epoch, index = self.job.order(group.ticket)
        scores, lengths = zip(*((r.score, len(r.token_ids)) for r in group.responses), strict=True)
        about = {"ticket": group.ticket, "epoch": epoch, "index": index, "source": group.data_source}
        return about | self.job.prompts.about(index) | {"scores": scores, "lengths": lengths}

    def _outage(self, step: int, error: str, checkpoint: Path | None) -> UserError:
        """Return the error that ends a run after `step`."""
        args = self.args
        graders = [args.reward.own_reward] if args.reward.own_reward else []
        if args.environment.has_environment:
            from rl.environments.named import environment_flag

            graders.append(" ".join(environment_flag(args.environment)))
        by = " and ".join(graders) or "the built-in verifiers"
        name = "" if args.log.experiment_name else f" with --experiment-name {self.saver.run_dir.name}"
        resume = f"resume from {checkpoint} with the same command{name}" if checkpoint else "give the same command"
        return UserError(
            f"responses of step {step + 1} could not be scored by {by}: {error}. The run ends before this step. "
            f"Once responses can be scored again, {resume}: their prompts come again."
        )

    def record_validation(self, step: int, rows: list[dict], version: int | None = None) -> dict[str, float]:
        """Record the rows of a validation after that step; return its metrics. version: of the weights, by default the step."""
        if self.args.log.record_samples != "off":
            self.record.log_generations(step, rows, self.args.log.log_val_generations)
        errors = [row["error"] for row in rows if row["error"]]
        self._events.add(errors)
        self.record.warn_unscored(errors)
        self.health.of_validation(step, rows)
        metrics = validation_metrics(rows) | {validations.STEP: step}
        sources = hardly_scored(rows)
        self.record.log_validation(metrics, step if version is None else version, self._begun, not sources)
        if sources:
            few = f"After step {step} less than half of the responses could be scored of {', '.join(sources)}."
            self.record.warn("validations that choose no best checkpoint", 1, few)
        self.saver.best.update()
        return metrics

    def validate_first(self) -> None:
        """Validate the weights at the start of a run that does not resume. A collective."""
        if not self.done and (metrics := self.validate(0)):
            self.record.log(0, metrics)

    def validate(self, step: int) -> dict[str, float]:
        """Validate the weights of that step if a validation is due; return its metrics. A collective."""
        if not self.args.validates(step, self.job.total_steps):
            return {}
        with self.timer("testing"):
            rows = self.generator.validate()
        return self.record_validation(step, rows)

    def report(
        self, step: int, batch: Batch, metrics: dict[str, float], gone: Mapping[str, list[int]] | None = None
    ) -> dict[str, float]:
        """Return the metrics of the trained batch and the fates of its samples; record its tickets, and warn. metrics: of
        `learn`; gone: untrained tickets by reason; None in a replay, which does not know them. A collective."""
        self.record.log_tickets(step, batch.tickets, **(gone or {}))
        out = rollout_metrics(self.args.correction, batch) | batch_metrics(batch) | self._texts
        if self.args.schedule.surplus:
            from rl.algorithm.staleness import staleness_metrics  # late: only some samples are stale

            out |= staleness_metrics(batch, step - 1)
        fates = Fates.of(batch)
        out |= self.health.of_step(step, batch, metrics | out, fates) | self.sources.of_step(batch, fates, gone)
        return out | self._events.metrics()

    def finish(self) -> Path | None:
        """Also end the record of samples."""
        self._wait_for_record()
        return super().finish()

    def _snapshot(self, step: int) -> tuple[dict, list[Group], list[Group]]:
        self._wait_for_record()  # a run that resumes from the checkpoint has the record of all steps before it
        state = {name: part.state() for name, part in self.parts.items()}
        return state, [], all_gather_groups(self._unfinished) if self.generator else []
