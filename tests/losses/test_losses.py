"""losses.py, part one: layout, aggregation and advantages, checked by hand, against slow loops, and by invariances. And
examples/losses.ipynb runs from top to bottom and shows every loss and estimator; the stored copy is executed and small."""

import doctest
import itertools
import json
import math
import os
import shutil
import subprocess
import sys

import losses_reference as slow
import pytest
import torch
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import losses

F64 = torch.float64
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=7)
SEEDS = st.integers(0, 9999)
NAMES = [name for name, estimator in losses.ADVANTAGES.items() if name == estimator.function.__name__]  # without aliases
GROUPWISE = ("grpo", "grpo_batch_std", "dr_grpo", "rloo", "opo", "grpo_passk", "gpg")  # one number a response
SCORES = st.one_of(st.sampled_from([0.1, 0.3, -0.7, 0.9, 1.1, 1e6, 1e-30, 3.0]), st.floats(-1e9, 1e9, allow_subnormal=False))
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def by_score(name, scores, groups, lengths=None, **extra):
    """One value per response: the last token gets the score, as in the scripts."""
    lengths = lengths or [2] * len(scores)
    seq = torch.arange(len(scores)).repeat_interleave(torch.tensor(lengths))
    reward = torch.zeros(sum(lengths), dtype=F64)
    ends = torch.tensor(lengths).cumsum(0) - 1
    reward[ends] = torch.tensor(scores, dtype=F64)
    mask = torch.ones(len(seq), dtype=torch.bool)
    out = losses.ADVANTAGES[name](reward, mask, seq, torch.tensor(groups), **extra)
    assert all(torch.equal(out[seq == i], out[ends[i]].expand(n)) for i, n in enumerate(lengths))
    return out[ends].tolist()


@pytest.mark.slow
def test_it_works_alone_in_an_empty_directory(tmp_path):
    """Without the rest of the project, without a process group, and with no import except torch."""
    shutil.copy(ROOT / "losses.py", tmp_path)
    code = (
        "import sys, torch; before = set(sys.modules); import losses; new = set(sys.modules) - before - {'losses'};"
        "assert not new - set(sys.stdlib_module_names), new;"
        "seq = torch.tensor([0, 1]); mask = seq >= 0;"
        "print(losses.rloo(torch.tensor([1.0, 0.0]), mask, seq, torch.tensor([5, 5])).tolist(), losses.__file__);"
        "assert not torch.distributed.is_initialized()"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.split() == ["[1.0,", "-1.0]", str(tmp_path / "losses.py")]


# ----------------------------------------------------------------------------------------------------------- layout


@given(LENGTHS, SEEDS, st.integers(0, 3))
def test_padding_comes_and_goes_and_changes_nothing(lengths, seed, more):
    """Padded [B, T] -> packed -> padded, with any padding: `pack` looks at the places of the padding, never at its values."""
    b = slow.random_batch(lengths, seed)
    wide = losses.unpack(b["lp"], b["seq"], len(lengths), max(lengths) + more, fill=math.nan)
    valid = ~torch.isnan(wide)
    assert valid.sum(1).tolist() == lengths and wide.shape == (len(lengths), max(lengths) + more)
    seq, back = losses.pack(valid, wide)
    assert torch.equal(seq, b["seq"]) and torch.equal(back, b["lp"])
    left = torch.flip(wide, [1])  # padding on the left
    assert sorted(losses.pack(torch.flip(valid, [1]), left)[1].tolist()) == sorted(b["lp"].tolist())


def test_whiten_by_hand():
    x, mask = torch.tensor([1.0, 3.0, 99.0, 5.0], dtype=F64), torch.tensor([True, True, False, True])
    assert losses.whiten(x, mask).tolist() == pytest.approx([-1, 0, 0, 1], abs=1e-6)  # mean 3, std 2
    assert losses.whiten(torch.tensor([7.0]), torch.tensor([True])).tolist() == [0.0]
    assert not any(losses.whiten(torch.full((999,), x), torch.ones(999).bool()).any() for x in (0.1, 0.9, 1e6, -7.7))


# ------------------------------------------------------------------------------------------------------ aggregation


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
@settings(max_examples=30)
@given(lengths=st.just([]) | LENGTHS, seed=SEEDS, cut=st.integers(1, 7), mask_rate=st.sampled_from([0, 0.75]))
def test_aggregation_equals_slow_loops_however_the_batch_is_cut(mode, lengths, seed, cut, mask_rate):
    b = slow.random_batch(lengths, seed, mask_rate)
    mask, seq, values = b["mask"], b["seq"], b["advantage"]
    denominator = losses.denominator(mask, seq, mode, len(lengths), budget=16)
    expected = slow.aggregate(values.tolist(), mask.tolist(), seq.tolist(), mode, len(lengths), 16)
    assert losses.aggregate(values, mask, seq, mode, denominator).item() == pytest.approx(expected, abs=1e-9)
    parts = [seq % cut == k for k in range(cut)]  # whole responses to micro-batches, some of them empty
    shares = [losses.aggregate(values[p], mask[p], seq[p], mode, denominator) for p in parts]
    assert sum(shares).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_what_is_not_a_number_under_the_mask_stays_out(mode):
    masked, two = torch.tensor([False, False]), torch.tensor([0, 0])
    assert losses.aggregate(torch.tensor([math.nan, 1.0]), masked, two, mode, 1.0) == 0


# ------------------------------------------------------------------------------------------------------- advantages


def test_advantages_by_hand():
    """test_advantages_equal_slow_loops has the others."""
    # group 7: 1, 0, 0, 1 (mean 1/2, std sqrt(1/3)); group 3: 2, 4 (mean 3, std sqrt 2); interleaved
    scores, groups = [1.0, 2.0, 0.0, 0.0, 4.0, 1.0], [7, 3, 7, 7, 3, 7]
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    assert by_score("grpo", scores, groups) == pytest.approx([a, -b, -a, -a, b, a])
    # the best of group 7 is tied; group 3: 4 leads 2 by 2
    assert by_score("grpo_passk", scores, groups, norm_by_std=False) == pytest.approx([0, 0, 0, 0, 2, 0])
    assert by_score("maxrl", [0.0, -1.0, 0.0, 1.0], [5, 6, 5, 6]) == [0, 0, 0, 0]
    # of 6 responses 4 differ from their mean when group 3 is flat: alpha = 6/4
    assert by_score("gpg", [1.0, 3.0, 0.0, 0.0, 3.0, 1.0], groups) == pytest.approx([0.75, 0, -0.75, -0.75, 0, 0.75])


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_maxrl_is_the_gradient_of_the_log_of_the_pass_rate_up_to_pass_at_n_less_1(n, p):
    """Over all outcomes of n responses that are right with p: E[mean_i A_i dlog p(outcome_i)/dp] = sum_k d(pass@k)/dp / k."""
    expected = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        right = int(sum(outcome))
        advantage = by_score("maxrl", list(outcome), [0] * n)
        slope = [1 / p if s else -1 / (1 - p) for s in outcome]
        expected += p**right * (1 - p) ** (n - right) * sum(a * d for a, d in zip(advantage, slope, strict=True)) / n
    assert expected == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, n)), abs=1e-9)  # d(1 - (1 - p)^k)/dp / k


def test_several_rewards_by_hand():
    """The paper's case, rewards of 0 or 1: to grpo of the sums, (0, 1) in one group is worth as much as (1, 1) in another."""
    parts = torch.tensor([[0.0, 0], [0, 1], [0, 0], [1, 1]], dtype=F64)

    def gdpo(parts):
        what = {"parts": parts, "weights": torch.ones(2, dtype=F64)}
        return losses.gdpo(parts.sum(1), torch.ones(4).bool(), torch.arange(4), torch.tensor([0, 0, 1, 1]), **what).tolist()

    # each reward that differs gives +-a, a = 1/2 over the std of 0 and 1: sums of -a, a, -2a, 2a, whose std is a sqrt(10 / 3)
    unit = 1 / math.sqrt(10 / 3)
    assert gdpo(parts) == pytest.approx([-unit, unit, -2 * unit, 2 * unit], abs=1e-5)
    assert gdpo(parts * torch.tensor([1.0, 100.0])) == pytest.approx(gdpo(parts), abs=1e-5), "no scale counts"
    # a group without any difference is exactly 0, next to others
    assert gdpo(torch.tensor([[0.1, 0.7]] * 2 + [[0, 0.3], [1, 0.3]], dtype=F64))[:2] == [0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(lengths=st.just([]) | LENGTHS, seed=SEEDS, mask_rate=st.sampled_from([0, 0.3, 0.75]))
def test_advantages_equal_slow_loops(name, lengths, seed, mask_rate):
    """Also of batches without any response, or without any trained token."""
    b = slow.random_batch(lengths, seed, mask_rate)
    function = losses.ADVANTAGES[name]
    found = function(*(b[key] for key in slow.OF_ALL), **{key: b[key] for key in function.inputs}).tolist()
    assert found == pytest.approx(slow.advantage(name, slow.lists(b)), abs=1e-6)


@settings(max_examples=20)
@given(LENGTHS, SEEDS, st.floats(0.1, 1), st.floats(0, 1))
def test_discounts_equal_slow_loops(lengths, seed, gamma, lam):
    b = slow.random_batch(lengths, seed)
    x = slow.lists(b)
    ahead = losses.return_to_go(b["reward"], b["mask"], b["seq"], gamma).tolist()
    assert ahead == pytest.approx(slow.return_to_go(x["reward"], x["mask"], x["seq"], gamma), abs=1e-9)
    advantage = losses.reinforce_pp(*(b[key] for key in slow.OF_ALL), gamma=gamma).tolist()
    assert advantage == pytest.approx(slow.advantage("reinforce_pp", x, gamma), abs=1e-6)
    returns = losses.lambda_return(b["reward"], b["mask"], b["seq"], b["value"], gamma, lam)
    slow_returns = slow.lambda_return(x["reward"], x["mask"], x["seq"], x["value"], gamma, lam)
    assert returns.tolist() == pytest.approx(slow_returns, abs=1e-9)


def scored(scores, dtype, holes=False):
    """Responses of two tokens with the score on the second. With holes, the second token is not trained."""
    reward = torch.stack([torch.zeros(len(scores)), torch.as_tensor(scores)], 1).flatten().to(dtype)
    mask = torch.tensor([True, not holes]).repeat(len(scores))
    return reward, mask, torch.arange(len(scores)).repeat_interleave(2)


@pytest.mark.parametrize("name", (*GROUPWISE, "maxrl", "reinforce_pp_baseline"))
@settings(max_examples=60)
@given(score=SCORES, n=st.one_of(st.integers(2, 1024), st.sampled_from([3, 5, 7, 8, 16])), dtype=DTYPES, holes=st.booleans())
def test_equal_scores_in_a_group_are_exactly_no_signal(name, score, n, dtype, holes):
    """The advantage must be exactly 0: Adam would scale up even the smallest common noise if nothing else is left."""
    reward, mask, seq = scored([score] * n, dtype, holes)
    assert not losses.ADVANTAGES[name](reward, mask, seq, torch.zeros(n, dtype=torch.long)).any()
    if name == "reinforce_pp_baseline":  # whitened over the batch
        return
    reward, mask, seq = scored([score] * n + [0.0, 1.0], dtype, holes)  # next to a group that has signal
    out = losses.ADVANTAGES[name](reward, mask, seq, torch.tensor([4] * n + [2] * 2))
    assert not out[: 2 * n].any() and out[2 * n + 2] > 0
    if name == "gpg":  # alpha: all responses over those of the second group
        assert out[2 * n + 2].item() == pytest.approx((n + 2) / 2 * 0.5, rel=torch.finfo(dtype).eps)


def test_what_a_group_of_one_gives():
    """As declared: the scripts refuse, or warn about, one response per prompt."""
    reward, mask, seq = scored([0.25, 3.0, 3.0, -1.0], F64)
    for name, function in losses.ADVANTAGES.items():
        if name != "gae":
            extra = {"baseline": torch.zeros(4), "parts": reward[1::2, None], "weights": torch.ones(1), "energy": torch.ones(8)}
            extra = {key: x for key, x in extra.items() if key in function.inputs}
            out = function(reward, mask, seq, torch.arange(4), **extra)[::2]
            gives = {"zero": torch.zeros(4), "score": reward[1::2] / (1 + 1e-6)}.get(function.group_of_one)
            assert out.any() if gives is None else torch.allclose(out, gives.double(), rtol=2e-6, atol=0), name


# ---------------------------------------------------------------------------------------------------------------- help


def test_the_example_at_the_top_runs():
    found = doctest.testmod(losses)
    assert found.attempted >= 8 and found.failed == 0


# --------------------------------------------------------------------------------------------------------- the notebook


NOTEBOOK = ROOT / "examples" / "losses.ipynb"


def code_cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_it_is_stored_executed_and_small():
    assert NOTEBOOK.stat().st_size < 400_000
    assert all(cell["execution_count"] for cell in code_cells())
    assert any("image/png" in output.get("data", {}) for cell in code_cells() for output in cell["outputs"])


def test_it_draws_every_loss_and_has_a_row_for_every_estimator():
    drawing = "".join(next(cell["source"] for cell in code_cells() if "panels = {" in "".join(cell["source"])))
    others = {"luspo"}  # its curve is gspo's
    names = {loss.function.__name__ for loss in losses.POLICY_LOSSES.values()}
    assert {name for name in names if f'("{name}", {{' in drawing} == names - others
    (table,) = (text for cell in code_cells() for o in cell["outputs"] if "dr_grpo" in (text := "".join(o.get("text", ""))))
    estimators = {estimator.function.__name__ for estimator in losses.ADVANTAGES.values()}
    assert {line.split()[0] for line in table.splitlines()} == estimators | {"score", "tokens"}
    prose = "".join(
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "markdown"
    )
    assert all(f"**{name}**" in prose for name in names | estimators - {"gpg"})


@pytest.mark.slow
def test_it_runs():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
