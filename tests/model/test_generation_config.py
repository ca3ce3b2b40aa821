"""generation_config.json: what cannot be read is refused at the start, and what is read is saved again as it was."""

import json
import re
import shutil

import pytest
from helpers import save_model, train

from rl.errors import UserError
from rl.model.pretrained import end_token_ids, generation_config

FILE = "generation_config.json"
GARBAGE = {  # content -> what is said of it
    '{"eos_token_id": 1': "generation_config.json cannot be read",
    "\xff\xfe": "generation_config.json cannot be read",
    "": "generation_config.json cannot be read",
    "[1]": "generation_config.json cannot be read",
    "7": "generation_config.json cannot be read",
    "null": "generation_config.json cannot be read",
    '{"max_new_tokens": -1}': "generation_config.json cannot be read .*must be greater than 0",
    '{"suppress_tokens": 5}': "generation_config.json cannot be read",
    '{"watermarking_config": 7}': "generation_config.json cannot be read",
    '{"eos_token_id": "x"}': "eos_token_id of generation_config.json is 'x', no token's number",
    '{"eos_token_id": [1, [2]]}': r"eos_token_id of generation_config.json is \[2\], no token's number",
    '{"eos_token_id": 1.5}': "eos_token_id of generation_config.json is 1.5, no token's number",
    '{"eos_token_id": true}': "eos_token_id of generation_config.json is True, no token's number",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model("qwen3", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("flag", ["--model", "--teacher"])
@pytest.mark.parametrize("content", GARBAGE)
def test_garbage_is_refused(content, flag, model, tmp_path):
    path = shutil.copytree(model, tmp_path / "model")
    (path / FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=f"^{flag} {re.escape(str(path))}: {GARBAGE[content]}.* Correct it") as refused:
        end_token_ids(str(path), name=flag)
    assert "\n" not in str(refused.value)


def test_a_model_may_have_none(model, tmp_path):
    path = shutil.copytree(model, tmp_path / "model")
    (path / FILE).unlink()
    assert generation_config(str(path)) is None and end_token_ids(str(path)) == {1}


@pytest.mark.runs
def test_a_checkpoint_keeps_what_was_read(demo_model, tmp_path):
    """Also settings that transformers reads with a warning and would not save."""
    path = shutil.copytree(demo_model, tmp_path / "model")
    content = json.loads((path / FILE).read_text()) | {"temperature": 0.6, "top_p": 0.9}
    (path / FILE).write_text(json.dumps(content))
    flags = ["--model", path, "--total-training-steps", 1, "--test-freq", 0]
    _, run, done = train("train_sync.py", *flags, out=tmp_path / "runs")
    assert "could not be written" not in done.stderr
    assert json.loads((run / "step_000001" / FILE).read_text()) == content
