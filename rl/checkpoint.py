"""Checkpoints: everything a run needs to go on as if it had never stopped, beside the model as a Hugging Face directory.

    runs/<name>/step_000020/            config, tokenizer, weights: AutoModelForCausalLM.from_pretrained loads it
    runs/<name>/step_000020/training/   master weights and optimizer moments, a file a learner; state.json; groups
    runs/<name>/step_000020/manifest.json   every file's size and checksum
    runs/<name>/best/                   the same Hugging Face files, of the saved step that validated best (links)

All learners must see the same file system. The tensors are safetensors files that torch.distributed.checkpoint reads, on any
number of learners: nothing on disk is pickled. The manifest is checked before anything is loaded. Left out: writing them, which
is rl/saver.py.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
import xxhash

from rl import dist, launch
from rl.batch import Group, split_records
from rl.errors import UserError
from rl.identity import Identity
from rl.learner import Learner
from rl.ranges import Range
from rl.run import Origin

MANIFEST, TRAINING, STATE = "manifest.json", "training", "state.json"
GROUPS, UNFINISHED = "groups.bin", "unfinished.bin"
STEPS = "step_" + "[0-9]" * 6


@dataclass
class CheckpointArgs:
    """Checkpoints and resuming."""

    save_freq: Annotated[int, Range(at_least=0, also=-1)] = 0
    """Steps from one checkpoint to the next; there is always one after the last step. 0 or -1 saves that one only."""
    max_ckpt_to_keep: Annotated[int, Range(at_least=0)] = 3
    """Number of checkpoints to keep, the newest ones; 0 keeps all. The best one by validation stays in any case."""
    resume_mode: str = "auto"
    """auto goes on where the run --experiment-name stopped; disable starts anew; or the path of a checkpoint. After a restart
    by torchrun the job goes on with its own run in any case."""
    resume_anyway: bool = False
    """Go on with a run although the model, the data or a flag that belongs to the run is another now; lists what is."""


@dataclass
class Resumed:
    """The point a run begins at: after `step`, with what the checkpoint holds; step 0 and nothing else for a new one."""

    origin: Origin | None
    state: dict
    groups: list[Group]  # that had come in and were not trained
    unfinished: list[Group]  # that were being generated

    @property
    def step(self) -> int:
        return self.origin.step if self.origin else 0


def resume(args: CheckpointArgs, identity: Identity, learner: Learner, total_steps: int) -> Resumed:
    """Brings the learner to where the run stopped, if there is a run to go on with. Raises UserError if it is another one, or
    if its checkpoints cannot be used. A collective of the learners.

    args: the script's flags.
    """
    origin = find(args, args.output_dir, args.experiment_name)
    if not origin or not origin.checkpoint:
        return Resumed(origin, {}, [], [])
    path = origin.checkpoint
    record = json.loads((path / TRAINING / STATE).read_text())
    if origin.step > total_steps:
        raise UserError(
            f"{path}: the run has trained {origin.step} steps already, more than the {total_steps} asked for. Give more "
            "(--total-training-steps, --total-epochs), or start anew with another --experiment-name."
        )
    if "identity" not in record:
        raise UserError(f"{path} was written by an older version, which did not record the run's flags. Start anew.")
    if learner.ranks.is_main and (lines := identity.check(record["identity"], path)):
        print(f"warning: {path} goes on under --resume-anyway as another run:", *lines, sep="\n  ", file=sys.stderr, flush=True)
    state = load(path, learner)
    groups, unfinished = (read_groups(path / TRAINING / name) for name in (GROUPS, UNFINISHED))
    return Resumed(origin, state, groups, unfinished)


def load(path: Path, learner: Learner) -> dict:
    """Reads the checkpoint into the learner; returns the state of the run's other parts, by name. A collective."""
    record = json.loads((path / TRAINING / STATE).read_text())
    _load_tensors(path, learner)
    ranks = record["ranks"]
    learner.restore(record["learner"], ranks[learner.ranks.rank] if learner.ranks.rank < len(ranks) else None)
    return record["state"]


def _load_tensors(path: Path, learner: Learner) -> None:
    """Reads the master weights and moments into the learner's. A collective."""
    tensors = learner.state_tensors()
    reader = dcp.HuggingFaceStorageReader(str(path / TRAINING))
    saved = {name: list(of.size) for name, of in reader.read_metadata().state_dict_metadata.items()}
    wanted = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in [*saved, *wanted]:
        if saved.get(name) != wanted.get(name):  # dcp.load would not look at what it is not asked for
            shapes = [of.get(name, "no such tensor") for of in (saved, wanted)]
            raise UserError(
                f"{path} does not fit the model: {name} is {shapes[0]} there and {shapes[1]} in --model. Give the --model that "
                "the run was trained from."
            )
    try:
        dcp.load(tensors, storage_reader=reader)
    except (dcp.CheckpointException, RuntimeError, ValueError) as error:
        raise UserError(f"{path} cannot be loaded: {_root(error)}. Give the --model that it was trained from.") from error


def find(args: CheckpointArgs, output_dir: str, experiment_name: str | None) -> Origin | None:
    """The run and the checkpoint to go on from, the same on every rank; None to start anew. Raises UserError if the checkpoint
    that was asked for cannot be used. A collective."""
    found = _find(args, Path(output_dir), experiment_name) if torch.distributed.get_rank() == 0 else None
    text = dist.from_main(json.dumps([str(found.run_dir), str(found.checkpoint or "")]) if found else "")
    if not text:
        return None
    run_dir, checkpoint = json.loads(text)
    return Origin(Path(run_dir), Path(checkpoint) if checkpoint else None)


def _find(args: CheckpointArgs, output_dir: Path, experiment_name: str | None) -> Origin | None:
    runs = []
    if launch.restarts():  # this job's own run, wherever it began
        configs = sorted(output_dir.glob("*/config*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        runs = [path.parent for path in configs if (_read_config(path) or {}).get("job") == launch.job()][:1]
    if not runs and args.resume_mode == "disable":
        return None
    if not runs and args.resume_mode != "auto":
        path = check_path(Path(args.resume_mode))
        return Origin(path.parent, path)
    if not runs and experiment_name:
        runs = [output_dir / experiment_name]
    for run_dir in runs:
        if any(next(run_dir.glob(trace), None) for trace in ("config*.json", "metrics.jsonl", STEPS)):
            if _read_config(run_dir / "config.json") is None:
                print(f"warning: {run_dir}/config.json is missing or damaged; the run goes on", file=sys.stderr, flush=True)
            return Origin(run_dir, newest(run_dir))
    return None


def _read_config(path: Path) -> dict | None:
    """None if it is missing or damaged."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def newest(run_dir: Path) -> Path | None:
    """The run's newest checkpoint whose files are all as they were written; None if nothing was saved. Says what is lost by
    damage. Raises UserError if there are checkpoints and all are damaged."""
    errors = {}
    for path in sorted(run_dir.glob(STEPS), reverse=True):
        if (error := damage(path)) is None:
            if errors:
                step = int(path.name.removeprefix("step_"))
                print(f"warning: the steps after {step} are trained again", file=sys.stderr, flush=True)
            return path
        errors[path.name] = error
        print(f"warning: checkpoint {path} is damaged: {error}", file=sys.stderr, flush=True)
    if errors:
        raise UserError(
            f"{run_dir}: every checkpoint of the run is damaged ({', '.join(errors)}; the warnings say how). Put the files "
            "back, or start anew, at step 0, with another --experiment-name."
        )
    return None


def damage(path: Path) -> str | None:
    """A line on the first file that is not as it was written; None if all are."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["digest"] != _digest_of(json.dumps(files, sort_keys=True).encode()):
            return f"{MANIFEST} does not fit its own checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error}"
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or not {size:,} bytes long"
        if _digest_of_file(file) != digest:
            return f"{name} does not fit its checksum"
    return None


def write_manifest(work: Path, known: dict[str, tuple[int, str]]) -> None:
    """Lists all files of a checkpoint, which are on disk then. known: (size, checksum) of those that are already."""
    files = {name: list(of) for name, of in known.items()}
    for file in sorted(path for path in work.rglob("*") if path.is_file()):
        name = str(file.relative_to(work))
        if name not in files:
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
            files[name] = [file.stat().st_size, _digest_of_file(file)]
    record = {"files": files, "digest": _digest_of(json.dumps(files, sort_keys=True).encode())}
    with open(work / MANIFEST, "w") as handle:
        json.dump(record, handle)
        handle.flush()
        os.fsync(handle.fileno())
    for directory in (work / TRAINING, work):
        sync_directory(directory)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_path(path: Path) -> Path:
    """The path of a checkpoint that was asked for. Raises UserError if it is none, or damaged."""
    if not (path / MANIFEST).exists():
        raise UserError(f"--resume-mode {path}: no checkpoint is there ({MANIFEST} is missing). Give a step_... directory.")
    if error := damage(path):
        raise UserError(f"--resume-mode {path}: the checkpoint is damaged: {error}. Take another, or --resume-mode auto.")
    return path.resolve()


def _root(error: BaseException) -> str:
    """One line on an error; of torch.distributed.checkpoint's, which gather every rank's with its traceback, the first."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


def read_groups(file: Path) -> list[Group]:
    """The groups in GROUPS or UNFINISHED."""
    return [Group.from_bytes(record) for record in split_records(file.read_bytes())]


def _digest_of_file(file: Path) -> str:
    state = xxhash.xxh3_128()
    with open(file, "rb") as handle:
        while chunk := handle.read(1 << 22):
            state.update(chunk)
    return state.hexdigest()


def _digest_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
