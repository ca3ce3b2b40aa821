"""Reads checkpoints: all that a run needs to continue as if it had never stopped, and the model as a Hugging Face directory.

    runs/<name>/step_000020/            config, tokenizer, weights: AutoModelForCausalLM.from_pretrained loads it
    runs/<name>/step_000020/adapter/    with --lora-rank: the adapter by itself, as peft has it
    runs/<name>/step_000020/training/   fp32 weights and optimizer moments, a file a learner; state.json; groups
    runs/<name>/best                    a link to the saved step that validated best

A learner's file holds its parts of the tensors that training changes, by `<set>.<parameter>`: the set `model` or, with
--lora-rank, only `adapter`, since the rest is read from --model again; then the optimizer's `exp_avg`, `exp_avg_sq`. It is a
safetensors file that torch.distributed.checkpoint reads, on any number of learners. Nothing is pickled. rl/checkpoint/saver.py
writes.
"""

import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch.distributed
from safetensors import SafetensorError

from rl.checkpoint.best import STATE, STEPS, TRAINING, checkpoints
from rl.errors import UserError
from rl.learning.learner import Learner
from rl.parts import Part
from rl.ranges import MayChange, Range
from rl.ranks import dist, launch
from rl.record.identity import Identity
from rl.record.run import Origin
from rl.samples.group import Group, split_records

GROUPS, UNFINISHED = "groups.bin", "unfinished.bin"
LAYOUT = 2  # of the files; another one is refused


@dataclass(frozen=True)
class CheckpointArgs(Part):
    """Checkpoints and resuming."""

    _field = "checkpoint"

    save_freq: MayChange[Annotated[int, Range(at_least=0, also=-1)]] = 0
    """Steps between checkpoints. The last step is always saved; 0 or -1 saves nothing else."""
    max_ckpt_to_keep: MayChange[Annotated[int, Range(at_least=0)]] = 3
    """Number of checkpoints to keep, the newest ones; 0 keeps all. The best one by validation is always kept."""
    resume_mode: MayChange[str] = "auto"
    """auto: resume --experiment-name from its newest checkpoint, with the same settings; disable: start over; or the path of a
    checkpoint, also with other settings, which are printed. After a restart by torchrun the job always resumes its own run."""


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


def resume(args, identity: Identity, learner: Learner, total_steps: int) -> Resumed:
    """Bring the learner to the step at which the run stopped, if there is one to resume. args: the script's. Raise UserError if
    it was another run, or if its checkpoint cannot be used. A collective of the learners."""
    origin = None if args.val_only else find(args.checkpoint, args.log.output_dir, args.log.experiment_name)
    if not origin or not origin.checkpoint:
        return Resumed(origin, {}, [], [])
    path = origin.checkpoint
    record = _read_state(path)
    if origin.step > total_steps:
        raise UserError(
            f"{path}: the run has trained {origin.step} steps already, more than the {total_steps} asked for. Give more "
            "(--total-training-steps, --total-epochs), or start a new run with another --experiment-name."
        )
    if learner.ranks.is_main and (lines := identity.check(record["identity"], path)):
        print(f"warning: {path} resumes with other settings:", *lines, sep="\n  ", file=sys.stderr, flush=True)
    state = load(path, learner)
    groups, unfinished = (groups_of((path / TRAINING / name).read_bytes()) for name in (GROUPS, UNFINISHED))
    return Resumed(origin, state, groups, unfinished)


def load(path: Path, learner: Learner) -> dict:
    """Read the checkpoint into the learner. Return the state of the run's other parts. Raise UserError if it cannot be used."""
    record = _read_state(path)
    load_tensors(path, learner.state_tensors())
    ranks = record["ranks"]
    learner.restore(record["learner"], ranks[learner.ranks.rank] if learner.ranks.rank < len(ranks) else None)
    return record["state"]


def _read_state(path: Path) -> dict:
    try:
        record = json.loads((path / TRAINING / STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). Take another checkpoint with --resume-mode PATH.") from None
    if record.get("layout") != LAYOUT:
        raise UserError(
            f"{path} was written by an older version, in files that this one does not read. Start a new run from its weights: "
            f"--model {path}, with another --experiment-name."
        )
    return record


def load_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read weights and moments into this learner's parts of them, in place. Raise UserError if the checkpoint has others."""
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    try:
        saved = {name: list(of.size) for name, of in _reader(path).read_metadata().state_dict_metadata.items()}
        wanted = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if name := next((name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)), None):
            there, here = (of.get(name, "no such tensor") for of in (saved, wanted))
            raise UserError(
                f"{path} does not fit: {name} is {there} there and {here} here. Give the flags of its run (--model, --optim, "
                "LoRA's, the critic's, --freeze-vision-tower)."
            )
        read_tensors(path, tensors)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path / TRAINING} cannot be read ({error}). Take another checkpoint with --resume-mode PATH."
        ) from None


def read_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read tensors of a checkpoint's training/, whole ones or this rank's parts, in place, whatever their precision."""
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings(action="ignore"):  # that it does not ask other ranks
        dcp.load(tensors, storage_reader=_reader(path), no_dist=True)


def _reader(path: Path):
    from torch.distributed import checkpoint as dcp  # late: it takes a while to import

    return dcp.HuggingFaceStorageReader(str(path / TRAINING))


def find(args: CheckpointArgs, output_dir: str, experiment_name: str | None) -> Origin | None:
    """Return the run and the checkpoint to resume from, the same on every rank; None to start over. Raise UserError if the
    checkpoint that was asked for is none. A collective."""
    found = _find(args, Path(output_dir), experiment_name) if torch.distributed.get_rank() == 0 else None
    run_dir, path = dist.from_main(found and [str(found.run_dir), found.checkpoint and str(found.checkpoint)]) or (None, None)
    return Origin(Path(run_dir), path and Path(path)) if run_dir else None


def _find(args: CheckpointArgs, output_dir: Path, experiment_name: str | None) -> Origin | None:
    runs = []
    if launch.restarts():  # this job's own run, wherever it began
        parents = {output_dir, (output_dir / (experiment_name or "run")).parent}  # names may be nested
        if args.resume_mode not in ("auto", "disable"):
            parents.add(Path(args.resume_mode).resolve().parent.parent)
        configs = [config for parent in parents for config in parent.glob("*/config*.json")]
        configs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        runs = [path.parent for path in configs if (_read_config(path) or {}).get("job") == launch.job()][:1]
    if not runs and args.resume_mode == "disable":
        return None
    if not runs and args.resume_mode != "auto":
        return check_path(Path(args.resume_mode))
    if not runs and experiment_name:
        runs = [output_dir / experiment_name]
    for run_dir in runs:
        if any(next(run_dir.glob(trace), None) for trace in ("config*.json", "metrics.jsonl", STEPS)):
            if _read_config(run_dir / "config.json") is None:
                print(f"warning: {run_dir}/config.json is missing or damaged; the run continues", file=sys.stderr, flush=True)
            newest = max(checkpoints(run_dir), default=None)
            if not newest and next(run_dir.glob(STEPS), None):
                raise UserError(f"{run_dir}: no checkpoint has its {TRAINING}/{STATE}. Start a new run, under another name.")
            return Origin(run_dir, newest)
    return None


def check_path(path: Path) -> Origin:
    """Return the checkpoint that was asked for. Raise UserError if it is none."""
    path = path.resolve()
    if not (path / TRAINING / STATE).is_file():
        raise UserError(f"--resume-mode {path}: no checkpoint is there. Take another, or --resume-mode auto.")
    if not path.match(STEPS):
        raise UserError(
            f"--resume-mode {path}: a checkpoint's name is step_ and six digits, such as step_000020. Rename it so; move away "
            "what has that name already."
        )
    return Origin(path.parent, path)


def _read_config(path: Path) -> dict | None:
    """Return None if it is missing or damaged."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def groups_of(data: bytes) -> list[Group]:
    """Return the groups in the bytes of GROUPS or UNFINISHED."""
    return [Group.from_bytes(record) for record in split_records(data)]
