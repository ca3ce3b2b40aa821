"""Whether a checkpoint is whole, by reading all of it with the libraries that others use."""

import json
from pathlib import Path

from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from rl.checkpoint.resume import GROUPS, UNFINISHED, groups_of


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
