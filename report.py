"""Compares runs: plots, tables and conclusions from their metrics, as Markdown and HTML with PNG files next to them.

    python report.py runs/a runs/b --output report      # also directories of runs, metrics.jsonl, event files
    python report.py runs/ --speedup train_sync         # wall clock to the same reward, against the runs of train_sync
    python report.py verl/sync.log runs/async           # a verl console log, compared with a run of ours (docs/report.md)

Runs of the same code whose flags differ only in seed and names form one group. A group's curve is the mean, with a band from
the lowest to the highest run. Unfinished and damaged logs are read as far as possible. Each conclusion stands next to the
numbers it rests on, or says that they are too few: a difference in speed needs two runs of 20 steps, a difference in learning
three runs of each group. Responses of the last validation are shown, if a run recorded any. Left out: anything else
that is not in the metrics (docs/metrics.md). Needs no torch.
"""

import html
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from rl.errors import UserError
from rl.printable import in_markdown, printable
from tools.report.conclusions import conclude, overview, responses, speedup
from tools.report.logs import (
    HELD,
    IDLE,
    REWARD,
    STEP_SECONDS,
    THROUGHPUT,
    Log,
    RunGroup,
    count,
    find_runs,
    group_runs,
    is_accuracy,
    load,
    smoothed,
)

LINES = {  # file: title, and for each panel its metric and label
    "throughput": ("Speed", {THROUGHPUT: "tokens/s of all ranks, prompts included", STEP_SECONDS: "seconds a step"}),
    "idle": (
        "Idle ratios",
        {
            IDLE["learner"]: "first learner waits (share)",
            IDLE["generator"]: "generators wait (share)",
            HELD: "generators held by the staleness bound (share)",
        },
    ),
    "lengths": (
        "Response lengths",
        {"response_length/mean": "mean response, tokens", "response_length/clip_ratio": "truncated share"},
    ),
    "log_probs": (
        "Rollout against learner",
        {
            "training/rollout_probs_diff_mean": "mean difference of probability",
            "rollout_corr/log_ppl_abs_diff": "log-prob difference of a response, nats",
        },
    ),
    "memory": (
        "Memory",
        {"perf/max_memory_allocated_gb": "device, peak GiB", "perf/cpu_memory_used_gb": "rank 0, peak resident GiB"},
    ),
    "mfu": ("MFU", {"perf/mfu/actor": "MFU of the update"}),
}
SMOOTHED = {REWARD, THROUGHPUT, STEP_SECONDS, HELD, *IDLE.values()}  # differ much from step to step
PHASES = """Seconds of a mean step, without the first step of each attempt. generate: the engine's steps. score: verifiers.
wait: for the other role. publish: sending or receiving weights. train: forward, backward and optimizer. other: everything
without a timer of its own, mostly bookkeeping (drawing tickets and reading the control block, both round trips to
torchrun's store; packing records; logs, validation, checkpoints). On a busy machine, the time in which a process has no
core counts towards its current phase, so "other" grows as well."""
WRAP = 38  # characters of a label's line that fit a panel


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """Directories of runs, directories that hold runs, metrics.jsonl files, TensorBoard directories or event files, and verl's
    console logs or file logs."""
    output: str = "report"
    """Directory for report.md, report.html and the plots."""
    title: str = "Report"
    """Heading of the pages."""
    speedup: str | None = None
    """Compare wall clock to the same reward against this group (its name in the report) or run (its directory)."""
    smooth: int = 10
    """Steps that each point of a reward, throughput or idle-ratio curve averages over."""


# ------------------------------------------------------------------------------------------------------- plots


def draw(axes, groups: list[RunGroup], curve: Callable) -> bool:
    """Draw a line for each group: the mean of curve(log) [n, 2] over its runs up to the shortest, a band from lowest to
    highest, and each run as a thin line behind. Return whether there was anything to draw."""
    for i, group in enumerate(groups):
        curves = [c[c[:, 0].argsort(kind="stable")] for log in group.logs if len(c := curve(log))]  # clocks may be set back
        if not curves:
            continue
        marker = {"marker": "o", "ms": 3} if min(map(len, curves)) < 15 else {}
        for c in curves if len(curves) > 1 else []:
            axes.plot(*c.T, color=f"C{i}", lw=0.6, alpha=0.4)
        grid = np.unique(np.concatenate([c[:, 0] for c in curves]))
        grid = grid[(grid >= max(c[0, 0] for c in curves)) & (grid <= min(c[-1, 0] for c in curves))]
        if len(grid):
            values = np.stack([np.interp(grid, *c.T) for c in curves])  # [runs, n]
            axes.plot(grid, values.mean(0), color=f"C{i}", lw=1.6, label=wrap(group.label), **marker)
            axes.fill_between(grid, values.min(0), values.max(0), color=f"C{i}", alpha=0.15, lw=0)
        else:
            axes.lines[-1].set_label(wrap(group.label))  # the runs have no step in common
    axes.grid(alpha=0.3)
    return bool(axes.lines)


def curve(name: str, axis: str, width: int, scale: float) -> Callable[[Log], np.ndarray]:
    """The points for `draw`: the metric over the axis divided by `scale`, as means of `width` values, fewer in a short run."""

    def of(log: Log) -> np.ndarray:
        points = log.points(name, axis) / (scale, 1)
        return smoothed(points, min(width, max(1, len(points) // 4)))

    return of


def plot_lines(groups: list[RunGroup], target: Path, panels: list[tuple[str, str, str, int]]) -> bool:
    """Draw a panel for each (metric, label, axis, steps to average). Return False, and write nothing, if there is no number."""
    figure = Figure(figsize=(4.2 * len(panels) + 0.4, 3.4), dpi=75)
    unit, seconds = ("hours", 3600) if max(log.seconds for g in groups for log in g.logs) > 7200 else ("seconds", 1)
    drawn = False
    for axes, (name, label, axis, width) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        drew = draw(axes, groups, curve(name, axis, width, seconds if axis == "seconds" else 1))
        xlabel = {"responses": "responses trained", "seconds": f"{unit} of training"}.get(axis, axis)
        axes.set(xlabel=xlabel, ylabel=wrap(label))
        if drew and not drawn:
            axes.legend(fontsize=7)
        drawn = drawn or drew
        if not drew:
            axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)
    if drawn:
        save(figure, target)
    return drawn


def wrap(label: str) -> str:
    return textwrap.fill(label, WRAP)


def save(figure: Figure, target: Path) -> None:
    """Writes the plot with room for every label, however long."""
    figure.tight_layout()
    figure.savefig(target, bbox_inches="tight")


def shares(group: RunGroup) -> dict[str, dict[str, float]]:
    """The ledger: {role: {phase: share of its ranks' time}}, over all ranks, steps and runs of the group."""
    out: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for log in group.logs:
        for name in sorted(n for n in log.names if n.startswith("ledger/") and n.count("/") == 2):
            _, rank, phase = name.split("/")
            if (share := log.over_time(name)) is not None:  # a short run may have it for its first step only
                out[rank.rpartition("_")[0]][phase].append(share)
    return {role: {phase: float(np.mean(v)) for phase, v in phases.items()} for role, phases in out.items()}


def plot_bars(bars: dict[str, dict[str, float]], target: Path, label: str) -> bool:
    """A stacked bar for each of {bar: {part: length}}."""
    if not bars:
        return False
    figure = Figure(figsize=(8.8, 1.2 + 0.4 * len(bars)), dpi=75)
    axes = figure.subplots()
    left = np.zeros(len(bars))
    for part in dict.fromkeys(part for parts in bars.values() for part in parts):
        width = np.array([parts.get(part, 0.0) for parts in bars.values()])
        axes.barh([wrap(bar) for bar in bars], width, left=left, label=part)
        left += width
    axes.set(xlabel=label)
    axes.invert_yaxis()
    axes.legend(fontsize=7, bbox_to_anchor=(1, 1))
    save(figure, target)
    return True


def plots(groups: list[RunGroup], directory: Path, smooth: int) -> list[tuple]:
    """Write every plot that the runs have numbers for. Return the page's blocks, which name the metrics that are missing."""
    made, absent = [], []

    def add(file: str, title: str, drawn: bool) -> None:
        made.extend([("heading", title), ("image", f"{file}.png", title)]) if drawn else absent.append(title.lower())

    accuracies = sorted({n for g in groups for log in g.logs for n in log.names if is_accuracy(n)})
    wanted = [("reward", "Reward", REWARD, *smoothing(REWARD, "reward", smooth))]
    wanted += [(f"accuracy_{i}", f"Validation accuracy: {n}", n, "accuracy", 1) for i, n in enumerate(accuracies, 1)]
    for file, title, name, label, width in wanted:
        panels = [(name, label, axis, width) for axis in ("step", "responses", "seconds")]
        add(file, title, plot_lines(groups, directory / f"{file}.png", panels))
    if not accuracies:
        absent.append("validation accuracy")
    bars = {}
    for group in groups:
        step = group.each(lambda log: log.mean_step)
        for role, of in shares(group).items() if step else []:
            bars[f"{group.label}, {role}"] = {phase: share * np.mean(step) for phase, share in of.items()}
    add(
        "step_time",
        "Step time by the ledger",
        plot_bars(bars, directory / "step_time.png", "seconds of a mean step"),
    )
    made.extend([("text", " ".join(PHASES.split()))] if bars else [])
    for file, (title, panels) in LINES.items():
        lines = [(name, *smoothing(name, label, smooth)) for name, label in panels.items()]
        add(file, title, plot_lines(groups, directory / f"{file}.png", [(n, lab, "step", width) for n, lab, width in lines]))
    ages = {group.label: of for group in groups if (of := staleness(group))}
    add(
        "staleness",
        "Staleness",
        plot_bars(ages, directory / "staleness.png", "share of trained tokens, by age in versions"),
    )
    return made + ([("text", f"Not recorded by any of these runs: {', '.join(absent)}.")] if absent else [])


def smoothing(name: str, label: str, steps: int) -> tuple[str, int]:
    """Return the label of a metric's panel, which includes the number of steps it averages over."""
    return (f"{label}, mean of up to {steps} steps", steps) if name in SMOOTHED else (label, 1)


def staleness(group: RunGroup) -> dict[str, float]:
    """Return {age in versions: mean share of a step's tokens}; a step that does not list an age has no tokens of that age."""
    rows = [row for log in group.logs for row in log.rows if "staleness/mean" in row]
    ages = sorted({n for row in rows for n in row if n.startswith("staleness/age_")})
    return {n.removeprefix("staleness/age_"): float(np.mean([row.get(n, 0.0) for row in rows])) for n in ages}


# ------------------------------------------------------------------------------------------------------- pages


def compose(groups: list[RunGroup], args: Args, directory: Path) -> list[tuple]:
    """Return the page in blocks: ("heading" | "text", words), ("table", rows, the header first), ("image", file, words),
    ("responses", rows of texts). The other groups are compared with the first one."""
    logs = [log for group in groups for log in group.logs]
    blocks = [("title", args.title), ("table", overview(groups, args.smooth))]
    words = "Several runs: mean (lowest - highest). Seconds of training are counted from the first step's beginning; the "
    words += "pauses of a run that was stopped and resumed are left out, and so are steps that were lost and trained again."
    hardware = [log.config["hardware"] for log in logs if "hardware" in log.config]
    machines = sorted({f"{h.get('device_name')} ({h.get('cpu')}, {h.get('cores')} cores)" for h in hardware})
    words += f" Ran on {'; '.join(machines)}." if machines else ""
    if len(machines) > 1:
        words += " These are different machines: their seconds and tokens/s do not compare."
    blocks += [("text", words), ("heading", "Conclusions")]
    blocks += [("table", [["of", "conclusion", "the numbers it rests on"], *map(list, conclude(groups))])]
    if args.speedup:
        table = speedup(groups, groups[0], args.smooth)
        words = f"The reward is the mean of {args.smooth} steps; levels are those that every run reaches and none starts above."
        blocks += [("heading", "Wall clock to the same reward"), ("table", table), ("text", words)]
    blocks += plots(groups, directory, args.smooth)
    for heading, table in filter(None, map(responses, groups)):
        blocks += [("heading", heading), ("responses", table), ("text", "All responses of a run: python view.py RUN")]
    noted = [[str(log.path), note] for log in logs for note in log.notes]
    return blocks + ([("heading", "Of the records"), ("table", [["run", "note"], *noted])] if noted else [])


def find_base(groups: list[RunGroup], name: str) -> RunGroup:
    """Return the group that has this label or contains this run."""
    for group in groups:
        if name == group.label or Path(name).resolve() in [log.path.resolve() for log in group.logs]:
            return group
    labels = ", ".join(repr(group.label) for group in groups)
    raise UserError(f"--speedup {name}: no such group. Give one of {labels}, or the directory of one of the runs.")


def markdown(blocks: list[tuple]) -> str:
    escape = lambda cell: cell.replace("|", "\\|").replace("<", "&lt;")  # noqa: E731
    out = []
    for kind, content, *more in blocks:
        if kind in ("table", "responses"):
            cell = {"table": escape, "responses": in_markdown}[kind]
            lines = ["| " + " | ".join(map(cell, row)) + " |" for row in content]
            out.append("\n".join([lines[0], "|" + "---|" * len(content[0]), *lines[1:]]))
        else:
            form = {"title": "# {}", "heading": "## {}", "text": "{}", "image": "![{1}]({0})"}[kind]
            out.append(form.format(escape(content), *more))
    return "\n\n".join(out) + "\n"


STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { border: 1px solid #ccc; padding: 3px 8px; text-align: left;
vertical-align: top; white-space: pre-line; overflow-wrap: anywhere } th { background: #f4f4f4 } img { max-width: 100% }"""


def page(blocks: list[tuple]) -> str:
    """Return HTML that loads nothing from the network; the plots are files next to it."""
    out = []
    for kind, content, *more in blocks:
        if kind in ("table", "responses"):
            row = lambda cells, tag: "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"  # noqa: E731
            out.append("<table>" + row(content[0], "th") + "".join(row(cells, "td") for cells in content[1:]) + "</table>")
        elif kind == "image":
            out.append(f'<p><img src="{html.escape(content)}" alt="{html.escape(more[0])}"></p>')
        else:
            tag = {"title": "h1", "heading": "h2", "text": "p"}[kind]
            out.append(f"<{tag}>{html.escape(content)}</{tag}>")
    title = html.escape(next(b[1] for b in blocks if b[0] == "title"))
    head = f'<meta charset="utf-8"><link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(out) + "\n</body></html>\n"


def main(args: Args) -> None:
    if args.smooth < 1:
        raise UserError(f"--smooth must be at least 1, it is {args.smooth}.")
    logs = [load(path) for path in find_runs(args.runs)]
    for log in logs:
        for note in log.notes:
            print(f"{log.path}: {note}", file=sys.stderr)
    recorded = [log for log in logs if log.rows]
    if not recorded:
        raise UserError(f"{', '.join(map(str, args.runs))}: no step was recorded, so there is nothing to report yet.")
    groups = group_runs(recorded)
    base = find_base(groups, args.speedup) if args.speedup else groups[0]  # the one that the others are compared with
    groups.sort(key=lambda group: group is not base)
    directory = Path(args.output)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {directory}: cannot be made ({error.strerror}). Choose another.") from error
    blocks = compose(groups, args, directory)
    empty = [[str(log.path), note] for log in logs if not log.rows for note in log.notes]
    blocks += [("heading", "Runs without a step"), ("table", [["run", "note"], *empty])] if empty else []
    (directory / "report.md").write_text(markdown(blocks), encoding="utf-8")
    (directory / "report.html").write_text(page(blocks), encoding="utf-8")
    if args.speedup:
        print(markdown([blocks[i + 1] for i, b in enumerate(blocks) if b[1] == "Wall clock to the same reward"]))
    counts = f"{count(len(recorded), 'run')} in {count(len(groups), 'group')}"
    print(f"{counts}: {directory / 'report.html'}, {directory / 'report.md'}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (UserError, OSError) as error:  # OSError: it names the file that cannot be read or written
        sys.exit(printable(f"error: {error}"))  # exit code 1
