"""Where --logger sends metrics, validations and a table of a few responses, besides metrics.jsonl and the console.

All classes have the functions of TensorBoard. A package is imported if its logger is asked for. A run that resumes goes on in
the same run there: its id is in the run's directory.
"""

import importlib
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl import parts
from rl.errors import UserError
from rl.masking import masked
from rl.printable import in_markdown
from rl.record import validations

GLOBAL_STEP = "training/global_step"  # of W&B's rows


def opened(args, directory: Path, first_step: int) -> list:
    """Return the loggers of --logger. args: the script's. directory: the run's. first_step: of a resumed run; else 0."""
    names = [name for name in args.log.logger if name != "console"]
    return [TensorBoard(directory, first_step) if name == "tensorboard" else _open(name, args, directory) for name in names]


def _open(name: str, args, directory: Path):
    try:
        package = importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"--logger {name}: {error}. Install it: pip install {name}") from None
    command = sys.argv
    handler = signal.getsignal(signal.SIGINT)
    sys.argv = masked(command)  # some record it
    try:
        return KINDS[name](package, args.log.project_name, directory, masked(parts.flat(args)))
    except Exception as error:  # no network, no account, no server: each package has exceptions of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"--logger {name}: {reason:.300} Log in, or keep the record here: {LOCAL[name]}.") from error
    finally:
        sys.argv = command
        signal.signal(signal.SIGINT, handler)  # Ctrl-C ends a rank at once, also in a collective: SwanLab's would not


def _recorded(directory: Path, name: str) -> str | None:
    """Return the id that the run has with a logger, if it resumes."""
    file = directory / name
    return file.read_text() if file.exists() else None


class TensorBoard:
    """Event files in the run's directory."""

    def __init__(self, directory: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory / "tensorboard", purge_step=first_step or None)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    log_validation = log  # step: after which the validated weights were published

    def log_generations(self, step: int, rows: list[dict]) -> None:
        """Show responses of a validation. rows: with validations.COLUMNS."""
        self._writer.add_text("val/generations", _table(rows), step)

    def finish(self) -> None:
        self._writer.close()


class MLflow:
    """A run of MLflow."""

    def __init__(self, mlflow, project: str, directory: Path, config: dict):
        self._mlflow = mlflow
        self._client = mlflow.MlflowClient()
        if known := _recorded(directory, "mlflow_id"):
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        self._id = self._client.create_run(number, run_name=directory.name).info.run_id
        (directory / "mlflow_id").write_text(self._id)
        for name, value in config.items():
            self._client.log_param(self._id, name, str(value)[:6000])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """MLflow's names have no @: verl writes _at_ instead."""
        now = int(1000 * time.time())
        names = {name: re.sub(r"[^\w./: -]", "_", name.replace("@", "_at_")) for name in metrics}
        made = [self._mlflow.entities.Metric(names[name], float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, made)

    log_validation = log

    def log_generations(self, step: int, rows: list[dict]) -> None:
        self._client.log_text(self._id, _table(rows), f"val_generations/step_{step:06d}.md")

    def finish(self) -> None:
        self._client.set_terminated(self._id)


class _ByStep:
    """A run of a package whose rows may come in any order of their steps."""

    _run: Any
    _text: Callable[[str], Any]  # what shows Markdown

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step)

    log_validation = log

    def log_generations(self, step: int, rows: list[dict]) -> None:
        self._run.log({"val/generations": self._text(_table(rows))}, step)

    def finish(self) -> None:
        self._run.finish()


class SwanLab(_ByStep):
    """A run of SwanLab."""

    def __init__(self, swanlab, project: str, directory: Path, config: dict):
        self._text = swanlab.Text
        known = _recorded(directory, "swanlab_id")
        resumed = {"id": known, "resume": "allow"} if known else {}
        self._run = swanlab.init(project=project, name=directory.name, log_dir=str(directory), config=config, **resumed)
        (directory / "swanlab_id").write_text(self._run.id)


class Trackio(_ByStep):
    """A run of Trackio, which bears the name of the run's directory."""

    def __init__(self, trackio, project: str, directory: Path, config: dict):
        self._text = trackio.Markdown
        resume = "must" if _recorded(directory, "trackio_name") else "never"
        self._run = trackio.init(project=project, name=directory.name, config=config, resume=resume, embed=False)
        (directory / "trackio_name").write_text(directory.name)


class WandB:
    """A run of Weights & Biases.

    A row's number there counts rows, not steps: several validations may arrive during one step, and W&B keeps one row per
    number. Metrics are plotted against training/global_step, those of validations against training/validated_step.
    """

    def __init__(self, wandb, project: str, directory: Path, config: dict):
        self._wandb = wandb
        known = _recorded(directory, "wandb_id")
        resumed = {"id": known, "resume": "allow"} if known else {}
        self._run = wandb.init(project=project, name=directory.name, dir=str(directory), config=config, **resumed)
        (directory / "wandb_id").write_text(self._run.id)
        self._rows = 1 + _lines(directory)  # the next row's number, above all that the run has logged
        self._generations: list[list] = []  # rows of the table, since this start
        self._axes = {GLOBAL_STEP, validations.STEP}  # that have been defined
        for axis in (GLOBAL_STEP, validations.STEP):
            self._run.define_metric(axis)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._log({GLOBAL_STEP: step} | metrics, GLOBAL_STEP)

    def log_validation(self, step: int, metrics: dict[str, float]) -> None:
        self._log({validations.STEP: step} | metrics, validations.STEP)

    def log_generations(self, step: int, rows: list[dict]) -> None:
        """Show responses in one table with those of earlier validations: W&B shows the newest table of a name."""
        self._generations += [[step, *(str(row[name]) for name in validations.COLUMNS)] for row in rows]
        shown = self._wandb.Table(columns=["step", *validations.COLUMNS], data=self._generations)
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


def _lines(directory: Path) -> int:
    """Return the number of lines in the records of steps and validations, including the superseded ones."""
    stems = ("metrics", "validations")
    files = [directory / f"{stem}{word}.jsonl" for stem in stems for word in ("", "_superseded")]
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())


KINDS = {"wandb": WandB, "mlflow": MLflow, "swanlab": SwanLab, "trackio": Trackio}
LOCAL = {
    "wandb": "WANDB_MODE=offline in the environment",
    "mlflow": "MLFLOW_TRACKING_URI=sqlite:///mlflow.db in the environment",
    "swanlab": "SWANLAB_MODE=offline in the environment",
    "trackio": "set no TRACKIO_SPACE_ID in the environment",
}


def _table(rows: list[dict]) -> str:
    """Return a Markdown table of a validation's responses."""
    names = validations.COLUMNS
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return "\n".join([*lines, *(f"| {' | '.join(in_markdown(str(row[name])) for name in names)} |" for row in rows)])
