"""A coding harness from the index, unchanged: mini-swe-agent works in a directory of its own, and each of its calls continues
the tokens of the last one. It is in a virtual environment of its own:

    python -m venv $RL_ADAPTERS/mini-swe-agent && $RL_ADAPTERS/mini-swe-agent/bin/pip install mini-swe-agent

Where there is none, the test skips.
"""

import json
import sys

import pytest
from families import tokenizer_of
from helpers import of_adapter, train

pytestmark = pytest.mark.runs
CALL = '\n{{"name": "bash", "arguments": {{"command": "{}"}}}}\n'
CALLS = [CALL.format("echo hi > made"), CALL.format("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
AGENT = """
import json, os, subprocess, sys, tempfile

row, mini = json.load(sys.stdin), sys.argv[1]
quiet = {"MSWEA_CONFIGURED": "1", "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
quiet |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
with tempfile.TemporaryDirectory() as here:
    words = [mini, "-m", f"openai/{os.environ['OPENAI_MODEL']}", "-y", "--exit-immediately", "-t", row["task"], "-o", "said"]
    words += ["-c", "mini.yaml", "-c", "agent.step_limit=4"]
    quiet["MSWEA_GLOBAL_CONFIG_DIR"] = here
    done = subprocess.run(words, cwd=here, env=os.environ | quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    print(json.dumps({"reward": float(os.path.exists(os.path.join(here, "made")))}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny model that has learned to call the harness's tool: it makes a file, or submits. Its tokenizer has these calls."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = str(tmp_path_factory.mktemp("model"))
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.add_tokens(CALLS)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(vocab_size=len(tokenizer), max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id, **sizes)
    policy = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    ids = [tokenizer(f"\n<tool_call>{call}</tool_call><|im_end|>")["input_ids"] for call in CALLS]
    turns = torch.tensor(ids)
    assert turns.shape == (2, 5)
    for _ in range(100):
        before = torch.randint(len(tokenizer), (2, 50))
        policy(torch.cat([before, turns], 1), labels=torch.cat([before * 0 - 100, turns], 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    policy.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["train_sync.py", "train_async.py"])
def test_mini_swe_agent_s_calls_are_one_conversation(script, model, tmp_path):
    mini = of_adapter("mini-swe-agent", "mini")
    rows = [{"task": f"Make the file made, {n}.", "data_source": "files"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text(AGENT)
    flags = ["--model", model, "--agent", f"{sys.executable} {tmp_path / 'agent.py'} {mini}", "--env-timeout", "120"]
    flags += ["--train-files", tmp_path / "rows.jsonl", "--max-prompt-length", "6000", "--max-response-length", "1200"]
    flags += ["--train-batch-size", "1", "--rollout-n", "4", "--total-training-steps", "3", "--test-freq", "0"]
    how = {}
    if script == "train_async.py":
        flags, how = [*flags, "--staleness-threshold", "0"], {"ranks": 2}
    found, _, _ = train(script, *flags, out=tmp_path / "run", timeout=800, **how)
    for step in (1, 2, 3):
        its = found[step]
        assert its["reward/extra/forks/mean"] == 0 and its["reward/unscored"] == 0
        assert its["training/rollout_probs_diff_max"] < 1e-4
    assert max(found[step]["reward/extra/turns/mean"] for step in (1, 2, 3)) > 1
    assert 0 < sum(found[step]["critic/score/mean"] for step in (1, 2, 3)) < 3
