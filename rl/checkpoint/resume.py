"""Reads checkpoints: all that a run needs to continue as if it had never stopped, and the model as a Hugging Face directory.

    runs/<name>/step_000020/            config, tokenizer, weights: AutoModelForCausalLM.from_pretrained loads it
    runs/<name>/step_000020/adapter/    with --lora-rank: the adapter by itself, as peft has it
    runs/<name>/step_000020/training/   master weights and optimizer moments, a file a learner; state.json; groups
    runs/<name>/step_000020/manifest.json   every file's size and checksum
    runs/<name>/best/                   the same Hugging Face files, of the saved step that validated best (links)

A learner's file holds its parts of the tensors that training changes, by `<set>.<parameter>`: the set `model` or, with
--lora-rank, only `adapter`, since the rest is read from --model again; then the optimizer's `exp_avg`, `exp_avg_sq`.

Learners share a file system, or each node keeps its learners' files on its own disk and the first node the rest. Any number of
learners can read them (rl/checkpoint/shard_files.py). Nothing is pickled. The manifest is checked before anything is loaded.
rl/checkpoint/saver.py writes.
"""

import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed

from rl.checkpoint.manifest import (
    GROUPS,
    STATE,
    STEPS,
    TRAINING,
    UNFINISHED,
    check_path,
    damage_anywhere,
    read_manifest,
)
from rl.checkpoint.shard_files import ShardFiles
from rl.errors import UserError
from rl.learning.learner import Learner
from rl.ranges import MayChange, Range, check_name
from rl.ranks import dist, launch
from rl.record.identity import Identity
from rl.record.run import Origin
from rl.samples.group import Group
from rl.transport.records import split_records

# Flags that decide which tensors there are, by the first word of a tensor's name; --optim decides over the moments.
CAUSES = {"critic": "--adv-estimator and --critic-model", "adapter": "--lora-rank and --lora-target", "model": "--model"}


@dataclass
class CheckpointArgs:
    """Checkpoints and resuming."""

    save_freq: MayChange[Annotated[int, Range(at_least=0, also=-1)]] = 0
    """Steps between checkpoints. The last step is always saved; 0 or -1 saves nothing else."""
    max_ckpt_to_keep: MayChange[Annotated[int, Range(at_least=0)]] = 3
    """Number of checkpoints to keep, the newest ones; 0 keeps all. The best one by validation is always kept."""
    resume_mode: MayChange[str] = "auto"
    """auto: resume --experiment-name from its newest checkpoint; disable: start over; or the path of a checkpoint. After a
    restart by torchrun the job always resumes its own run."""
    resume_anyway: MayChange[bool] = False
    """Resume even if the model, the data or a flag that defines the run changed; prints the differences."""
    push_to: MayChange[str | None] = None
    """Push the last checkpoint to this repository of the Hugging Face hub, such as my-org/my-model, with a model card that has
    the run's numbers. A new one is private. Needs `hf auth login` or $HF_TOKEN."""

    def check(self) -> None:
        """Raise UserError for a repository whose name no file could have."""
        if self.push_to is not None:
            check_name("--push-to", self.push_to, nested=True)


@dataclass
class Resumed:
    """The point at which a run begins: after `step`, with the checkpoint's content. A new run has step 0 and no content."""

    origin: Origin | None
    state: dict
    groups: list[Group]  # received and not trained yet
    unfinished: list[Group]  # still being generated

    @property
    def step(self) -> int:
        return self.origin.step if self.origin else 0


def resume(args: CheckpointArgs, identity: Identity, learner: Learner, total_steps: int) -> Resumed:
    """Brings the learner to the step at which the run stopped, if there is one to resume. args: the script's. Raises UserError
    if it was another run, or if its checkpoints cannot be used. A collective of the learners."""
    origin = None if args.val_only else find(args, args.output_dir, args.experiment_name)
    if not origin or not origin.checkpoint:
        return Resumed(origin, {}, [], [])
    path = origin.checkpoint
    record = json.loads(_from_first(path / TRAINING / STATE))
    if origin.step > total_steps:
        raise UserError(
            f"{path}: the run has trained {origin.step} steps already, more than the {total_steps} asked for. Give more "
            "(--total-training-steps, --total-epochs), or start a new run with another --experiment-name."
        )
    if "identity" not in record:
        raise UserError(f"{path} was written by an older version, which did not record the run's flags. Start a new run.")
    if learner.ranks.is_main and (lines := identity.check(record["identity"], path)):
        head = f"warning: {path} resumes with changed settings (--resume-anyway):"
        print(head, *lines, sep="\n  ", file=sys.stderr, flush=True)
    state = load(path, learner)
    groups, unfinished = (groups_of(_from_first(path / TRAINING / name)) for name in (GROUPS, UNFINISHED))
    return Resumed(origin, state, groups, unfinished)


def load(path: Path, learner: Learner) -> dict:
    """Reads the checkpoint into the learner. Returns the state of the run's other parts, by name. Raises UserError if
    it cannot be used. A collective."""
    record = json.loads(_from_first(path / TRAINING / STATE))
    if "updated" not in record["learner"]:
        raise UserError(f"{path} was written by an older version, which did not count updates. Start a new run.")
    _load_tensors(path, learner)
    ranks = record["ranks"]
    learner.restore(record["learner"], ranks[learner.ranks.rank] if learner.ranks.rank < len(ranks) else None)
    return record["state"]


def _load_tensors(path: Path, learner: Learner) -> None:
    """Reads the master weights and moments into the learner's. A collective."""
    tensors = learner.state_tensors()
    names = dist.from_main(read_manifest(path))
    shards = ShardFiles(path, [name for name in names if name.startswith(f"{TRAINING}/shard-")])
    saved = shards.shapes()
    wanted = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if different := [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]:
        first = different[0]
        kinds = {name.partition(".")[0] for name in different}
        flags = next((flags for kind, flags in CAUSES.items() if kind in kinds), "--optim")
        if all("model.visual." in name for name in different):
            flags = "--freeze-vision-tower"
        raise UserError(
            f"{path} does not fit ({first} is {saved.get(first, 'no such tensor')} there and "
            f"{wanted.get(first, 'no such tensor')} here). Give the {flags} of its run, or start from the first step."
        )
    shards.read(tensors)


def _from_first(file: Path) -> bytes:
    """The content of a file that only the first node needs to have. A collective."""
    return dist.bytes_from_main(file.read_bytes() if torch.distributed.get_rank() == 0 else b"")


def find(args: CheckpointArgs, output_dir: str, experiment_name: str | None) -> Origin | None:
    """The run and the checkpoint to resume from, the same on every rank; None to start over. Raises UserError if the checkpoint
    that was asked for cannot be used. A collective."""
    found = _find(args, Path(output_dir), experiment_name) if torch.distributed.get_rank() == 0 else None
    found = dist.from_main(found and (str(found[0]), [*map(str, found[1])], found[2]))
    run_dir, steps, is_asked = (Path(found[0]), [*map(Path, found[1])], found[2]) if found else (None, [], False)
    if is_asked:
        return Origin(run_dir, check_path(steps[0]))
    if not steps and (run_dir or (args.resume_mode == "auto" and experiment_name)):
        _check_elsewhere(run_dir or Path(output_dir) / experiment_name)
    return Origin(run_dir, _first_whole(run_dir, steps)) if run_dir else None


def _find(args: CheckpointArgs, output_dir: Path, experiment_name: str | None) -> tuple[Path, list[Path], bool] | None:
    """The run, its checkpoints from newest to oldest, and whether the user asked for this checkpoint."""
    runs = []
    if launch.restarts():  # this job's own run, wherever it began
        configs = [config for parent in _parents(args, output_dir, experiment_name) for config in parent.glob("*/config*.json")]
        configs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        runs = [path.parent for path in configs if (_read_config(path) or {}).get("job") == launch.job()][:1]
    if not runs and args.resume_mode == "disable":
        return None
    if not runs and args.resume_mode != "auto":
        path = Path(args.resume_mode).resolve()
        return path.parent, [path], True
    if not runs and experiment_name:
        runs = [output_dir / experiment_name]
    for run_dir in runs:
        if any(next(run_dir.glob(trace), None) for trace in ("config*.json", "metrics.jsonl", STEPS)):
            if _read_config(run_dir / "config.json") is None:
                print(f"warning: {run_dir}/config.json is missing or damaged; the run continues", file=sys.stderr, flush=True)
            return run_dir, _steps(run_dir), False
    return None


def _parents(args: CheckpointArgs, output_dir: Path, experiment_name: str | None) -> set[Path]:
    """The directories that may hold this job's own run: names may be nested, and --resume-mode may name another place."""
    named = (output_dir / (experiment_name or "run")).parent
    of_path = set() if args.resume_mode in ("auto", "disable") else {Path(args.resume_mode).resolve().parent.parent}
    return {output_dir, named} | of_path


def _steps(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob(STEPS), reverse=True)


def _check_elsewhere(run_dir: Path) -> None:
    """Raises UserError if other nodes have parts of the run's checkpoints and the first node has none. A collective."""
    reports = dist.all_gather_values([platform.node(), bool(_steps(run_dir))])
    if hosts := sorted({host for host, has in reports if has}):
        raise UserError(
            f"{run_dir}: {', '.join(hosts)} has its part of the run's checkpoints, {reports[0][0]} has none. The node whose "
            "disk has the manifests must come first (--node-rank 0); or give another --experiment-name."
        )


def _read_config(path: Path) -> dict | None:
    """None if it is missing or damaged."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _first_whole(run_dir: Path, paths: list[Path]) -> Path | None:
    """The first of a run's checkpoints whose files are all as they were written; None if nothing was saved. Warns of steps that
    damage has lost. Raises UserError if there are checkpoints and all are damaged. A collective."""
    errors = {}
    for path in paths:
        if (error := damage_anywhere(path)) is None:
            if errors:
                _warn(f"the steps after {int(path.name.removeprefix('step_'))} are trained again")
            return path
        errors[path.name] = error
        _warn(f"checkpoint {path} is damaged: {error}")
    if errors:
        raise UserError(
            f"{run_dir}: every checkpoint of the run is damaged ({', '.join(errors)}; the warnings say how). Put the files "
            "back, or start a new run, at step 0, with another --experiment-name."
        )
    return None


def _warn(text: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def groups_of(data: bytes) -> list[Group]:
    """The groups in the bytes of GROUPS or UNFINISHED."""
    return [Group.from_bytes(record) for record in split_records(data)]
