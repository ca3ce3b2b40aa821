"""Runs with the adapters of examples/environments over their real packages, which are installed here: three steps in sync, and
the same bits in async after kill -9. The model is a random one of one token a byte, whose turns end with common letters."""

import json
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from families import tokenizer_of
from helpers import SMALL, bits, eventually, free_port, run_killed, run_script
from test_adapters import OPENENV, PACKAGES, SERVER, WITH, install

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]
STEPS = 3
RUN = ["--train-batch-size", 2, "--rollout-n", 2, "--total-training-steps", STEPS, "--test-freq", 0, "--lr", 1e-3]
RUN += ["--save-freq", 1, "--max-ckpt-to-keep", 0, "--lr-warmup-steps", 0, "--entropy-coeff", 0.01]
TURNS = ["--max-prompt-length", 1500, "--max-response-length", 1500, "--max-turns", 3, "--stop", *"aeioutnsr"]
ENVIRONMENTS = {  # name -> the packages, and its flags
    "reasoning-gym": (f"{PACKAGES} {WITH}", ["--env", "reasoning-gym:chain_sum"]),
    "textarena": (f"{PACKAGES} {WITH}", ["--env", "textarena:GuessTheNumber-v0"]),
    "gem": (f"{PACKAGES} {WITH}", ["--env", "gem:game:GuessTheNumber-v0-easy"]),
    "skyrl-gym": (f"{PACKAGES} {WITH}", ["--env", "skyrl-gym:gsm8k_multi_turn"]),
    "openenv": ("openenv==0.10.0", ["--env", "openenv:URL"]),
    "mcp": ("", ["--tools", f"mcp:{sys.executable} SERVER", "--reward", "tests/programs/spread_reward.py:score"]),
    "trl": ("trl==1.16.0", ["--env", "TRL:Calculator", "--reward", "TRL:right,asks"]),
}
OF_CALCULATOR = ["--model", "demo-calculator", "--max-response-length", 24]  # which has learned to call the tool

TRL = '''
"""A script of TRL, with its own loop, which is not called here."""

from trl import GRPOConfig, GRPOTrainer


class Calculator:
    def reset(self, ground_truth=None, **row) -> None:
        self.truth, self.calls = ground_truth, 0

    def calculate(self, expression: str) -> str:
        """Computes a product.

        Args:
            expression: Two numbers with * between them.
        """
        self.calls += 1
        a, b = expression.split("*")
        return str(int(a) * int(b))


def right(completions, ground_truth, **kwargs):
    return [float(said[-1]["content"] == truth) for said, truth in zip(completions, ground_truth)]


def asks(environments, **kwargs):
    return [0.25 * (env.calls == 1) for env in environments]


def main():
    config = GRPOConfig(output_dir="out")
    GRPOTrainer("model", args=config, environment_factory=Calculator, reward_funcs=[right, asks]).train()


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path, tokenizer = tmp_path_factory.mktemp("model"), tokenizer_of("qwen2_5")
    torch.manual_seed(0)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, "eos_token_id": end}
    Qwen2ForCausalLM(Qwen2Config(**SMALL | sizes)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Path]:
    """The packages that were installed -> where they are."""
    return {"": tmp_path_factory.mktemp("packages")}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_of_a_library_trains_the_same_bits_in_each_mode(name, model, targets, tmp_path):
    packages, flags = ENVIRONMENTS[name]
    if packages not in targets:
        targets[packages] = targets[""] / str(len(targets))
        install(targets[packages], *packages.split(), more="" if name == "openenv" else "--no-deps")
    env = {"PYTHONPATH": str(targets[packages])}
    (tmp_path / "server.py").write_text({"openenv": OPENENV, "trl": TRL}.get(name, SERVER))
    port = free_port()
    words = {"URL": f"http://127.0.0.1:{port}"} | dict.fromkeys(("SERVER", "TRL"), str(tmp_path / "server.py"))
    for word, value in words.items():
        flags = [flag.replace(word, value) for flag in flags]
    asked = {} if name in ("reasoning-gym", "textarena", "gem", "openenv") else {"prompt": [{"role": "user", "content": "Go."}]}
    rows = [asked | {"data_source": "sums", "ground_truth": str(n), "extra_info": {"max_turns": 3}} for n in range(30)]
    (file := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    @contextmanager
    def beside():
        if name != "openenv":
            yield
            return
        with subprocess.Popen([sys.executable, tmp_path / "server.py", str(port)], env=env | {"PATH": "/usr/bin"}) as server:
            assert eventually(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), 120)
            try:
                yield
            finally:
                server.kill()

    of_rows = ["--model", model, *TURNS, "--train-files", file, "--val-files", file]
    flags = [*flags, *(OF_CALCULATOR if name == "trl" else of_rows), "--output-dir", tmp_path, "--experiment-name"]
    with beside():
        run_script("train_sync.py", *RUN, *flags, "sync", env=env, timeout=600)
    with beside():
        split = [*RUN, *flags, "async", "--staleness-threshold", 0]
        run_killed("train_async.py", *split, run=tmp_path / "async", steps=STEPS, env=env, timeout=600, ranks=2)
    assert bits(tmp_path / "sync", STEPS) == bits(tmp_path / "async", STEPS) != bits(tmp_path / "sync", STEPS - 1)
    lines = [json.loads(line) for line in (tmp_path / "sync" / "metrics.jsonl").read_text().splitlines()]
    for line in [line for line in lines if line["step"]]:
        assert not line["reward/unscored"] and line["training/rollout_probs_diff_max"] < 1e-4
        assert name != "trl" or (line["reward/extra/tool_calls/mean"] and line["critic/score/max"] in (0.25, 1.0, 1.25))
