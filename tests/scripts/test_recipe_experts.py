"""The Qwen3-30B-A3B recipes run with exactly their own flags on a tiny random Qwen3-MoE, with and without R3."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import MOE, ROOT, SMALL, train
from test_examples import words
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from examples.demo.sums import build_tokenizer, problems

DAPO, GSPO = "dapo_qwen3_30b_a3b_async", "gspo_qwen3_30b_a3b"
# What a small machine and a model of 256 positions want otherwise: two ranks, short sequences, an end.
SMALLER = [
    "--max-prompt-length",
    "40",
    "--max-response-length",
    "12",
    "--total-training-steps",
    "4",
    "--engine",
    "embedded",
]
SMALLER += ["--rollout-tp", "1"]
OF_SCRIPT = {
    DAPO: ["--generators", "1", "--train-batch-size", "4", "--ppo-mini-batch-size", "4", "--sequence-parallel", "1"],
    GSPO: ["--train-batch-size", "8", "--expert-parallel", "2", "--overlong-buffer-len", "4"],
}
# A random model is never right: something by which its responses differ.
REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(set(solution_str)) / 10\n"
pytestmark = [pytest.mark.runs, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A directory with model/ and data/."""
    root, tokenizer = tmp_path_factory.mktemp("math"), build_tokenizer()
    torch.manual_seed(0)
    sizes = SMALL | MOE | dict(vocab_size=len(tokenizer), num_attention_heads=8, head_dim=8)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, tie_word_embeddings=False)).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    (root / "data").mkdir()
    rows = [row | {"data_source": "math_dapo"} for row in problems("train")[:64]]
    Dataset.from_list(rows).to_parquet(root / "data" / "dapo-math-17k.parquet")
    Dataset.from_list(rows[:3]).to_parquet(root / "data" / "aime-2024.parquet")
    return root


@pytest.mark.parametrize("replay", ["off", "R3"])
@pytest.mark.parametrize("name", [DAPO, GSPO])
def test_a_recipe_trains(name, replay, home, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL", str(home / "model"))
    monkeypatch.setenv("DATA", str(home / "data"))
    given = words(ROOT / "examples" / f"{name}.sh", "gpu", tmp_path)
    at = next(i for i, word in enumerate(given) if word.startswith("train_"))
    (tmp_path / "reward.py").write_text(REWARD)
    more = [*SMALLER, *OF_SCRIPT[name], "--reward", f"{tmp_path}/reward.py:score", "--router-replay", replay]
    metrics, run, _ = train(given[at], *given[at + 1 :], *more, out=tmp_path / "runs", ranks=2)
    steps = [metrics[step] for step in range(1, 5)]
    assert all(m["actor/grad_norm"] > 0 and m["actor/skipped_steps"] == 0 for m in steps)
    assert all(("moe/replay/tokens_differ" in m) == (replay == "R3") for m in steps)
    assert sum(m["moe/load/max"] for m in steps) > 0
    print(f"{name}, {replay}:", [m["training/rollout_probs_diff_max"] for m in steps])
    AutoModelForCausalLM.from_pretrained(next(run.glob("step_*")))
