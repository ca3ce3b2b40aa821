"""Publishes of changed weights: exact for any change, and small if little has changed."""

import re

import pytest
import torch
from helpers import bits, run_script, train
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.weights import delta
from rl.weights.delta import Change

INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}

SHARES = [0, 1e-5, 1e-3, 0.02, 0.2, 0.5, 1]  # of elements that change


def random_bits(size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bits, including zeros of both signs, infinities and NaNs."""
    kind = INTEGERS[dtype]
    limits = torch.iinfo(kind)
    values = torch.randint(limits.min, limits.max + 1, (size,), dtype=torch.long, generator=generator).to(kind)
    values[torch.rand(size, generator=generator) < 0.1] = 0
    values[torch.rand(size, generator=generator) < 0.1] = limits.min  # -0.0
    return values.view(dtype)


@settings(max_examples=60)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    runs=st.lists(
        st.tuples(st.integers(1, 100_000), st.sampled_from([0, 1e-5, 1e-3, 0.02, 0.2, 0.5, 1])), min_size=1, max_size=6
    ),
    seed=st.integers(0, 2**31),
)
def test_what_arrives_is_what_was_sent_to_the_bit(dtype, runs, seed):
    generator = torch.Generator().manual_seed(seed)
    old = [random_bits(size, dtype, generator) for size, _ in runs]
    new = [random_bits(size, dtype, generator) for size, _ in runs]
    for before, after, (size, share) in zip(old, new, runs, strict=True):
        same = torch.rand(size, generator=generator) >= share
        after[same] = before[same]
    changes = [Change.between(*pair) for pair in zip(old, new, strict=True)]
    rows = [change.row for change in changes]
    met = []
    for numbers, size in delta.messages(rows, dtype.itemsize):
        met += numbers
        if not size:
            old[numbers[0]].copy_(new[numbers[0]])
            continue
        message = delta.join([changes[number] for number in numbers])
        assert message.nbytes == size <= sum(half_of(new[number]) for number in numbers)
        for number, change in zip(numbers, delta.split(message.clone(), [rows[n] for n in numbers], dtype), strict=True):
            change.apply(old[number])
    assert met == sorted(set(met))
    for before, after, row in zip(old, new, rows, strict=True):
        assert torch.equal(before.view(INTEGERS[dtype]), after.view(INTEGERS[dtype]))
        assert row.width or row.differing > 0


def half_of(run: torch.Tensor) -> int:
    return run.nbytes // 2 + 2 * delta.ALIGN


@pytest.mark.parametrize(
    ("share", "bytes_an_element"),
    [(0.0, 0.0), (0.001, 0.0041), (0.01, 0.034), (0.1, 0.31), (0.16, 0.49), (0.4, 2.0)],
)
def test_a_change_takes_what_its_elements_take(share, bytes_an_element):
    """Among a million bf16 weights a change takes two bytes for the value and one or two for the gap."""
    generator, size = torch.Generator().manual_seed(0), 1_000_000
    old = torch.randn(size, generator=generator).bfloat16()
    new = torch.where(torch.rand(size, generator=generator) < share, old + 1 + old.abs(), old)
    row = Change.between(old, new).row
    assert row.differing == int((old != new).sum())
    sent = sum(row.sizes(2)) if row.width else 2 * size
    assert sent <= bytes_an_element * size and sent >= 0.9 * bytes_an_element * size


def test_changes_travel_together_up_to_a_message(monkeypatch):
    monkeypatch.setattr(delta, "MESSAGE_BYTES", 100)
    row = lambda width, count: delta.Row(width, count, count)  # noqa: E731
    rows = [row(1, 10), row(1, 0), row(2, 10), row(1, 20), row(0, 0), row(0, 0), row(1, 1), row(1, 0)]
    assert list(delta.messages(rows, 2)) == [([0, 2], 72), ([3], 60), ([4], 0), ([5], 0), ([6], 8)]


def received(done) -> list[tuple[int, float]]:
    """(bytes, share of elements that had changed) of each publish of tests/programs/publish_ranks.py."""
    found = re.findall(r"received \d (\d+) (\S+)", done.stdout)
    return [(int(size), float(share)) for size, share in found]


@pytest.mark.parametrize(("kind", "dtype", "learners"), [("qwen3", "bfloat16", 1), ("qwen2-tied", "float32", 2)])
def test_generators_compute_with_what_the_learners_hold(models, kind, dtype, learners):
    """Also in fp32, where the test changes a hundredth of the weights instead of an optimizer."""
    done = run_script("tests/programs/publish_ranks.py", models[kind], dtype, "delta", ranks=learners + 1)
    differences = re.findall(r"version (\d) differs by (\S+)", done.stdout)
    assert [int(version) for version, _ in differences] == [0, 1, 2, 3]
    assert dtype == "bfloat16" or max(float(d) for _, d in differences) < 1e-4
    (whole, first), (little, few), (all_of_it, every), (again, as_few) = received(done)
    assert first == 1 and every > 0.9 and all_of_it == whole
    assert few == pytest.approx(0.01, abs=0.003) and as_few == pytest.approx(0.01, abs=0.003)
    assert max(little, again) < 0.05 * whole


def test_a_parameter_that_was_not_updated_stops_the_job(models):
    name = "model.layers.1.mlp.up_proj.weight"
    done = run_script("tests/programs/publish_ranks.py", models["qwen3"], "bfloat16", "delta", name, ranks=2, check=False)
    assert done.returncode == 1 and f"version 1: the generator's {name} is not what the learner sent" in done.stderr


@pytest.mark.slow
def test_a_run_is_the_same_to_the_bit(demo_model, tmp_path):
    flags = ("--total-training-steps", 3, "--test-freq", 0, "--no-val-before-train", "--staleness-threshold", 0)
    flags += ("--rollout-dtype", "bfloat16", "--lr", 1e-6, "--max-response-length", 4)
    runs = [train("train_async.py", *flags, "--publish", how, out=tmp_path / how, ranks=2) for how in ("full", "delta")]
    (_, full, _), (metrics, run, _) = runs
    assert bits(run) == bits(full)
    sent, changed = ([m[f"publish/{name}"] for m in metrics.values() if f"publish/{name}" in m] for name in ("gb", "changed"))
    assert changed[0] == 1 and 0 < changed[-1] < 0.2 and sent[-1] < 0.5 * sent[0]
