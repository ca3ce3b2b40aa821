"""Which demo models there are, and where they are kept. Imports nothing heavy; rl/data/demo.py and its variants make the
models."""

import os
from pathlib import Path

# Versions of the recipes: a changed recipe makes a different model, in a different directory.
VERSIONS = {"demo": 3, "demo-vl": 2, "demo-moe": 3, "demo-calculator": 1, "demo-hybrid": 1}


def cache_dir() -> Path:
    """Return the directory of the demo models: $RL_CACHE, else ~/.cache/rl-scripts."""
    return Path(os.environ.get("RL_CACHE") or Path.home() / ".cache" / "rl-scripts")


def directory(name: str, version: int) -> Path:
    """Return where a version of a demo model is kept, whether it is made or not."""
    return cache_dir() / f"{name}-v{version}"


def is_made(where: Path) -> bool:
    return (where / "config.json").exists()
