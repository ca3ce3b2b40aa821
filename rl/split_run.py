"""A learner's run whose samples come from generators: also restores, saves and ends the samples, and receives validations."""

from collections.abc import Mapping
from pathlib import Path

from rl.checkpoint.files import Resumed
from rl.data.job import Job
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.ranks import dist
from rl.record import validations
from rl.samples.group import Group
from rl.samples.stream import Batches, Stream
from rl.setup import CommonArgs
from rl.training_run import TrainingRun


class SplitRun(TrainingRun):
    """A learner's run in a job whose ranks are split."""

    role = "learner"

    def __init__(self, args: CommonArgs, job: Job, learner: Learner, num_ranks: int, samples: Batches | Stream, **parts):
        """Also restore the samples."""
        self.samples = samples
        super().__init__(args, job, learner, num_ranks, **parts)
        if self.done:  # validations may have been recorded since the checkpoint
            recorded = [row["step"] for row in validations.read(self.record.dir)] if self.record.enabled else []
            samples.inbox.validations.skip_recorded(dist.from_main(recorded))

    def _restore(self, resumed: Resumed) -> None:
        super()._restore(resumed)
        if resumed.step:
            self.samples.restore(resumed.state["samples"], resumed.groups, resumed.unfinished)

    def _take_left_out(self) -> Mapping[str, list[Group]]:
        return self.samples.take_left_out()

    def receive_validations(self, step: int) -> dict[str, float]:
        """Record all validations that the generators have sent since the last call; return the newest one's metrics. Before a
        checkpoint, wait for the validations that a resumed run could not repeat; after the last step, wait for all. A
        collective."""
        with self.timer("testing"):
            return self._take_validations(self._awaited_validation(step))

    def _take_validations(self, until: int | None = None) -> dict[str, float]:
        metrics = {}
        for validation in self.samples.inbox.take_validations(until):
            metrics = self.record_validation(*validation)
        return metrics

    def _awaited_validation(self, step: int) -> int | None:
        """Return the step whose validation must have arrived at the end of `step`; None if there is none."""
        args = self.args
        total = self.job.total_steps
        if step == total:
            return step if args.test_freq > 0 else None
        if not self._saves_after(step):
            return None
        newest = args.schedule.version_at(step + 1)
        if args.schedule.step_of(newest, total) == step:  # these are the checkpoint's weights: a resumed run validates them
            newest -= 1
        validated = (version for version in range(newest, -1, -1) if args.validates(version, total))
        awaited = next((args.schedule.step_of(version, total) for version in validated), None)
        # Before this run resumed, --test-freq may have been different: steps not validated then never will be
        began_with = args.schedule.step_of(args.schedule.version_at(self.done + 1), total)
        return None if awaited is None or awaited < began_with else awaited

    def log(self, step: int, batch: Batch, metrics: dict[str, float]) -> None:
        """Also record the waiting times of a split job."""
        super().log(step, batch, metrics | self.samples.metrics(step, self.timer))

    def finish(self) -> Path | None:
        """Also end the stream of samples."""
        if self.args.val_only:  # in train_sync.py `validate_first` has recorded it
            self.record.log(0, self._take_validations(until=0))
        for line in self.samples.close():
            self.record.say(line)
        return super().finish()

    def _save_last(self, step: int) -> Path | None:
        self._take_validations()  # record those that have arrived: the checkpoint may replace an older one
        return super()._save_last(step)

    def _snapshot(self, step: int) -> tuple[dict, list[Group], list[Group]]:
        state, *_ = super()._snapshot(step)
        self.samples.ask(step)  # the generators answer while the weights are copied
        self.saver.copy()
        own, groups, unfinished = self.samples.snapshot(step)
        return state | {"samples": own}, groups, unfinished
