"""The surroundings of the algorithm in a learner's loop: resume, checkpoints, validation, the record, the end.

A part of the script's state that a checkpoint must hold has `state()`, which gives what JSON can hold, and `restore(state)`.
"""

import json
from collections.abc import Mapping
from typing import NoReturn, Protocol

from rl.algorithm.fates import Fates
from rl.algorithm.health import Health
from rl.algorithm.metrics import hardly_scored, validation_metrics
from rl.algorithm.source_counts import SourceCounts
from rl.checkpoint.resume import Resumed, resume
from rl.checkpoint.saver import Saver
from rl.data.job import Job
from rl.generation.generator import Generator
from rl.learning import delivery
from rl.learning.batch import Batch
from rl.learning.batch_images import BatchImages
from rl.learning.division import Division
from rl.learning.flops import Computed
from rl.learning.learner import Learner
from rl.learning.token_budget import choose_tokens
from rl.ranks import dist
from rl.ranks.timers import gather_ledgers
from rl.record import validations
from rl.record.identity import Identity
from rl.record.precision import in_words, precisions
from rl.record.run import Run
from rl.replay.recorder import Recorder
from rl.rewards.instructions import unasked
from rl.samples import outlines
from rl.samples.group import Group
from rl.samples.stream import Batches, Stream
from rl.setup import CommonArgs


class Part(Protocol):
    def state(self) -> object: ...

    def restore(self, state) -> None: ...


class TrainingRun:
    """A learner's run, from its first step or the last that was saved to its end."""

    def __init__(
        self,
        args: CommonArgs,
        job: Job,
        learner: Learner,
        num_ranks: int,
        samples: Batches | Stream | None = None,
        generator: Generator | None = None,
        after: int = 0,
        **parts: Part,
    ):
        """Brings the learner, the samples and the parts to where the checkpoint was written, if the run resumes. num_ranks: of
        the whole job; generator: of this rank, where it learns and generates in turns; after: the step that the learner has
        been brought to already, of a run that resumes nothing itself. A collective of the learners. Raises UserError if the run
        cannot resume from there."""
        self.args, self.job, self.learner, self.num_ranks = args, job, learner, num_ranks
        self.samples, self.generator, self.parts = samples, generator, parts
        identity = Identity(args, job.script, job.path, job.prompts)
        if samples:
            samples.introduce(identity)
        resumed = resume(args, identity, learner, job.total_steps)
        self.done = resumed.step or after  # the last step that was trained before
        if resumed.step:
            self._take_back(resumed)
        self._put_aside = generator.unfinished() if generator else []  # by this rank, when the newest batch was whole
        records = args.record_samples and learner.ranks.is_main
        self.recorder = Recorder(args.record_samples, resumed.origin and resumed.origin.run_dir, self.done) if records else None
        of_job = (dist.describe_hardware(), job.total_steps, learner.ranks.is_main, job.script)
        held = precisions(args)
        if args.max_tokens_per_micro_batch == "auto":
            if generator and not generator.engine.num_unfinished:
                generator.engine.sleep()  # as it does while the learner works; the first publish wakes it
            learner.chosen_tokens = choose_tokens(args, learner)
        chosen = {"precision": held, "micro_batch_tokens": learner.micro_batch_tokens}
        self.record = Run(args, *of_job, resumed.origin, job.notes | chosen)
        if words := in_words(held):
            self.record.say(words)
        if args.max_tokens_per_micro_batch == "auto":
            self.record.say(f"micro-batches of up to {learner.chosen_tokens:,} tokens (--max-tokens-per-micro-batch auto)")
        self.saver = Saver(args, self.record, identity, learner, job.tokenizer, resumed.origin, job.prompts.prep)
        if samples and self.done:
            recorded = [row["step"] for row in validations.read(self.record.dir)] if self.record.enabled else []
            samples.inbox.validations.skip_recorded(json.loads(dist.from_main(json.dumps(recorded))))
        self.health = Health(args, job, self.record, learner.skipped)
        self.health.at_start()
        self.sources = SourceCounts(job.prompts, job.order, args.rollout_n)
        if not args.reward:  # one's own function may look for anything
            for text in unasked(job.prompts):
                self.record.say(f"warning: {text}")
        self.timer = self.record.timer
        self._begun = self.done  # the last step that has
        if self.recorder:
            more = {"after": self.done, "total_steps": job.total_steps, "hardware": dist.describe_hardware()}
            flags = identity.record["flags"] | {"max_tokens_per_micro_batch": learner.micro_batch_tokens}
            self.recorder.begin(self.record.dir, identity.record | {"flags": flags} | more)

    def _take_back(self, resumed: Resumed) -> None:
        """What the checkpoint holds besides the learner."""
        for name, part in self.parts.items():
            part.restore(resumed.state[name])
        if self.samples:
            self.samples.restore(resumed.state["samples"], resumed.groups, resumed.unfinished)
        if self.generator:
            self.generator.go_on(resumed.unfinished)

    def steps(self) -> range:
        """The steps that are left to train."""
        return range(self.done + 1, self.job.total_steps + 1)

    def begin(self, groups: list[Group]) -> Batch:
        """The batch of a step. Raises UserError if it is the first of this run and nothing in it could be scored."""
        division = Division.of(self.args, self.learner)
        groups = delivery.to_trainers(groups, division, all_to_first=bool(self.args.record_samples))
        batch = Batch.of(groups, division)
        batch.images = BatchImages.of(self.job.prompts, self.job.order, groups, self.learner.ranks)
        if self._begun == self.done:
            batch.check_scored()
        self._begun += 1
        self.learner.begin_step(self._begun)
        self.learner.computed = Computed()
        if self.generator:
            self._put_aside = self.generator.unfinished()
        if self.recorder:
            with self.timer("record"):
                self.recorder.write(self._begun, groups)
        self.record.warn_unscored(batch.errors)
        return batch

    def validated(self, step: int, rows: list[dict], version: int | None = None) -> dict[str, float]:
        """Takes the rows of a validation of the weights after that step; returns its metrics. version: of these weights, by
        default as many as steps."""
        self.record.log_generations(step, self._with_images(rows[: self.args.log_val_generations]))
        self.record.warn_unscored([row["error"] for row in rows if row["error"]])
        metrics = validation_metrics(rows) | {validations.STEP: step}
        sources = hardly_scored(rows)
        self.record.log_validation(metrics, step if version is None else version, self._begun, not sources)
        score = validations.score(metrics)
        if sources:
            few = f"After step {step} less than half of the responses could be scored of {', '.join(sources)}."
            self.record.warn("validations that choose no best checkpoint", 1, few)
        elif score is not None:
            self.saver.best.scored(step, score)
        return metrics

    def validations(self, step: int) -> dict[str, float]:
        """Records all validations that the generators have sent since the last call; returns the newest one's metrics. Before a
        checkpoint it waits for those that a resumed run could not make again, after the last step for all. A collective."""
        with self.timer("testing"):
            metrics = self._take_validations(self._awaited_validation(step))
        if metrics and (news := self.samples.meter.news()):
            self.record.say(news)
        return metrics

    def _take_validations(self, until: int | None = None) -> dict[str, float]:
        metrics = {}
        for validation in self.samples.inbox.take_validations(until):
            metrics = self.validated(validation.step, validation.rows, validation.version)
        return metrics

    def _awaited_validation(self, step: int) -> int | None:
        """The step whose validation must have arrived at the end of `step`; None if there is none."""
        args = self.args
        total = self.job.total_steps
        if step == total:
            return step if args.test_freq > 0 else None
        if not self._saves_after(step):
            return None
        newest = args.version_at(step + 1)
        if args.step_of(newest, total) == step:  # the weights of this checkpoint: a resumed run validates them
            newest -= 1
        awaited = args.validated_by(newest, total)
        # Before this run resumed --test-freq may have been another: what was not validated then never will be.
        began_with = args.step_of(args.version_at(self.done + 1), total)
        return None if awaited is None or awaited < began_with else awaited

    def log(self, step: int, batch: Batch, metrics: dict[str, float], gone: Mapping[str, list[int]] | None = None) -> None:
        """Records the step. A collective. gone: tickets that were not trained, by reason; None in a replay, which does not
        know them."""
        seconds = {name: value for name, value in self.timer.seconds.items() if name != "testing"}
        metrics = metrics | self.learner.perf_metrics(batch, seconds, self.num_ranks) | self.learner.router_metrics()
        metrics |= {"training/global_step": step, "training/epoch": self.job.order(max(batch.tickets))[0]}
        fates = Fates.of(batch)
        metrics |= self.health.of_step(step, batch, metrics, fates) | self.sources.of_step(batch, fates, gone)
        metrics |= gather_ledgers("learner" if self.samples else "rank", self.timer)
        self.record.log_tickets(step, batch.tickets, **(gone or {}))
        self.record.log(step, metrics)
        if "moe/load/max" in metrics:
            self.record.log_experts(step, self.learner.policy.router.load)

    def save_if_due(self, step: int) -> None:
        """Saves a checkpoint after the last step and every --save-freq. A collective."""
        if step > self.saver.step and self._saves_after(step):
            self._save(step)

    def leave_if_stopped(self, step: int) -> None:
        """After SIGTERM on any learner: leaves with a checkpoint of that step, the last that was trained. A collective."""
        if dist.stopping():
            self.leave(step)

    def leave(self, step: int) -> NoReturn:
        if self.samples:
            self._take_validations()  # those that are here: the checkpoint may cost an older one its place
        self.saver.leave(step, self._save)

    def finish(self) -> None:
        """Ends the stream of samples, waits for the last checkpoint, and closes the record."""
        for line in self.samples.close() if self.samples else ():
            self.record.say(line)
        self.record.finish(self.saver.finish(self.job.total_steps))

    def _with_images(self, rows: list[dict]) -> list[dict]:
        """The rows with their prompts' image files, on the rank that writes them down."""
        if not self.record.enabled:
            return []
        images = [self.job.val_prompts[row["index"]].images for row in rows]
        return [row | {"images": of.sources if of else ()} for row, of in zip(rows, images, strict=True)]

    def _saves_after(self, step: int) -> bool:
        return step == self.job.total_steps or (self.args.save_freq > 0 and step % self.args.save_freq == 0)

    def _save(self, step: int) -> None:
        with self.timer("save_checkpoint"):
            groups, unfinished, state = [], [], {name: part.state() for name, part in self.parts.items()}
            if self.generator:
                unfinished = outlines.share(self._put_aside)
            if self.samples:
                self.samples.ask(step)  # the generators answer while the weights are copied
                self.saver.copy(step)
                state["samples"], groups, unfinished = self.samples.snapshot(step)
            self.saver.save(step, state, delivery.to_first(groups), delivery.to_first(unfinished))
