"""What is in a checkpoint, read with the libraries that others use; and what a run has logged of its steps."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from rl.checkpoint.files import GROUPS, UNFINISHED
from rl.checkpoint.resume import groups_of

MEASURED = ("timing_s/", "perf/", "ledger/", "time", "publish/", "ring/", "fully_async/trainer/idle")
MEASURED += ("fully_async/rollouter/idle", "fully_async/rollouter/held")


def rows(run: Path) -> list[dict]:
    """Return the logged rows without anything measured by a clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def damage(path: Path) -> str | None:
    """Return what cannot be read of the checkpoint; None if it is whole."""
    try:
        json.loads((path / "training" / "state.json").read_text())
        AutoConfig.from_pretrained(path)
        AutoTokenizer.from_pretrained(path)
        for file in [*path.rglob("*.safetensors")] or ["no weights"]:
            load_file(file)
        for name in (GROUPS, UNFINISHED):
            groups_of((path / "training" / name).read_bytes())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def bits_of(directory: Path) -> dict[str, bytes]:
    """Return the tensors of the directory's safetensors by file and name. Equal tensors may have headers in another order."""
    found = {}
    for file in directory.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            found[f"{file.name}/{name}"] = tensor.flatten().view(torch.uint8).numpy().tobytes()
    return found
