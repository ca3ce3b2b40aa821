"""The settings of a job, each run in simulated time: which split, staleness and period are the fastest, and how far apart.

One setting is varied at a time, from the flags as they were given: the splits of the ranks first, then, at the best of them,
the staleness threshold and the steps from publish to publish; train_sync.py and train_one_step_off.py are listed with them.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from rl.errors import UserError
from rl.plan.service_times import ServiceTimes
from rl.plan.simulation import Load, Ranks, Steps, one_step_off, sync
from rl.plan.stream import asynchronous
from rl.plan.workload import Workload
from rl.samples.schedule import ScheduleArgs, SplitArgs

SCRIPTS = ("train_sync", "train_one_step_off", "train_async")
THRESHOLDS, PERIODS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0), (1, 2, 4, 8)
WORTH = 1.02  # a staler setting must be faster by this factor to be chosen
PUBLISHES = 12  # at the least in a simulated run


def mode_of(script: str) -> str:
    """One of SCRIPTS: the script that the named one is, or is a copy of, by what its Args descend from."""
    args = importlib.import_module(script).Args
    if issubclass(args, ScheduleArgs):
        return "train_async"
    return "train_one_step_off" if issubclass(args, SplitArgs) else "train_sync"


@dataclass(frozen=True)
class Machine:
    """The ranks of the whole job."""

    nodes: int
    per_node: int

    def colocated(self, per_engine: int) -> Ranks:
        total = self.nodes * self.per_node
        return Ranks(total // per_engine, total, per_engine, colocated=True)

    def split(self, generators: int, per_engine: int) -> Ranks:
        """generators: of each node. Raises UserError where that leaves a role empty or an engine incomplete."""
        if not 0 < generators < self.per_node or generators % per_engine:
            raise UserError(
                f"--generators {generators} of {self.per_node} ranks a node: both roles need a rank, and --rollout-tp "
                f"{per_engine} must divide the generators."
            )
        return Ranks(self.nodes * generators // per_engine, self.nodes * (self.per_node - generators), per_engine)


@dataclass(frozen=True)
class Setting:
    """One way to run the job."""

    script: str  # one of SCRIPTS
    ranks: Ranks
    generators: int = 0  # of each node, where the ranks are split
    threshold: float = 0.0
    period: int = 1

    @property
    def flags(self) -> str:
        """What tells it from others on the command line."""
        if self.script == "train_sync":
            return ""
        split = f"--generators {self.generators}"
        if self.ranks.per_engine > 1:
            split += f" --rollout-tp {self.ranks.per_engine}"
        if self.script == "train_one_step_off":
            return split
        return f"{split} --staleness-threshold {self.threshold:g} --publish-every {self.period}"


@dataclass(frozen=True)
class Row:
    setting: Setting
    steps: Steps

    @property
    def rate(self) -> float:
        return self.steps.tokens_per_second

    @property
    def lag(self) -> float:
        """Steps of training by which a mean token's weights are behind those that it trains."""
        return self.steps.mean(self.steps.mean_age) * self.setting.period + (self.setting.period - 1) / 2


@dataclass(frozen=True)
class Job:
    """What stays the same in all settings."""

    args: object  # of the script, checked: the flags as they were given
    machine: Machine
    times: Callable[[Ranks], ServiceTimes]
    workload: Workload
    slots: Callable[[Ranks], int]  # responses that an engine decodes at once

    def load(self, ranks: Ranks) -> Load:
        a = self.args
        updates = a.ppo_epochs * math.ceil(a.prompts_per_step / a.prompts_per_update)
        what = (a.max_num_batched_tokens, a.filter_groups, a.max_num_gen_batches, getattr(a, "surplus", 0))
        return Load(a.prompts_per_step, updates, self.slots(ranks), *what)

    def schedule(self, threshold: float, period: int) -> ScheduleArgs:
        """The flags of train_async.py's schedule; a step of the other scripts is one fetch."""
        a = self.args
        if isinstance(a, ScheduleArgs):
            kept = {field.name: getattr(a, field.name) for field in dataclasses.fields(ScheduleArgs)}
        else:
            kept = {"train_batch_size": a.prompts_per_step, "ppo_mini_batch_size": a.prompts_per_update}
        return ScheduleArgs(**kept | {"staleness_threshold": threshold, "publish_every": period})

    def run(self, setting: Setting, steps: int | None = None) -> Row:
        """The setting in simulated time, over this many steps, by default over PUBLISHES publishes."""
        ranks = setting.ranks
        common = (self.times(ranks), self.load(ranks), ranks, self.workload)
        if setting.script == "train_sync":
            return Row(setting, sync(*common, steps or PUBLISHES))
        if setting.script == "train_one_step_off":
            return Row(setting, one_step_off(*common, steps or PUBLISHES))
        schedule = self.schedule(setting.threshold, setting.period)
        return Row(setting, asynchronous(*common, schedule, steps or PUBLISHES * setting.period))


def compare(job: Job) -> list[Row]:
    """The settings worth comparing, in the order of the module's text; the setting of the flags is among them."""
    args, machine = job.args, job.machine
    per_engine = args.rollout_tp
    rows = []
    if machine.nodes * machine.per_node % per_engine == 0:
        rows.append(job.run(Setting("train_sync", machine.colocated(per_engine))))
    threshold, period = getattr(args, "staleness_threshold", 1.0), getattr(args, "publish_every", 1)
    streams = []
    for generators in _splits(machine.per_node, per_engine):
        ranks = machine.split(generators, per_engine)
        rows.append(job.run(Setting("train_one_step_off", ranks, generators)))
        streams.append(job.run(Setting("train_async", ranks, generators, threshold, period)))
    rows += streams
    if streams:
        setting = max(streams, key=lambda row: row.rate).setting
        others = [dataclasses.replace(setting, threshold=t) for t in THRESHOLDS if t != threshold]
        others += [dataclasses.replace(setting, period=p) for p in PERIODS if p != period]
        rows += map(job.run, others)
    return rows


def best(rows: list[Row]) -> Row:
    """The fastest; of those within WORTH of it the one that lags least."""
    fastest = max(row.rate for row in rows)
    close = [row for row in rows if row.rate * WORTH >= fastest]
    return min(close, key=lambda row: (row.lag, -row.rate))


def _splits(per_node: int, per_engine: int) -> list[int]:
    """Generators of a node: at most some eight numbers, spread evenly."""
    able = [g for g in range(per_engine, per_node, per_engine)]
    return able[:: max(1, math.ceil(len(able) / 8))]


# ----------------------------------------------------------------------------------------------------------- the page

HEAD = ("mode", "gen:\nlearn", "stale", "sync", "tok/s", "s/step", "learn\nidle", "gen\nidle", "lag", "age", "drop")


def cells(row: Row) -> tuple[str, ...]:
    """The row's columns, as HEAD names them: ranks of either role, --staleness-threshold, --publish-every, ...,
    lag in steps, age of the oldest token in versions, tickets dropped."""
    steps, setting, ranks = row.steps, row.setting, row.setting.ranks
    streams = setting.script == "train_async"
    return (
        {"train_one_step_off": "one off"}.get(setting.script, setting.script.removeprefix("train_")),
        f"{ranks.total}" if ranks.colocated else f"{ranks.engines * ranks.per_engine}:{ranks.learners}",
        f"{setting.threshold:g}" if streams else "-",
        f"{setting.period}" if streams else "-",
        f"{row.rate:,.0f}",
        f"{steps.step_seconds:,.3g}" if steps.step_seconds < 100 else f"{steps.step_seconds:,.0f}",
        *(("-", "-") if ranks.colocated else (f"{steps.learner_idle:.0%}", f"{steps.generator_idle:.0%}")),
        f"{row.lag:.2f}",
        str(max(steps.max_age)),
        str(steps.dropped.total()),
    )


def hours(row: Row, total_steps: int) -> tuple[float, float]:
    """(hours, device hours) of this many steps, without validation, checkpoints and start-up."""
    wall = row.steps.step_seconds * total_steps / 3600
    return wall, wall * row.setting.ranks.total


def verdict(rows: list[Row], total_steps: int, source: str) -> str:
    """The setting to take, and what it costs, in sentences."""
    chosen = best(rows)
    wall, devices = hours(chosen, total_steps)
    sync_row = next((row for row in rows if row.setting.script == "train_sync"), None)
    against = f", {chosen.rate / sync_row.rate:.2f} times train_sync.py" if sync_row and sync_row is not chosen else ""
    command = " ".join(filter(None, [f"{chosen.setting.script}.py", chosen.setting.flags]))
    return (
        f"best: {command}: {chosen.rate:,.0f} tokens/s{against}\n"
        f"{total_steps:,} steps: {wall:,.2f} hours, {devices:,.2f} device hours (validation, checkpoints and start-up aside)\n"
        f"service times: {source}"
    )


def plot(rows: list[Row], target) -> None:
    """Tokens/s of every setting as bars, those of the best dark, with the waits of both sides. A PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.32 * len(rows) + 1.4), dpi=110)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    labels = [f"{row.setting.script.removeprefix('train_')} {row.setting.flags}".strip() for row in rows]
    chosen = best(rows)
    left.barh(labels, [row.rate for row in rows], color=["C0" if row is chosen else "C7" for row in rows])
    left.set(xlabel="tokens/s of the whole job (simulated)")
    split = [row.setting.script != "train_sync" for row in rows]
    for side, color in (("learner_idle", "C1"), ("generator_idle", "C2")):
        shares = [getattr(row.steps, side) if is_split else math.nan for row, is_split in zip(rows, split, strict=True)]
        right.plot(shares, range(len(rows)), "o", ms=4, color=color, label=side.replace("_idle", "s wait"))
    right.set(xlabel="share of the time", xlim=(-0.02, 1))
    right.legend(fontsize=7)
    left.invert_yaxis()
    left.tick_params(axis="y", labelsize=6)
    figure.tight_layout()
    figure.savefig(target)
