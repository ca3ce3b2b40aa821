"""The run on the console: a live progress bar on a terminal, a plain line now and then elsewhere."""

import math
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from rl.printable import printable
from rl.record import validations

PLAIN_LINE_EVERY = 2.0  # seconds between lines where the output is no terminal


class ConsoleLog:
    """A live progress bar on a terminal; elsewhere a plain line now and then, always for a validation and the last step."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        self.last_line = -math.inf
        self.accuracy: float | None = None
        self.first: tuple[int, float] | None = None  # step and time of the first `show`: a resumed run starts late
        self.bar = None
        console = Console()
        # also isatty: with FORCE_COLOR rich takes a log file for a terminal
        if sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
            whole = {"table_column": Column(no_wrap=True)}  # in a narrow window only the bar gives way
            columns = [TextColumn("step", **whole), MofNCompleteColumn(**whole)]
            columns += [BarColumn(bar_width=None, table_column=Column(ratio=1)), TextColumn("{task.description}", **whole)]
            columns += [TextColumn("left", **whole), TimeRemainingColumn(elapsed_when_finished=False, **whole)]
            self.bar = Progress(*columns, console=console, expand=True)
            self.bar.start()
            console.show_cursor(True)  # a failing rank ends by os._exit, which would leave the terminal without a cursor
            self.task = self.bar.add_task("", total=total_steps)

    def show(self, step: int, metrics: dict[str, float]) -> None:
        validation = [v for k, v in metrics.items() if k.startswith("val-core/") and "/acc/mean@" in k]
        if validation:
            self.accuracy = sum(validation) / len(validation)
        accuracy = self.accuracy if validation or self.bar else None  # once in plain lines
        parts = [("reward {:.3f}", metrics.get("critic/score/mean")), ("validation accuracy {:.3f}", accuracy)]
        parts += [("nll {:.3f}", metrics.get("actor/nll")), ("validation nll {:.3f}", metrics.get("val/nll"))]
        parts += [("{:,.0f} tokens/s", _rate(metrics))]
        parts += [("learners wait {:.0%}", metrics.get("fully_async/trainer/idle_ratio"))]
        parts += [("generators wait {:.0%}", metrics.get("fully_async/rollouter/idle_ratio"))]
        text = "  ".join(form.format(value) for form, value in parts if value is not None)
        if self.bar:
            self.bar.update(self.task, completed=step, description=text)
        now = time.monotonic()
        first_step, started = self.first = self.first or (step, now)
        if self.bar and validation:
            self.bar.console.print(f"step {metrics.get(validations.STEP, step)}: validation accuracy {self.accuracy:.3f}")
        elif not self.bar and (
            validation or "val/nll" in metrics or step == self.total_steps or now - self.last_line > PLAIN_LINE_EVERY
        ):
            done, steps = step - first_step, self.total_steps - first_step
            left = f"  {(now - started) / done * (self.total_steps - step):.0f} s left" if 0 < done < steps else ""
            print(f"step {step}/{self.total_steps}  {text}{left}", flush=True)
            self.last_line = now

    def say(self, text: str) -> None:
        text = printable(text)
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def _rate(metrics: dict[str, float]) -> float | None:
    """Return the tokens per second of all ranks; perf/throughput is per rank, as in verl."""
    seconds = metrics.get("perf/time_per_step")
    return metrics["perf/total_num_tokens"] / seconds if seconds else metrics.get("perf/throughput")
