"""Trains again on the recorded samples of a run (--record-samples all, or the newest steps), without generators.

    python replay.py runs/demo                                # the same flags: the same weights, bit for bit
    python replay.py runs/demo --loss-mode gspo --lr 3e-5     # other flags on the same samples
    python replay.py runs/demo --from-step 120                # from the checkpoint before that step
    python replay.py runs/demo --from-step 120 --to-step 120 --tokens     # what it computed of each token, for view.py
    python replay.py runs/demo --from-step 120 --to-step 120 --without 5217       # and the validation without a ticket
    torchrun --standalone --nproc-per-node 2 replay.py ...    # a run of two learners

The first argument is the directory of the run. `learn` is taken from the script as it was then, or from
--script FILE. All other flags are the script's and default to the values of the recorded run. With other values the samples
are off-policy: they were sampled by other weights than those that now train on them. Left out: validation, except at the end
with --without.
"""

import argparse
import filecmp
import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

# Nothing here may import losses: `load_script` says which.
from rl import flags, parts
from rl.checkpoint import resume
from rl.checkpoint.files import checkpoints, step_of
from rl.data.args import DataArgs
from rl.environments.args import EnvironmentArgs
from rl.errors import UserError
from rl.generation.engine import EngineArgs, SamplingArgs
from rl.ranges import flag, may_change
from rl.ranks import dist, process
from rl.record import validations
from rl.record.provenance import code_digest, digest_of, package_files
from rl.rewards.pool import RewardArgs
from rl.samples.split_schedule import AsyncSchedule
from tools.recorded import Record

# Flags of the parts that a replay leaves out
NOT_REPLAYED = {"test_freq", "val_before_train", "log_val_generations", "record_samples", "resume_mode"}
NOT_REPLAYED |= {"generators", "val_only", "record_env"}
LENGTH = {"total_training_steps", "total_epochs", "total_rollout_steps"}  # the learning rate's schedule depends on these
PLACES = {"train_files", "val_files", "generators", "trust_remote_code", "from_tape"}  # may differ on another machine
# Flags that made the samples, or that decide what is recorded of them; those of PARTS are added
SAMPLED = {"seed", "train_batch_size", "filter_groups", "max_num_gen_batches", "over_sample"}
PARTS = (DataArgs, EngineArgs, SamplingArgs, EnvironmentArgs, RewardArgs, AsyncSchedule)
SAMPLED |= {name for part in PARTS for name in parts.leaves(part)}
SAMPLED -= PLACES


@dataclass(frozen=True)
class Replay:
    """What is to be replayed."""

    record: Record
    run_dir: Path  # of the recorded run
    checkpoint: Path | None  # of the run, from which the replay starts; None: the model that training started from
    first: int  # step
    last: int
    script: ModuleType
    args: object  # of the script
    changed: dict[str, tuple]  # flags that differ from the recorded run: (was, is)
    is_whole: bool  # False if --to-step ends it
    tokens_from: int | None  # step from which on to write what is computed of each token
    without: list[int] | None  # tickets to leave out; with any list, even an empty one, the last step is validated

    @property
    def start(self) -> dict:
        """Return what was recorded at the start of the run that trained the first step."""
        return self.record.start_of(self.first)

    @property
    def off_policy(self) -> set[str]:
        """Return the flags that make the weights differ from those that sampled."""
        return {name for name in self.changed if name not in may_change(type(self.args)) - LENGTH - {"model"}}


def read(words: Sequence[str]) -> Replay:
    """Parse the command line and find what it names. Raise UserError if it cannot be replayed."""
    if not words or words[0].startswith("-"):
        if not {"-h", "--help", "--help-all"} & {*words}:
            raise UserError("the first argument is the directory of a run: python replay.py runs/demo.")
        print(__doc__.strip())
        sys.exit()
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--from-step", type=int)
    parser.add_argument("--to-step", type=int)
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--script", type=Path)
    parser.add_argument("--without", type=int, nargs="*")
    own, rest = parser.parse_known_args(words[1:])
    run_dir = Path(words[0])
    record = Record(run_dir)
    path, first = begin(record, run_dir, own.from_step)
    start = record.start_of(first)
    try:
        script = load_script(own.script or record.directory / start["file"])
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"the recorded script cannot be imported ({error}): the code has changed. Check out the version that "
            "recorded, or give today's script with --script."
        ) from error
    parts.check_class(script.Args)
    leaves = parts.leaves(script.Args)
    recorded = start["flags"]
    was = {name: recorded.get(name, leaf.default) for name, leaf in leaves.items()}
    was = {name: tuple(value) if isinstance(value, list) else value for name, value in was.items()}
    args = flags.read(script.Args, __doc__, rest, was)
    left_out = sorted(flags.names_in(script.Args, rest) & NOT_REPLAYED)
    flags.warn(f"{flag(name)} does nothing in a replay" for name in left_out)
    changed = {name: (was[name], value) for name, value in parts.flat(args).items() if value != was[name]}
    if made := [name for name in changed if name in SAMPLED]:
        raise UserError(f"{', '.join(map(flag, made))}: a replay cannot change how the samples were made. Leave the flag out.")
    last = first
    while last + 1 in record.steps and same_settings(record.start_of(last + 1), start, may_change(type(args))):
        last += 1
    is_whole = own.to_step is None
    if not is_whole:
        if not first <= own.to_step <= last:
            raise UserError(f"--to-step {own.to_step}: the replay goes from step {first} to {last} at most.")
        last = own.to_step
    tokens_from = (own.from_step or first) if own.tokens else None
    if own.without:
        check_tickets(own.without, record, range(first, last + 1))
    return Replay(record, run_dir, path, first, last, script, args, changed, is_whole, tokens_from, own.without)


def check_tickets(wanted: list[int], record: Record, steps: range) -> None:
    """Raise UserError for a ticket that none of the steps has trained."""
    if gone := {*wanted} - {group.ticket for step in steps for group in record.groups(step)}:
        missing = ", ".join(map(str, sorted(gone)))
        raise UserError(f"--without {missing}: the tickets of steps {steps[0]} to {steps[-1]} do not have it.")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}.")


def begin(record: Record, run_dir: Path, wanted: int | None) -> tuple[Path | None, int]:
    """Return the newest checkpoint before the step `wanted`, and the first step after that checkpoint. Without `wanted`, take
    the earliest step that can be replayed."""
    steps = set(record.steps)
    saved = {0: None} | {step_of(path): path for path in checkpoints(run_dir)}
    if wanted is None:
        wanted = min((step + 1 for step in saved if step + 1 in steps), default=min(steps, default=1))
    if wanted not in steps:
        held = f"holds steps {min(steps)} to {max(steps)}" if steps else "holds no step"
        raise UserError(f"step {wanted} is not in {record.directory}, which {held}.")
    first = wanted
    while first - 1 in steps:
        first -= 1
    newest = max((step for step in saved if first - 1 <= step < wanted), default=None)
    if newest is None:
        raise UserError(
            f"{record.directory} has the steps from {first} on, and {run_dir} has no checkpoint of step {first - 1} or "
            "later to begin from. Record with --record-samples all, or save more often (--save-freq)."
        )
    return saved[newest], newest + 1


def same_settings(start: dict, other: dict, changing: set[str]) -> bool:
    """Return whether two starts of a run had the same flags, apart from those that may change."""
    kept = changing - {"max_tokens_per_micro_batch"}
    of = [
        {name: value for name, value in of["flags"].items() if name not in kept} | {"": of["total_steps"]}
        for of in (start, other)
    ]
    return of[0] == of[1]


def load_script(file: Path) -> ModuleType:
    """Import the file as a module. Files next to it, losses.py above all, take precedence over installed ones."""
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not (spec and file.is_file()):
        raise UserError(f"--script {file}: there is no such Python file.")
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def begin_again(replay: Replay, ranks: dist.Ranks) -> tuple:
    """Return the script's args, the learner as the first step found it, and a run that trains from there, with a generator if
    it validates. Raise UserError if it cannot. Collective."""
    from rl.generation.make import make_generator
    from rl.rewards.pool import ScoringPool
    from rl.setup import make_learner, set_up
    from rl.training_run import TrainingRun

    start, script = replay.start, replay.script
    torch.set_num_threads(start["hardware"]["threads_per_rank"])  # sums are split by threads
    name = replay.args.log.experiment_name
    name = name if "experiment_name" in replay.changed else f"replay-{replay.run_dir.name}"
    off = {"record_samples": "off", "resume_mode": "disable", "val_only": False, "record_env": None}
    args = parts.replace(replay.args, experiment_name=name, **off)
    validates = replay.without is not None
    job = set_up(args if validates else parts.replace(args, test_freq=0), script.__file__)
    if validates and not job.val_prompts:
        raise UserError("--without compares validations, and the run has none (--test-freq 0).")
    resume.check_number(start, len(job.prompts), replay.record.directory)
    total_steps = job.total_steps if LENGTH & {*replay.changed} else start["total_steps"]
    learner = make_learner(args, replace(job, total_steps=total_steps), ranks)
    if replay.checkpoint:
        resume.load(replay.checkpoint, learner)
    job = replace(job, script=f"replay of {start['script']}", total_steps=replay.last, notes=notes(replay))
    generator = make_generator(args, job, ranks, ScoringPool(args.reward)) if validates else None
    return args, learner, TrainingRun(args, job, learner, ranks.world_size, generator=generator, after=replay.first - 1)


def main(replay: Replay, ranks: dist.Ranks) -> None:
    """Train on each recorded step, as the script's `train` does."""
    from rl.algorithm.staleness import staleness_metrics
    from tools.view.learner import Watch

    script = replay.script
    left_out = {*(replay.without or [])}
    args, learner, run = begin_again(replay, ranks)
    for line in describe(replay, run.record.dir, ranks):
        run.record.say(line)
    watch = None
    if replay.tokens_from:
        watch = Watch(script.actor_loss, replay.record.directory, ranks, replay.tokens_from)
        script.actor_loss = watch.actor_loss
    for step in run.steps():
        run.stop_if_asked(step - 1)
        groups = [group for group in replay.record.groups(step) if group.ticket not in left_out]
        batch = run.begin(groups)
        metrics = script.learn(args, learner, batch, run.timer)
        if watch:
            watch.end_step(step, groups, batch)
        metrics |= staleness_metrics(batch, args.schedule.version_at(step))
        metrics |= run.report(step, batch, metrics)
        run.log(step, batch, metrics)
        run.save_if_due(step)
    if run.generator:
        for line in validation(replay, learner, run.generator):
            run.record.say(line)
    run.finish()
    if ranks.is_main and not (replay.off_policy or left_out):
        print(compare(run.saver.run_dir, replay.run_dir, replay.last))


def validation(replay: Replay, learner, generator) -> Iterator[str]:
    """Validate, and yield lines that compare it with the run's validation after that step, if there is one. Collective."""
    from rl.algorithm.metrics import validation_metrics
    from rl.setup import LocalWeights

    dtype = replay.args.engine.weights_dtype(replay.args.learner.dtype)
    LocalWeights(learner, generator.engine, dtype).publish(version=replay.last)
    metrics = validation_metrics(generator.validate())
    generator.close()
    was = {name: x for row in validations.read(replay.run_dir) if row["step"] == replay.last for name, x in row.items()}
    yield f"validation after step {replay.last} without {', '.join(map(str, replay.without)) or 'nothing'}, and of the run:"
    for name, value in metrics.items():
        yield f"{value:.4f}  {was.get(name, math.nan):.4f}  {name}"


def notes(replay: Replay) -> dict:
    """Return what the replay's config.json holds in addition to the flags."""
    off_policy = sorted(replay.off_policy)
    changed = {name: list(of) for name, of in replay.changed.items()}
    of = {"of": str(replay.run_dir), "first_step": replay.first, "changed": changed, "off_policy": off_policy}
    return {"replay": of, "code": code_digest(Path(replay.script.__file__))}


def describe(replay: Replay, run_dir: Path, ranks: dist.Ranks) -> list[str]:
    """Return lines for the user: what is replayed into which directory, and why its bits may differ."""
    record, start = replay.record, replay.start
    source = replay.checkpoint or "the model that training began with"
    lines = [f"replays steps {replay.first} to {replay.last} of {replay.run_dir}, from {source}, into {run_dir}"]
    if replay.is_whole and (later := [step for step in record.steps if step > replay.last]):
        why = "with other flags" if replay.last + 1 in later else f"and step {replay.last + 1} is not recorded"
        lines.append(f"the run continued {why}: the rest is replayed by --from-step {later[0]}")
    words = ", ".join(f"{flag(name)} {replay.changed[name][1]} (was {replay.changed[name][0]})" for name in replay.off_policy)
    if words:
        lines.append(f"off-policy: the weights that sampled differ from those that train: {words}")
    learners = {record.start_of(step)["hardware"]["world_size"] for step in range(replay.first, replay.last + 1)}
    if learners != {ranks.world_size}:
        of_record = " and ".join(map(str, sorted(learners)))
        lines.append(
            f"warning: {ranks.world_size} learners, {of_record} in the recorded run: sums are in another order, bits may differ"
        )
    if start["rl"] != digest_of(package_files()):
        lines.append("warning: the code has changed: bits may differ")
    return lines


def compare(ours: Path, theirs: Path, step: int) -> str:
    """Return a line that says whether both runs' checkpoints of the step hold the same weights."""
    name = f"step_{step:06d}"
    weights = [{file.name: file for file in sorted((run / name).glob("*.safetensors"))} for run in (ours, theirs)]
    if not weights[1]:
        return f"{theirs} has no checkpoint of step {step} to compare with"
    same = weights[0].keys() == weights[1].keys()
    same = same and all(filecmp.cmp(file, weights[1][name], shallow=False) for name, file in weights[0].items())
    return f"the weights are {'bit for bit' if same else 'NOT'} those of {theirs / name}"


if __name__ == "__main__":
    try:
        replay = read(sys.argv[1:])
    except UserError as error:
        process.fail(error)
    process.run(partial(main, replay), join=partial(dist.init, replay.args.hang_timeout))
