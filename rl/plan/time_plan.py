"""The time part of plan.py: service times from where the flags say, the settings compared, a table, a plot and a verdict."""

import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich import box
from rich.console import Console
from rich.table import Table

from rl.errors import UserError
from rl.model.pretrained import load_config, resolve
from rl.plan import choices, roofline, service_times
from rl.plan.calibrate import calibrate
from rl.plan.devices import Device
from rl.plan.from_run import times_of_run
from rl.plan.service_times import ServiceTimes
from rl.plan.simulation import Ranks
from rl.plan.workload import Drawn, lengths_like
from rl.ranges import Range
from rl.samples.schedule import SplitArgs
from rl.setup import CommonArgs


@dataclass
class TimeArgs:
    """The plan of the time: where the seconds of each part come from. By default from the device's FLOPs and bandwidths, which
    is rough."""

    calibrate: bool = False
    """Measure the parts on this machine, with --nproc-per-node ranks: a minute or two for each of the split and sync modes."""
    calibrate_seconds: Annotated[float, Range(above=0, at_most=3600)] = 20.0
    """Seconds of each measurement."""
    service_times: str | None = None
    """A file of measured parts: --calibrate writes it, and without --calibrate it is read."""
    from_run: str | None = None
    """Directory of a finished run of the same model on the same devices: the parts are fitted to its metrics."""
    prompt_tokens: Annotated[int | None, Range(at_least=1)] = None
    """Tokens of a mean prompt; by default --max-prompt-length, or what a run given to --response-lengths had."""
    flat_groups: Annotated[float, Range(at_least=0, below=1)] = 0.0
    """Share of groups whose scores are all equal, which --filter-groups replaces."""
    plot: str | None = None
    """A PNG file for the comparison."""


def plan_time(
    script: str, args: CommonArgs, plan: TimeArgs, machine: choices.Machine, lengths: str, device: Device | None
) -> None:
    """Prints the settings of a job on the machine side by side, and which to take. script: the module's name; args: its
    flags; lengths: --response-lengths. Raises UserError for what cannot be planned."""
    prompt = plan.prompt_tokens or args.max_prompt_length
    workload = lengths_like(lengths, args.rollout_n + args.needs_greedy, args.max_response_length, prompt)
    workload = dataclasses.replace(workload, flat=plan.flat_groups)
    if plan.prompt_tokens:
        workload = dataclasses.replace(workload, prompt=plan.prompt_tokens)
    job = make_job(script, args, plan, machine, workload, device)
    rows = choices.compare(job)
    table = Table(title="simulated time", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in choices.HEAD:
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    chosen = choices.best(rows)
    for row in rows:
        table.add_row(*choices.cells(row), style="bold" if row is chosen else None)
    console = Console()
    console.print(table)
    steps = args.total_training_steps or 1000
    sources = dict.fromkeys(job.times(row.setting.ranks).source for row in rows)
    console.print(choices.verdict(rows, steps, "; ".join(sources)), highlight=False, soft_wrap=True)
    if plan.plot:
        choices.plot(rows, plan.plot)
        console.print(f"plot: {plan.plot}", highlight=False, soft_wrap=True)


def make_job(
    script: str, args: CommonArgs, plan: TimeArgs, machine: choices.Machine, workload: Drawn, device: Device | None
) -> choices.Job:
    """The job whose settings are compared, with the service times that the flags ask for."""
    if plan.calibrate or plan.service_times:
        measured = (
            measure(script, args, plan, machine, workload) if plan.calibrate else service_times.load(Path(plan.service_times))
        )
        if plan.calibrate and plan.service_times:
            service_times.save(measured, Path(plan.service_times))
        return choices.Job(args, machine, lambda ranks: _pick(measured, ranks), workload, lambda ranks: args.max_num_seqs)
    if plan.from_run:
        measured = times_of_run(Path(plan.from_run))
        return choices.Job(args, machine, lambda ranks: measured, workload, lambda ranks: args.max_num_seqs)
    if device is None:
        raise UserError(
            "give a --device, --calibrate, --service-times or --from-run: the time of each part must come from somewhere."
        )
    config = load_config(resolve(args.model), args.trust_remote_code)
    shape = roofline.Shape.of(config, roofline.count_parameters(config, args.trust_remote_code))
    updates = args.ppo_epochs * -(-args.prompts_per_step // args.prompts_per_update)

    def times(ranks: Ranks) -> ServiceTimes:
        return roofline.service_times(shape, device, args, updates, ranks, machine.nodes)

    def slots(ranks: Ranks) -> int:
        return roofline.slots_that_fit(shape, device, ranks.per_engine, args, workload.prompt + workload.mean)

    return choices.Job(args, machine, times, workload, slots)


def measure(
    script: str, args: CommonArgs, plan: TimeArgs, machine: choices.Machine, workload: Drawn
) -> dict[str, ServiceTimes]:
    """Calibrates both arrangements of this machine's ranks; of a single rank there is no split."""
    if machine.nodes > 1:
        raise UserError("--calibrate measures on one node: give --nnodes 1, or the file of a --service-times measured there.")
    mode, measured = choices.mode_of(script), {}
    colocated, split = (script, "train_async") if mode == "train_sync" else ("train_sync", script)
    for where, name in (("colocated", colocated), ("split", split)):
        if where == "split" and machine.per_node < 2:
            continue
        words = flags_for(name, args)
        measured[where] = calibrate(name, words, workload, machine.per_node, plan.calibrate_seconds)
    return measured


def flags_for(script: str, args: CommonArgs) -> list[str]:
    """The command line of another script for the same work: the flags that all have, as they were given, and its batch."""
    there, mode = (importlib.import_module(name).Args for name in (script, choices.mode_of(script)))
    known = {field.name for field in dataclasses.fields(mode)}
    own = {field.name for field in dataclasses.fields(there)} - known  # of a copy
    values = {name: getattr(args, name) for name in own if hasattr(args, name)}
    values |= {field.name: getattr(args, field.name) for field in dataclasses.fields(CommonArgs)}
    values |= {"train_batch_size": args.prompts_per_step, "ppo_mini_batch_size": args.prompts_per_update}
    if issubclass(there, SplitArgs) and isinstance(args, SplitArgs):
        values |= {field.name: getattr(args, field.name) for field in dataclasses.fields(SplitArgs)}
    words = []
    for field in dataclasses.fields(there):
        value = values.get(field.name, field.default)
        if value == field.default or value is None:
            continue
        words += [f"--{field.name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def _pick(measured: dict[str, ServiceTimes], ranks: Ranks) -> ServiceTimes:
    where = "colocated" if ranks.colocated else "split"
    return measured.get(where) or next(iter(measured.values()))
