"""A checkpoint's manifest: the size and the checksum of every file, written last and checked before anything is read."""

import json
import os
import shutil
from pathlib import Path

import xxhash

from rl.checkpoint.shard_files import Files, digest_of_file, wrong, wrong_anywhere
from rl.errors import UserError
from rl.ranks import dist, launch

MANIFEST, TRAINING, STATE = "manifest.json", "training", "state.json"
GROUPS, UNFINISHED = "groups.bin", "unfinished.bin"
STEPS = "step_" + "[0-9]" * 6


def damage(path: Path) -> str | None:
    """A line about the first file that is not as it was written; None if all are. For a checkpoint on this machine."""
    files = read_manifest(path)
    if isinstance(files, str):
        return files
    return next((error for name, of in files.items() if (error := wrong(path, name, of))), None)


def damage_anywhere(path: Path) -> str | None:
    """As `damage`, for files on the disks of any nodes: each is read once. A collective."""
    files = dist.from_main(read_manifest(path))
    return files if isinstance(files, str) else wrong_anywhere(path, files)


def read_manifest(path: Path) -> Files | str:
    """The files of a checkpoint; a line about the manifest if it is not as it was written."""
    if not (path / MANIFEST).exists():
        return f"{MANIFEST} is missing" + (": it is on the disk of the node that came first" if len(launch.nodes()) > 1 else "")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["digest"] != _digest_of(files):
            return f"{MANIFEST} does not fit its own checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error}"
    return files


def write_manifest(work: Path, known: Files) -> None:
    """Brings all files of a checkpoint to disk and lists them. known: the files that are on disk already."""
    files = {name: list(of) for name, of in known.items()}
    for file in sorted(path for path in work.rglob("*") if path.is_file()):
        name = str(file.relative_to(work))
        if name not in files:
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
            files[name] = [file.stat().st_size, digest_of_file(file)]
    record = {"files": files, "digest": _digest_of(files)}
    with open(work / MANIFEST, "w") as handle:
        json.dump(record, handle)
        handle.flush()
        os.fsync(handle.fileno())


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_empty(work: Path) -> None:
    """Makes an empty directory for a checkpoint that is being written."""
    shutil.rmtree(work, ignore_errors=True)
    (work / TRAINING).mkdir(parents=True)


def rename(work: Path, target: Path) -> None:
    """Gives a checkpoint that is on disk its name."""
    for directory in (*(path for path in work.iterdir() if path.is_dir()), work):
        sync_directory(directory)
    if target.exists():  # of a run that resumed from an older checkpoint
        remove(target)
    os.rename(work, target)
    sync_directory(target.parent)


def remove(path: Path) -> None:
    """Renames the checkpoint first, so that a kill in between leaves nothing that looks like a checkpoint."""
    doomed = path.with_name(f"{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def check_path(path: Path) -> Path:
    """The path of a checkpoint that was asked for. Raises UserError if it is none, or damaged. A collective."""
    if error := damage_anywhere(path):
        raise UserError(f"--resume-mode {path}: no whole checkpoint is there: {error}. Take another, or --resume-mode auto.")
    if not path.match(STEPS):
        raise UserError(
            f"--resume-mode {path}: a checkpoint's name is step_ and six digits, such as step_000020. Rename it so; move away "
            "what has that name already."
        )
    return path.resolve()


def _digest_of(files: Files) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())
