"""The run on the console: a live progress bar on a terminal, a plain line now and then elsewhere."""

import math
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from rl.printable import printable
from rl.record import validations

LINE_EVERY = 2.0  # seconds between lines, and between the numbers of the progress bar
# What a line shows: metric -> its form. Each is the mean of the steps since the last line; shares of time are weighted by it.
SHOWN = {
    "critic/score/mean": "reward {:.3f}",
    "actor/nll": "nll {:.3f}",
    "val/nll": "validation nll {:.3f}",
    "tokens/s": "{:,.0f} tokens/s",
    "fully_async/trainer/idle_ratio": "learners wait {:.0%}",
    "fully_async/rollouter/idle_ratio": "generators wait {:.0%}",
}


class ConsoleLog:
    """A live progress bar on a terminal; elsewhere a plain line now and then, always for a validation and the last step. Its
    numbers are means of the steps since the last line."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        self.last_line = -math.inf
        self._steps: list[dict[str, float]] = []  # metrics of the steps since the last line
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
        """Show the step, now or with later ones."""
        self._steps.append(metrics)
        validation = [v for k, v in metrics.items() if k.startswith("val-core/") and "/acc/mean@" in k]
        if validation:
            self.accuracy = sum(validation) / len(validation)
        now = time.monotonic()
        first_step, started = self.first = self.first or (step, now)
        if self.bar:
            self.bar.update(self.task, completed=step)
        if not (validation or "val/nll" in metrics or step == self.total_steps or now - self.last_line > LINE_EVERY):
            return
        self.last_line = now
        text = self._text(with_accuracy=bool(validation or self.bar))  # once in plain lines
        if self.bar:
            self.bar.update(self.task, description=text)
            if validation:
                self.bar.console.print(f"step {metrics.get(validations.STEP, step)}: validation accuracy {self.accuracy:.3f}")
            return
        done, steps = step - first_step, self.total_steps - first_step
        left = f"  {(now - started) / done * (self.total_steps - step):.0f} s left" if 0 < done < steps else ""
        print(f"step {step}/{self.total_steps}  {text}{left}", flush=True)

    def _text(self, with_accuracy: bool) -> str:
        """Return the numbers of the steps since the last line, which end with it."""
        found = {name: value for name in SHOWN if (value := _mean(name, self._steps)) is not None}
        self._steps = []
        words = [SHOWN[name].format(value) for name, value in found.items()]
        if with_accuracy and self.accuracy is not None:
            words.insert("critic/score/mean" in found, f"validation accuracy {self.accuracy:.3f}")
        return "  ".join(words)

    def say(self, text: str) -> None:
        text = printable(text)
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def _mean(name: str, steps: list[dict[str, float]]) -> float | None:
    """Return the steps' mean of a metric; None if no step has it. tokens/s: of all ranks; perf/throughput is per rank, as in
    verl."""
    seconds = "perf/time_per_step"
    if name == "tokens/s":
        timed = [row for row in steps if row.get(seconds)]
        return sum(row["perf/total_num_tokens"] for row in timed) / sum(row[seconds] for row in timed) if timed else None
    having = [row for row in steps if row.get(name) is not None and not math.isnan(row[name])]
    weights = [row.get("timing_s/step", 1.0) if name.endswith("idle_ratio") else 1.0 for row in having]
    total = sum(weights)
    return sum(row[name] * weight for row, weight in zip(having, weights, strict=True)) / total if total else None
