"""The Qwen3.5 recipes run with exactly their own flags on tiny random models of the kind and problems of Geometry3K."""

import pytest
from datasets import Dataset
from helpers import ROOT, train, weights
from safetensors.torch import load_file
from test_examples import words
from test_recipe_images import GEO3K, REWARD
from tiny_vlm import save_vlm

DENSE, MIXTURE = "qwen3.5", "qwen3.5-moe"
RECIPES = {"grpo_qwen3.5_2b_geo3k": DENSE, "grpo_qwen3.5_35b_a3b_geo3k": MIXTURE}  # 27b has the numbers of 35b_a3b
# What a small machine wants otherwise: two ranks, few and short responses, an engine for each rank, an end.
SMALLER = [
    "--train-batch-size",
    "4",
    "--ppo-mini-batch-size",
    "2",
    "--max-response-length",
    "12",
    "--total-training-steps",
    "3",
]
SMALLER += ["--rollout-tp", "1", "--engine", "embedded"]
pytestmark = [pytest.mark.runs, pytest.mark.timeout(600), pytest.mark.slow]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(name, tmp_path, monkeypatch):
    if not (GEO3K / "train.parquet").exists():
        pytest.skip(f"no problems of Geometry3K at {GEO3K}: set RL_GEO3K to their directory")
    save_vlm(RECIPES[name], tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = Dataset.from_parquet(str(GEO3K / "train.parquet"), cache_dir=str(tmp_path / "cache"))
    rows.to_parquet(tmp_path / "data" / "train.parquet")
    rows.select(range(2)).to_parquet(tmp_path / "data" / "test.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.setenv("MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    given = words(ROOT / "examples" / f"{name}.sh", "gpu", tmp_path)
    given = given[given.index("train_sync.py") + 1 :]
    more = [*SMALLER, "--reward", f"{tmp_path}/reward.py:score"]
    metrics, run, _ = train("train_sync.py", *given, *more, out=tmp_path / "runs", ranks=2)
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in (1, 2, 3))
    assert ("moe/load/max" in metrics[1]) == (RECIPES[name] == MIXTURE)
    before, after = load_file(tmp_path / "model" / "model.safetensors"), weights(run)
    assert before.keys() == after.keys(), "the hub's names, the vision tower's among them"
