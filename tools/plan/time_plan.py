"""The time part of plan.py: each mode and split of the ranks in simulated time, side by side."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from rl.errors import UserError
from rl.model.pretrained import load_config, resolve
from rl.samples.split_schedule import AsyncSchedule
from rl.setup import CommonArgs
from tools.plan.devices import Device, Machine, Roles
from tools.plan.memory_plan import engine_memory, say
from tools.plan.roofline import count_parameters, times_of
from tools.plan.simulation import Result, Times, simulate
from tools.plan.workload import Drawn, lengths_like
from tools.report.logs import load

FIXED = 0.5  # of a decode step; measured, a third (CPU, 64 responses) to most of it (GPUs, few responses)
NOT_LEARNING = ("wait", "gen", "update_weights", "testing", "save_checkpoint")  # timers of the rest of a step
WORTH = 1.02  # a mode with staler samples must be faster by this factor


@dataclass(frozen=True)
class Way:
    """A way to run the job."""

    script: str
    generators: int  # of each node; 0 where all ranks generate and learn
    roles: Roles
    result: Result

    @property
    def rate(self) -> float:
        """Tokens/s of the whole job."""
        return self.result.tokens / self.result.seconds

    def cells(self) -> list[str]:
        result = self.result
        waits = [f"{result.generators_wait:.0%}", f"{result.learners_wait:.0%}"] if self.generators else ["-", "-"]
        seconds = f"{result.seconds:,.0f}" if result.seconds >= 100 else f"{result.seconds:.3g}"
        return [self.script, f"{self.generators or 'all'}", *waits, f"{self.rate:,.0f}", seconds]


def plan_time(args: CommonArgs, machine: Machine, lengths: str, device: Device | None, run: str | None) -> None:
    """Print how long a step takes in each mode and split of the ranks, and the best of them. lengths: as in --response-lengths;
    run: the directory of a finished run. Raise UserError if it cannot be planned."""
    prompt, response = args.longest
    work = lengths_like(lengths, args.sampling.rollout_n + args.loss.needs_greedy, response, prompt)
    times, slots = sources(args, machine, work, device, run)
    rows = list(compare(args, machine, work, times, slots))
    if not rows:
        raise UserError(
            f"--rollout-tp {args.engine.rollout_tp}: an engine's ranks are on one node, and a node has {machine.per_node}."
        )
    chosen = best(rows)
    table = Table(title="a step in simulated time", box=box.SIMPLE_HEAD)
    table.add_column("mode", no_wrap=True)
    for name in ("generators", "they\nwait", "learners\nwait", "tokens/s", "seconds\na step"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row.cells(), style="bold" if row is chosen else None)
    say(table)
    say(verdict(chosen, rows[0], args.total_training_steps or 1000))
    say(f"Seconds of each part: {times(chosen.roles).source}.")


def sources(
    args: CommonArgs, machine: Machine, work: Drawn, device: Device | None, run: str | None
) -> tuple[Callable[[Roles], Times], int]:
    """Return (the times of a job's ranks, the responses that an engine decodes at once): a finished run's, else those of the
    device's data sheet."""
    if run:
        recorded = times_of_run(Path(run))
        return lambda roles: recorded, args.engine.max_num_seqs
    if device is None:
        raise UserError("No times are known. Give --device, or --from-run with the directory of a finished run.")
    config = load_config(resolve(args.model), args.trust_remote_code)
    parameters = count_parameters(config, args.trust_remote_code)
    fit = engine_memory(args, device).responses(work.prompt + work.mean)
    slots = max(1, min(args.engine.max_num_seqs, fit))
    return lambda roles: times_of(config, parameters, device, args, roles, machine.nodes), slots


def compare(args: CommonArgs, machine: Machine, work: Drawn, times: Callable[[Roles], Times], slots: int) -> Iterator[Way]:
    """Return all modes, those with the freshest samples first, each with all splits of the ranks."""
    prompts = args.schedule.prompts_per_step
    per_engine = args.engine.rollout_tp
    total = machine.nodes * machine.per_node
    if total % per_engine == 0:
        roles = Roles(total // per_engine, total, per_engine, colocated=True)
        surplus = getattr(args.schedule, "surplus", 0) / prompts
        schedule = AsyncSchedule(ppo_mini_batch_size=prompts, staleness_threshold=surplus)
        yield Way("train_sync.py", 0, roles, simulate(times(roles), schedule, roles, slots, work))
    one_off = AsyncSchedule(ppo_mini_batch_size=prompts, staleness_threshold=1)
    stream = args.schedule if isinstance(args.schedule, AsyncSchedule) else one_off
    for script, schedule in (("train_one_step_off.py", one_off), ("train_async.py", stream)):
        for generators in range(per_engine, machine.per_node, per_engine):
            roles = machine.split(generators, per_engine)
            result = simulate(times(roles), schedule, roles, slots, work, whole_batches=script == "train_one_step_off.py")
            yield Way(script, generators, roles, result)


def best(rows: list[Way]) -> Way:
    """Return the fastest row, or a mode with fresher samples if it is as fast to within WORTH."""
    fastest = max(row.rate for row in rows)
    script = next(row.script for row in rows if row.rate * WORTH >= fastest)
    return max((row for row in rows if row.script == script), key=lambda row: row.rate)


def verdict(chosen: Way, first: Way, steps: int) -> str:
    command = chosen.script + (f" --generators {chosen.generators}" if chosen.generators else "")
    against = f", {chosen.rate / first.rate:.2f}x as fast as {first.script}" if chosen is not first else ""
    hours = chosen.result.seconds * steps / 3600
    time = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    return f"Best: {command}, {chosen.rate:,.0f} tokens/s{against}. {steps:,} steps take about {time}."


def times_of_run(path: Path) -> Times:
    """Return the seconds of a finished run's parts. A run records how long its steps took, not how that depends on their size:
    each token is taken to cost the same to train, and half of a decode step not to depend on the number of responses. That is
    best near the run's ranks and batch. Raise UserError if the run's record does not say."""
    log = load(path)
    rows = [row for row in log.rows if row["step"] not in log.starts and "timing_s/update_actor" in row]
    if not rows or not log.responses_per_step:
        raise UserError(f"--from-run {path}: it has recorded no step with its timings after the first.")

    def mean(name: str) -> float:
        return float(np.mean([row.get(name, 0.0) for row in rows]))

    responses = log.responses_per_step
    length = mean("response_length/mean")
    learners = log.config.get("hardware", {}).get("world_size", 1)  # of the learners, if the run was split
    learned = mean("timing_s/step") - sum(mean(f"timing_s/{name}") for name in NOT_LEARNING)
    tokens = responses * (length + mean("prompt_length/mean") / log.flags["rollout_n"])
    publish = mean("timing_s/update_weights")
    per_engine = log.flags.get("rollout_tp", 1)
    ahead = 1.0  # batches under way at a time
    if mean("timing_s/gen"):
        busy = learners * mean("timing_s/gen")
        generators = learners
        receive = publish
    else:
        busy, generators = _busy(rows, path)
        receive = mean("publish/seconds")
        if "staleness_threshold" in log.flags:
            ahead = 0.5 + log.flags["staleness_threshold"] * log.flags.get("publish_every", 1)
    running = ahead * responses * per_engine / generators * length / mean("response_length/max")  # the longest runs alone
    running = max(1.0, min(log.flags.get("max_num_seqs", 256), running))
    step = busy / per_engine / (responses * length) * running
    return Times(
        source=f"{len(rows)} steps of {path}",
        step=FIXED * step,
        row=(1 - FIXED) * step / running,
        receive=receive,
        token=max(0.0, learned) * learners / tokens,
        publish=publish,
    )


def _busy(rows: list[dict], path: Path) -> tuple[float, int]:
    """Return (rank-seconds of a step in which the generators of a split run generated, number of generators)."""
    shares = [[share for name, share in row.items() if re.fullmatch("ledger/generator_[0-9]+/generate", name)] for row in rows]
    seconds = [sum(of) * row["timing_s/step"] for of, row in zip(shares, rows, strict=True) if of]
    if not seconds:
        raise UserError(f"--from-run {path}: its generators have reported no times. Take a run of more publishes.")
    return float(np.mean(seconds)), max(map(len, shares))
