"""A map of the number of tokens that each expert of each layer got, at the first and the last step that a run recorded."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tools.report.logs import Log, RunGroup
from tools.report.readers import read_lines


def loads(log: Log) -> list[tuple[int, np.ndarray]]:
    """Return (step, [layers, experts] tokens over an even share) of every step recorded in experts.jsonl."""
    file = (log.path if log.path.is_dir() else log.path.parent) / "experts.jsonl"
    rows = read_lines(file)[0] if file.exists() else []
    return [(row["step"], load) for row in rows if (load := _as_load(row.get("load"))) is not None]


def _as_load(value: Any) -> np.ndarray | None:
    """Return a load [layers, experts]; None if the value is none."""
    try:
        load = np.array(value, dtype=float)
    except (ValueError, TypeError, OverflowError):
        return None
    return load if load.ndim == 2 and load.size else None


def expert_map(group: RunGroup, target: Path) -> bool:
    """Draw the map of the group's first run that has one. Return whether there was any."""
    recorded = next(filter(None, map(loads, group.logs)), [])
    if not recorded:
        return False
    shown = [recorded[0], recorded[-1]] if len(recorded) > 1 else recorded
    layers = len(shown[0][1])
    figure = Figure(figsize=(5 * len(shown) + 1, 1.6 + 0.1 * max(layers, 12)), dpi=75, layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (step, load) in zip(panels, shown, strict=True):
        image = axes.imshow(load, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
        axes.set(title=f"step {step}", xlabel="expert", ylabel="layer")
    figure.colorbar(image, ax=panels, label="tokens over an even share", extend="max")
    figure.savefig(target)
    return True
