"""The surroundings of the algorithm in train_sft.py: its flags, the start, and a run without samples and rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch

from rl.checkpoint.files import CheckpointArgs, Resumed
from rl.data.demonstrations import DemonstrationArgs, Demonstrations
from rl.data.job import Job, order_of
from rl.errors import UserError
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, Division
from rl.model.pretrained import end_token_ids, takes_images
from rl.ranges import Range
from rl.record.run import LogArgs
from rl.samples.group import Group, Response
from rl.samples.schedule import Schedule, check_kind
from rl.setup import RunArgs, read_model
from rl.training_run import LearnerRun


@dataclass(frozen=True)
class SupervisedSchedule(Schedule):
    """The batch size."""

    _title = "supervised"

    train_batch_size: Annotated[int, Range(at_least=1)] = 64
    """Conversations per step, over all ranks."""

    @property
    def prompts_per_step(self) -> int:
        return self.train_batch_size

    prompts_per_update = prompts_per_step


@dataclass(frozen=True)
class SupervisedLearnerArgs(LearnerArgs):
    """Precision, memory and layout of the learners."""

    _title = "learner"

    ppo_epochs: ClassVar[int] = 1
    freeze_vision_tower: ClassVar[bool] = False
    router_replay: ClassVar[str] = "off"


@dataclass(frozen=True)
class SupervisedLogArgs(LogArgs):
    """Logging: metrics, the run's directory."""

    _title = "log"

    log_val_generations: ClassVar[int] = 0
    record_samples: ClassVar[str] = "off"


@dataclass
class SupervisedArgs(RunArgs):
    """Flags of the supervised start. Each part is defined with its component."""

    total_rollout_steps: ClassVar = None

    data: DemonstrationArgs = DemonstrationArgs()
    learner: SupervisedLearnerArgs = field(default_factory=SupervisedLearnerArgs)
    log: SupervisedLogArgs = SupervisedLogArgs()
    checkpoint: CheckpointArgs = CheckpointArgs()

    packs_flat_apart: ClassVar[bool] = False  # every conversation is trained

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the two halves of the longest conversation."""
        half = self.data.max_length // 2
        return half, self.data.max_length - half

    def check(self) -> None:
        """Raise UserError unless the schedule is that of a supervised run."""
        check_kind(self, SupervisedSchedule, "train_sft.py")


def set_up(args: SupervisedArgs, file: str) -> Job:
    """Seed torch; read data, and the model without weights. Raise UserError if they cannot be used. file: the script."""
    torch.manual_seed(args.seed)
    path, config, tokenizer = read_model(args.model, args)
    if takes_images(config):
        raise UserError(f"--model {path}: it takes images, and a supervised start is of text alone. Train it by reward.")
    ends = end_token_ids(path, tokenizer, args.trust_remote_code)
    rows = Demonstrations(args.data.train_files, "train", tokenizer, args.data, ends)
    val_files = args.data.val_files or (("demo",) if args.data.train_files == ("demo",) else ())
    if args.val_only and not val_files:
        raise UserError("--val-only: there is nothing to validate on. Add --val-files.")
    validates = bool(val_files) and (args.test_freq > 0 or args.val_only)
    val_rows = Demonstrations(val_files, "val", tokenizer, args.data, ends) if validates else None
    order = order_of(rows, args.seed, args.data.shuffle)
    return Job(Path(file).stem, path, tokenizer, rows, val_rows, order, args.total_steps(len(rows)))


class SupervisedRun(LearnerRun):
    """A run whose batches are demonstrations."""

    plotted = "nll"

    def _restore(self, resumed: Resumed) -> None:
        self._skipped = self.learner.skipped  # optimizer steps, reported so far

    def batch(self, step: int) -> Batch:
        """Return the step's conversations. A collective of the learners."""
        size = self.args.schedule.prompts_per_step
        rows = {ticket: self.job.order(ticket)[1] for ticket in range((step - 1) * size, step * size)}
        return Batch.of(to_groups(self.job.prompts, rows), Division.of(self.args, self.learner))

    def log(self, step: int, batch: Batch, metrics: dict[str, float]) -> None:
        """Also warn of optimizer steps that were left out."""
        new = metrics["actor/skipped_steps"] - self._skipped
        self._skipped = metrics["actor/skipped_steps"]
        self.record.warn("optimizer steps skipped", new, "Their gradient was not finite: training diverges. Try a lower --lr.")
        self.record.log_tickets(step, batch.tickets)
        super().log(step, batch, metrics)


def to_groups(rows: Sequence, indices: Mapping[int, int]) -> list[Group]:
    """Convert rows of rl.data.demonstrations.Demonstrations to groups, which a learner takes: all tokens before the first
    trained one are the prompt. indices: ticket -> row."""
    groups = []
    for ticket, index in indices.items():
        ids, trained = rows[index]
        first = int(trained.argmax())
        unknown = np.zeros(len(ids) - first, np.int32)
        response = Response(ids[first:], unknown.astype(np.float32), unknown, "stop", mask=trained[first:])
        groups.append(Group(ticket, ids[:first], "sft", [response]))
    return groups
