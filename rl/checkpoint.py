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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
import xxhash

from rl import dist
from rl.batch import Group, split_records
from rl.errors import UserError
from rl.learner import Learner
from rl.ranges import Range
from rl.run import Origin

MANIFEST, TRAINING, STATE = "manifest.json", "training", "state.json"
GROUPS, UNFINISHED = "groups.bin", "unfinished.bin"
STEPS = "step_" + "[0-9]" * 6
# A run cannot go on under other values: the order of the prompts and the counting of versions hang on these.
FIXED = ("seed", "shuffle", "ppo_mini_batch_size", "require_batches", "trigger_parameter_sync_step")


@dataclass
class CheckpointArgs:
    save_freq: Annotated[int, Range(at_least=0)] = 0
    """Save a checkpoint every so many steps; there is always one after the last."""
    max_ckpt_to_keep: Annotated[int, Range(at_least=0)] = 3
    """Checkpoints to keep of a run, the newest ones; 0 keeps all. The best by validation stays besides."""
    resume_mode: str = "auto"
    """auto goes on where the run --experiment-name stopped; disable starts anew; or the path of a checkpoint. After a restart
    by torchrun the job goes on with its own run in any case."""


def find(args: CheckpointArgs, output_dir: str, experiment_name: str | None) -> Origin | None:
    """Where the run goes on from, the same on every rank; None to start anew. Raises UserError if the checkpoint that was asked
    for cannot be used. A collective."""
    found = _find(args, Path(output_dir), experiment_name) if torch.distributed.get_rank() == 0 else None
    text = dist.from_main(json.dumps([str(found.run_dir), str(found.checkpoint or "")]) if found else "")
    if not text:
        return None
    run_dir, checkpoint = json.loads(text)
    return Origin(Path(run_dir), Path(checkpoint) if checkpoint else None)


def _find(args: CheckpointArgs, output_dir: Path, experiment_name: str | None) -> Origin | None:
    runs = []
    if dist.launch().restarts:  # this job's own run, wherever it began
        configs = sorted(output_dir.glob("*/config*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        runs = [path.parent for path in configs if json.loads(path.read_text()).get("job") == dist.job()][:1]
    if not runs and args.resume_mode == "disable":
        return None
    if not runs and args.resume_mode != "auto":
        path = check_path(Path(args.resume_mode))
        return Origin(path.parent, path)
    if not runs and experiment_name:
        runs = [output_dir / experiment_name]
    for run_dir in runs:
        if (run_dir / "config.json").exists():
            return Origin(run_dir, newest(run_dir))
    return None


def load(origin: Origin, learner: Learner, args: CheckpointArgs, script: str) -> tuple[dict, list[Group], list[Group]]:
    """Brings the learner to where the checkpoint was written; returns (state, groups, unfinished groups) as they were saved.
    Raises UserError if it is of another script, or of other flags than a run can go on with. A collective."""
    path = origin.checkpoint
    record = json.loads((path / TRAINING / STATE).read_text())
    now = fixed_flags(args, script)
    for name, value in record["fixed"].items():
        if name in now and now[name] != value:
            what = "by the script" if name == "script" else f"with --{name.replace('_', '-')}"
            raise UserError(
                f"{path} was written {what} {value}, now it is {now[name]}. Go on with what it was, or start anew with "
                "--resume-mode disable."
            )
    tensors = learner.state_tensors()
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path / TRAINING)))
    except (dcp.CheckpointException, RuntimeError, ValueError) as error:
        reason = _root(error)
        raise UserError(f"{path} does not fit the model: {reason}. Give the --model that it was trained from.") from error
    ranks = record["ranks"]
    learner.restore(record["learner"], ranks[learner.ranks.rank] if learner.ranks.rank < len(ranks) else None)
    return record["state"], read_groups(path / TRAINING / GROUPS), read_groups(path / TRAINING / UNFINISHED)


def newest(run_dir: Path) -> Path | None:
    """The run's newest checkpoint whose files are all as they were written; says which ones are not."""
    for path in sorted(run_dir.glob(STEPS), reverse=True):
        fault = damage(path)
        if fault is None:
            return path
        print(f"warning: checkpoint {path} is damaged ({fault}); the one before it is taken", file=sys.stderr, flush=True)
    return None


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint's files; None if they are as they were written."""
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
    if fault := damage(path):
        raise UserError(f"--resume-mode {path}: the checkpoint is damaged: {fault}. Take another, or --resume-mode auto.")
    return path.resolve()


def fixed_flags(args: CheckpointArgs, script: str) -> dict:
    flags = asdict(args)
    names = FIXED if "trigger_parameter_sync_step" in flags else ("seed", "shuffle")
    return {"script": script} | {name: flags[name] for name in names}


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
