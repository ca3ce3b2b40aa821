"""Least squares with coefficients that cannot be negative: seconds are made of seconds."""

import numpy as np


def nonnegative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 of least squares, columns [n, k] @ x [k] = target [n]: the most negative coefficient is set to 0 until none is
    left. Of columns that say the same the first ones share the load evenly."""
    scale = np.abs(columns).max(axis=0)
    used = [i for i in range(columns.shape[1]) if scale[i] > 0]
    x = np.zeros(columns.shape[1])
    while used:
        found = np.linalg.lstsq(columns[:, used] / scale[used], target, rcond=None)[0]
        if found.min() >= 0:
            x[used] = found / scale[used]
            break
        del used[int(found.argmin())]
    return x
