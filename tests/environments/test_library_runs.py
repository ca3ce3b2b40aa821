"""Runs with the adapters of examples/environments over their real packages, which are installed here: three steps in sync, and
the same bits in async after kill -9. The model is a random one of one token a byte, whose turns end with common letters."""

import json
import socket
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from families import tokenizer_of
from helpers import SMALL, bits, eventually, free_port, run_killed, run_script
from test_adapters import OPENENV, PACKAGES, SERVER, WITH

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
}

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


def install(*words: str | Path) -> None:
    try:
        subprocess.run(["uv", *words], check=True, capture_output=True, text=True, timeout=300)
    except (subprocess.SubprocessError, FileNotFoundError) as error:
        pytest.skip(f"the packages cannot be installed: {getattr(error, 'stderr', error)!s:.300}")


def rows(path: Path, of_row) -> Path:
    path.write_text("".join(json.dumps({"data_source": "sums"} | of_row(n)) + "\n" for n in range(30)))
    return path


def sync_then_killed_async(flags: list, out: Path, env: dict, beside) -> tuple[dict, dict]:
    """The bits of a sync run, and of an async one that was killed and resumed. beside: what is at work next to each run."""
    flags = [*RUN, *flags, "--output-dir", out, "--experiment-name"]
    with beside():
        run_script("train_sync.py", *flags, "sync", env=env, timeout=600)
    with beside():
        flags = ["--staleness-threshold", 0, *flags, "async"]
        run_killed("train_async.py", *flags, run=out / "async", steps=STEPS, env=env, timeout=600, ranks=2)
    assert bits(out / "sync", STEPS) != bits(out / "sync", STEPS - 1)
    lines = [json.loads(line) for line in (out / "sync" / "metrics.jsonl").read_text().splitlines()]
    of_steps = [line for line in lines if line["step"]]
    assert all(not line["reward/unscored"] and line["training/rollout_probs_diff_max"] < 1e-4 for line in of_steps)
    return bits(out / "sync", STEPS), bits(out / "async", STEPS)


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
        more = [] if name == "openenv" else ["--no-deps"]
        where = targets[""] / str(len(targets))
        install("pip", "install", "--quiet", "--python", sys.executable, *more, "--target", where, *packages.split())
        targets[packages] = where
    env = {"PYTHONPATH": str(targets[packages])}
    (tmp_path / "server.py").write_text(OPENENV if name == "openenv" else SERVER)
    port = free_port()
    words = {"URL": f"http://127.0.0.1:{port}", "SERVER": str(tmp_path / "server.py")}
    for word, value in words.items():
        flags = [flag.replace(word, value) for flag in flags]
    asked = {} if name in ("reasoning-gym", "textarena", "gem", "openenv") else {"prompt": [{"role": "user", "content": "Go."}]}
    file = rows(tmp_path / "rows.jsonl", lambda n: asked | {"ground_truth": str(n), "extra_info": {"max_turns": 3}})

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

    flags = ["--model", model, *flags, *TURNS, "--train-files", file, "--val-files", file]
    sync, killed = sync_then_killed_async(flags, tmp_path / "runs", env, beside)
    assert sync == killed


def test_a_script_of_trl_trains_the_same_bits_in_each_mode(targets, tmp_path):
    """Its class, whose tool a model that has learned to call it calls, and its reward functions."""
    where = targets[""] / "trl"
    install("pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--target", where, "trl==1.16.0")
    (tmp_path / "script.py").write_text(TRL)
    flags = ["--model", "demo-calculator", "--max-response-length", 24, "--env", f"{tmp_path / 'script.py'}:Calculator"]
    flags += ["--reward", f"{tmp_path / 'script.py'}:right,asks"]
    sync, killed = sync_then_killed_async(flags, tmp_path / "runs", {"PYTHONPATH": str(where)}, nullcontext)
    assert sync == killed
    of_run = [json.loads(line) for line in (tmp_path / "runs" / "sync" / "metrics.jsonl").read_text().splitlines()]
    found = [(line["reward/extra/tool_calls/mean"], line["critic/score/max"]) for line in of_run if line["step"]]
    assert all(calls > 0 and most in (0.25, 1.0, 1.25) for calls, most in found)
