"""Metrics for Weights & Biases.

A row's number there counts rows, not steps: several validations may arrive during one step, and W&B keeps one row per number.
Metrics are plotted against training/global_step, those of validations against training/validated_step.
"""

import sys
from pathlib import Path

from rl import parts
from rl.errors import UserError
from rl.masking import masked
from rl.record import validations

GLOBAL_STEP = "training/global_step"


class WandB:
    """The run in W&B: a new one, or the one whose id is in the run's directory."""

    def __init__(self, args, directory: Path, records: tuple[str, ...]):
        """args: the script's. directory: the run's. records: its files whose lines are logged here, too. Raise UserError if W&B
        refuses."""
        import wandb

        id_file = directory / "wandb_id"
        known = {"id": id_file.read_text(), "resume": "allow"} if id_file.exists() else {}
        where = {"project": args.log.project_name, "name": directory.name, "dir": str(directory)}
        command = sys.argv
        sys.argv = masked(command)  # it records that, too
        try:
            self._run = wandb.init(config=masked(parts.flat(args)), **where, **known)
        except wandb.errors.Error as error:
            remedy = "Log in with `wandb login`, or keep the record here with WANDB_MODE=offline in the environment."
            raise UserError(f"--logger wandb: {error} {remedy}") from error
        finally:
            sys.argv = command
        id_file.write_text(self._run.id)
        # the next row's number, above all that the run has logged
        self._rows = 1 + _lines(directory, records)
        self._generations: list[list] = []  # rows of the table, since this start
        self._axes = {GLOBAL_STEP, validations.STEP}  # that have been defined
        for axis in (GLOBAL_STEP, validations.STEP):
            self._run.define_metric(axis)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._log({GLOBAL_STEP: step} | metrics, GLOBAL_STEP)

    def log_validation(self, metrics: dict[str, float]) -> None:
        """metrics: with training/validated_step."""
        self._log(metrics, validations.STEP)

    def log_generations(self, step: int, rows: list[dict]) -> None:
        """Show responses of a validation in one table with those of earlier ones: W&B shows the newest table of a name."""
        import wandb

        self._generations += [[step, *(str(row[name]) for name in validations.COLUMNS)] for row in rows]
        shown = wandb.Table(columns=["step", *validations.COLUMNS], data=self._generations)
        self._log({validations.STEP: step, "val/generations": shown}, validations.STEP)

    def finish(self) -> None:
        self._run.finish()

    def _log(self, row: dict[str, float], axis: str) -> None:
        for name in row:
            head, slash, _ = name.partition("/")
            pattern = f"{head}/*" if slash else name
            if pattern not in self._axes and name not in self._axes:
                self._run.define_metric(pattern, step_metric=axis)
                self._axes.add(pattern)
        self._run.log(row, step=self._rows, commit=True)
        self._rows += 1


def _lines(directory: Path, records: tuple[str, ...]) -> int:
    """Return the number of lines in these records, including the superseded ones."""
    files = [directory / f"{Path(name).stem}{word}.jsonl" for name in records for word in ("", "_superseded")]
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())
