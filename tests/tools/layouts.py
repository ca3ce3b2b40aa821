"""Learning on several layouts of ranks, and the checks that all layouts learn the same."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import relative, run_script

RNG = np.random.default_rng(1)
GROUPS = [[int(n) for n in RNG.integers(1, 21, 3)] for _ in range(4)]
CASES = {  # flags, and the sizes of the responses of each group
    "grpo, four updates": ({"ppo_mini_batch_size": 2, "ppo_epochs": 2}, GROUPS),
    "gspo, two updates": (
        {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "ppo_mini_batch_size": 2},
        GROUPS,
    ),
    "turns, kl loss, entropy": ({"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.1}, GROUPS),
    "one response: some ranks have no work": ({"entropy_coeff": 0.1}, [[20]]),
}
ALONE = {"max_tokens_per_micro_batch": 4096}  # a batch is one micro-batch


def learn_on(
    ranks: int,
    layouts: dict,
    cases: dict = CASES,
    timeout: float = 240,
    attention: str = "cpu",
    rows: str | None = None,
    equal: Sequence[int] = (),
    every_other: bool = False,
) -> dict:
    """What programs/layouts.py saves: gradients, metrics, weights and the part of the tokens that passed forward alone, by
    "layout/case". layouts: name -> [model, flags]; attention: the kind of device whose kernels the CPU gets; rows: a file of
    prompts; equal: the groups whose scores are equal; every_other: a layout takes every other case, and the next layout the
    cases between."""
    with tempfile.TemporaryDirectory() as directory:
        out, what = Path(directory) / "found.pt", {"layouts": layouts, "cases": cases, "attention": attention, "rows": rows}
        what |= {"equal": list(equal), "every_other": every_other}
        run_script("tests/programs/layouts.py", out, json.dumps(what), ranks=ranks, timeout=timeout)
        return torch.load(out)


def assert_taught_the_same(found: dict, alone: dict) -> None:
    """found: by "layout/case", alone: by "model/case" of one rank. A gradient differs by the rounding of fp32, of which a
    processor with wide vectors makes most in a hybrid model (3e-6 seen); one token too many or too few makes more than 1e-3.
    Later updates are of weights that AdamW has moved: by rounding where a gradient is 0."""
    for name, of_case in found.items():
        (expected,) = [of for case, of in alone.items() if case.partition("/")[2] == name.partition("/")[2]]
        first, *later = map(relative, of_case["gradients"], expected["gradients"])
        assert first < 1e-5 and max(later, default=0) < 2e-5, (name, first, later)
        assert relative(of_case["weights"], expected["weights"]) < 1e-5, name
        assert without_routers(of_case) == pytest.approx(without_routers(expected), rel=2e-5, abs=2e-6, nan_ok=True), name
        norm = expected["metrics"]["actor/grad_norm"]
        assert norm > 1e-3 and of_case["metrics"]["actor/grad_norm"] == pytest.approx(norm, rel=4e-6), name


def without_routers(of_case: dict) -> dict:
    """Return the metrics except moe/*, which count a prompt in every micro-batch with it and so depend on how the batch is
    divided."""
    return {name: value for name, value in of_case["metrics"].items() if not name.startswith("moe/")}
