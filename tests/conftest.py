"""What several test files share: tiny random models, the demo's model, and a way to run a script as a user would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

ROOT = Path(__file__).resolve().parent.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
SMALL = dict(
    vocab_size=32,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    max_position_embeddings=256,
    initializer_range=0.2,  # large enough that log-probs differ from token to token
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)
CONFIGS = {
    "qwen2-tied": lambda: Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2-untied": lambda: Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
}


def save_model(kind: str, path: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]()).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """A directory with a tiny random model per kind of CONFIGS."""
    root = tmp_path_factory.mktemp("models")
    return {kind: save_model(kind, root / kind) for kind in CONFIGS}


def pytest_configure(config) -> None:
    """Makes the demo's model before any worker starts: beside other tests its two threads would take minutes."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        make = "from rl.demo import model_dir; model_dir()"
        subprocess.run([sys.executable, "-c", make], cwd=ROOT, check=True, timeout=900)


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The demo's model."""
    from rl.demo import model_dir

    return model_dir()


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    if not (GSM8K / "train.parquet").exists():
        pytest.skip(f"no GSM8K parquet files at {GSM8K}")
    return GSM8K


def run_script(*arguments: str, ranks: int | None = None, timeout: float = 240, check: bool = True, threads: int = 1, env=None):
    """Runs a script of the repository in a process of its own, under torchrun if `ranks` is given; returns the finished
    process with its output as text."""
    launcher = [sys.executable]
    if ranks is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | (env or {})
    done = subprocess.run([*launcher, *map(str, arguments)], cwd=ROOT, env=env, timeout=timeout, text=True, capture_output=True)
    if check and done.returncode:
        raise AssertionError(
            f"exit code {done.returncode}\n--- stdout\n{done.stdout[-4000:]}\n--- stderr\n{done.stderr[-6000:]}"
        )
    return done
