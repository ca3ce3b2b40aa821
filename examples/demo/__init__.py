"""The demos: their models' names, and where those are kept. sums.py, pictures.py and calculator.py make models and data."""

import os
from pathlib import Path

# Versions of the recipes: a changed recipe makes a different model, in a different directory.
VERSIONS = {"demo": 3, "demo-vl": 2, "demo-moe": 3, "demo-calculator": 2, "demo-hybrid": 1}


def directory(name: str) -> Path:
    """Return where a demo model is kept, whether it is made or not: in $RL_CACHE, else in ~/.cache/rl-scripts."""
    cache = Path(os.environ.get("RL_CACHE") or Path.home() / ".cache" / "rl-scripts")
    return cache / f"{name}-v{VERSIONS[name]}"


def is_made(where: Path) -> bool:
    return os.path.exists(where / "config.json")
