"""Service times out of measured steps: least squares whose coefficients are not negative, for seconds are made of seconds."""

import numpy as np

from rl.plan.service_times import EngineTimes, LearnerTimes

HELD_UP = 3.0  # a step that takes this many times what the others say was held up by something else, and is left out


def fit_engine(rows: list[tuple], padded: bool) -> EngineTimes:
    """rows: of each engine step, how many responses ran, the tokens of context, prefills (0 or 1) and their tokens, responses
    that started, that ended, and the seconds. padded: as EngineTimes has it."""
    running, context, calls, tokens, started, ended, seconds = np.array(rows, dtype=float).T
    most = int(running.max())
    knots = sorted({2**k for k in range(most.bit_length())} | {most})
    hats = np.stack([np.interp(running, knots, one) for one in np.eye(len(knots))], axis=1)  # [steps, knots]
    found = _robust(np.column_stack([hats, context, calls, tokens, started, ended]), seconds)
    seen = [i for i, hat in enumerate(hats.T) if hat.sum() >= 1]  # knots that steps were near to
    per_context, call, token, row, finish = map(float, found[len(knots) :])
    return EngineTimes(
        running=tuple(knots[i] for i in seen),
        seconds=tuple(float(found[i]) for i in seen),
        context_token=per_context,
        padded=padded,
        prefill=call,
        prefill_token=token,
        prefill_row=row,
        finish=finish,
    )


def fit_learner(rows: list[tuple], ranks: int) -> LearnerTimes:
    """rows: of each step its updates, distinct tokens, squared lengths and seconds; ranks: of the learners."""
    updates, tokens, squares, seconds = np.array(rows, dtype=float).T
    columns = np.column_stack([np.ones(len(updates)), updates, tokens / ranks, squares / ranks])
    if len(set(updates)) == 1:
        columns[:, 1] = 0  # no telling an update from a step
    step, update, token, square = map(float, _robust(columns, seconds))
    return LearnerTimes(step=step, update=update, token=token, square=square)


def _robust(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The fit without steps that were held up."""
    usual = seconds < HELD_UP * np.maximum(columns @ nonnegative(columns, seconds), 1e-9)
    return nonnegative(columns[usual], seconds[usual])


def nonnegative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 of least squares, columns [n, k] @ x [k] = target [n]: the most negative coefficient is set to 0 until none is
    left. Columns that say the same share the load."""
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
