"""A model that would train wrongly or crash late is refused at the start: files, shapes, layout and tokenizer are checked."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers import SMALL, save_model, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import train_sync
from examples.demo.sums import build_tokenizer
from rl import parts
from rl.data.args import DataArgs
from rl.data.prompts import PromptDataset
from rl.errors import UserError
from rl.generation.engine import EngineArgs
from rl.generation.make import make_engine
from rl.model.loading import load_weights
from rl.model.pretrained import check_model, end_token_ids, generation_config, resolve


def flags_of(**given):
    lengths = {"max_prompt_length": 16, "max_response_length": 16, "max_tokens_per_micro_batch": 64}
    return parts.make(train_sync.Args, **lengths | given)


@pytest.fixture
def model(tmp_path) -> str:
    """A directory with an untied model of one file, and the demo's tokenizer."""
    path = tmp_path / "model"
    save_model("qwen2-untied", path)
    build_tokenizer().save_pretrained(path)
    return str(path)


def edit_json(path, name: str, **changes) -> None:
    content = json.loads((path / name).read_text()) if (path / name).exists() else {}
    (path / name).write_text(json.dumps(content | changes))


def shard(path) -> None:
    """Saves the model again in several files."""
    whole = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    whole.save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2


# ------------------------------------------------------------------------------------------------------ weights


def without(*parts: str):
    def damage(path) -> None:
        weights = load_file(path / "model.safetensors")
        kept = {name: weight for name, weight in weights.items() if not any(part in name for part in parts)}
        assert len(kept) < len(weights)
        save_file(kept, path / "model.safetensors", {"format": "pt"})

    return damage


def cut(name: str, keep: float):
    def damage(path) -> None:
        file = sorted(path.glob(name))[0]
        file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])

    return damage


def edited(**changes):
    return lambda path: edit_json(path, "config.json", **changes)


def indexed(change):
    """Several files, of which change(path, the index's weight_map, its first name and that one's file) makes something."""

    def damage(path) -> None:
        shard(path)
        index = json.loads((path / "model.safetensors.index.json").read_text())
        change(path, index["weight_map"], *sorted(index["weight_map"].items())[0])
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def pickled(path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    torch.save(model.state_dict(), path / "pytorch_model.bin")


FP8 = {"quantization_config": {"quant_method": "fp8"}}
DAMAGES = {
    "one tensor missing": (without("layers.1.mlp.up_proj.weight"), "1 of the model's weights .*up_proj.weight first"),
    "a layer missing": (without("layers.1."), r"12 of the model's weights .* model.layers.1"),
    "untied lm_head missing": (without("lm_head"), "lm_head.weight first; they would be random"),
    "no file": (lambda path: (path / "model.safetensors").unlink(), "cannot be read"),
    "half a file": (cut("model.safetensors", 0.5), "cannot be read"),
    "other sizes": (edited(hidden_size=32), r"weights have another shape: .* by config"),
    "quantized": (edited(**FP8), "the weights cannot be read: they are quantized. Save them in bfloat16"),
    "PyTorch's own format": (pickled, "the weights cannot be read: there is no model.safetensors"),
    "a shard cut": (
        indexed(lambda path, _, __, file: cut(file, 0.9)(path)),
        r"model-00004-\S+, [\d,]+ bytes long, cannot be read \(",
    ),
    "a shard lost": (
        indexed(lambda path, _, __, file: (path / file).unlink()),
        r"model-00004-\S+, which model.safetensors.index.json lists, is not there",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_are_not_all_there_are_refused(model, tmp_path, damage):
    act, message = DAMAGES[damage]
    act(tmp_path / "model")
    with pytest.raises(UserError, match=message) as refused:
        load_weights(model, torch.float32)
    assert f"{tmp_path}" in str(refused.value) and len(str(refused.value)) < 600


# ------------------------------------------------------------------------------------------------------- layout

OTHERS = {
    "GPT2Config": "GPT2LMHeadModel has no model.embed_tokens and no model.layers",
    "MambaConfig": "MambaForCausalLM has no",
    "T5Config": "transformers cannot make a causal language model of it",
    "Qwen2VLConfig": "it takes images, and is a qwen2_vl",
    "CLIPConfig": "transformers cannot make a causal language model of it",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_another_layout_are_refused_before_their_weights_are_read(tmp_path, kind):
    small = {name: value for name, value in SMALL.items() if kind not in ("T5Config", "CLIPConfig")}
    getattr(transformers, kind)(**small).save_pretrained(tmp_path)  # no weights
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=OTHERS[kind]):
        check_model(str(tmp_path), build_tokenizer(), flags_of())


@pytest.mark.parametrize("changes", [dict(num_hidden_layers=3), dict(model_type="no-such"), dict(hidden_size="wide")])
def test_a_config_that_cannot_be_used_is_refused(model, tmp_path, changes):
    edit_json(tmp_path / "model", "config.json", **changes)
    with pytest.raises(UserError, match=f"{tmp_path}.*(no model can be read there|cannot make)") as refused:
        check_model(model, build_tokenizer(), flags_of())
    assert "\n" not in str(refused.value)


def test_lengths_that_the_model_or_a_micro_batch_cannot_hold(model):
    check_model(model, build_tokenizer(), flags_of())
    with pytest.raises(UserError, match="the model's context is 256"):
        check_model(model, build_tokenizer(), flags_of(max_response_length=256))
    with pytest.raises(UserError, match="--max-tokens-per-micro-batch is 31"):
        check_model(model, build_tokenizer(), flags_of(max_tokens_per_micro_batch=31))


UNREADABLE = ['{"eos_token_id": 1', "\xff\xfe", "", "[1]", '{"suppress_tokens": 5}']
GARBAGE = dict.fromkeys(UNREADABLE, "generation_config.json cannot be read") | {
    '{"max_new_tokens": -1}': "generation_config.json cannot be read .*must be greater than 0",
    '{"eos_token_id": "x"}': "eos_token_id of generation_config.json is 'x', no token's number",
    '{"eos_token_id": [1, [2]]}': r"eos_token_id of generation_config.json is \[2\], no token's number",
    '{"eos_token_id": 1.5}': "eos_token_id of generation_config.json is 1.5, no token's number",
    '{"eos_token_id": true}': "eos_token_id of generation_config.json is True, no token's number",
}


@pytest.mark.parametrize("content", GARBAGE)
def test_garbage_in_generation_config_is_refused(content, models, tmp_path):
    """A model may have none."""
    path = shutil.copytree(models["qwen3"], tmp_path / "model")
    file = path / "generation_config.json"
    file.write_bytes(content.encode("latin-1"))
    for flag in ("--model", "--teacher"):
        with pytest.raises(UserError, match=f"^{flag} {re.escape(str(path))}: {GARBAGE[content]}.* Correct it") as refused:
            end_token_ids(str(path), name=flag)
        assert "\n" not in str(refused.value)
    file.unlink()
    assert generation_config(str(path)) is None and end_token_ids(str(path)) == {1}


@pytest.mark.runs
def test_a_checkpoint_keeps_the_generation_config_that_was_read(demo_model, tmp_path):
    """Also settings that transformers reads with a warning and would not save."""
    path = shutil.copytree(demo_model, tmp_path / "model")
    edit_json(path, "generation_config.json", temperature=0.6, top_p=0.9)
    flags = ["--model", path, "--total-training-steps", 1, "--test-freq", 0]
    _, run, done = train("train_sync.py", *flags, out=tmp_path / "runs")
    assert "could not be written" not in done.stderr
    saved, given = (json.loads((of / "generation_config.json").read_text()) for of in (run / "step_000001", path))
    assert saved == given


# ---------------------------------------------------------------------------------------------------- tokenizers


def tokenizer_of(words: list[str], **special: str) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


WORDS = ["<unk>", "<end>", *(f"w{i}" for i in range(30))]  # as many as the model's vocabulary


@pytest.mark.parametrize(
    ("words", "message"),
    [(WORDS[:2], "has 2 tokens, the model's vocabulary 32"), ([*WORDS, "w30", "w31"], r"2 of .* no embedding, 32 \('w30'\)")],
)
def test_a_tokenizer_of_another_size_is_refused(model, words, message):
    with pytest.raises(UserError, match=message):
        check_model(model, tokenizer_of(words, eos_token="<end>"), flags_of())


def test_the_tokenizers_end_token_counts_as_do_those_of_the_configs(model, tmp_path):
    """A chat model's tokenizer often ends a turn with a token that its config does not name."""
    path = tmp_path / "model"
    tokenizer = tokenizer_of(WORDS, eos_token="w7")
    assert end_token_ids(model) == {1}
    assert end_token_ids(model, tokenizer) == {1, WORDS.index("w7")}
    edit_json(path, "generation_config.json", eos_token_id=[3, 4])
    assert end_token_ids(model, tokenizer) == {1, 3, 4, WORDS.index("w7")}
    tokenizer.save_pretrained(path)
    assert make_engine(model, EngineArgs(engine="embedded"), 64, torch.float32, torch.device("cpu"), False).eos == {1, 3, 4, 9}


@pytest.mark.parametrize(
    ("named", "message"), [(None, "no eos_token_id is named"), (31, r"end token \[31\] is not"), (99, r"\[99\]")]
)
def test_a_model_whose_responses_would_never_end_is_refused(model, tmp_path, named, message):
    for name in ("config.json", "generation_config.json"):
        edit_json(tmp_path / "model", name, eos_token_id=named)
    with pytest.raises(UserError, match=f"{message}.*no response would end"):
        check_model(model, tokenizer_of(WORDS[:31]), flags_of())


@pytest.mark.parametrize("prompt", ["10+20=", [{"role": "user", "content": "10+20="}]])
def test_a_tokenizer_that_loses_the_prompts_text_is_refused(tmp_path, prompt):
    """A tokenizer with another vocabulary does so, even if it makes the same number of tokens."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt, "data_source": "x", "ground_truth": "30"}))
    files, flags = [str(tmp_path / "a.jsonl")], DataArgs()
    lossy = tokenizer_of(WORDS, eos_token="<end>", unk_token="<unk>", additional_special_tokens=["<user>"])
    lossy.chat_template = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match=r"a.jsonl row 0: the tokenizer loses most of the prompt: '10\+20=' is read as ''"):
        PromptDataset(files, "train", lossy, flags)
    assert len(PromptDataset(files, "train", build_tokenizer(), flags)) == 1


def test_an_output_head_that_is_tied_and_yet_another_is_refused(tmp_path):
    """transformers would untie them on the rank that reads the files, and on no other, nor in the engine."""
    path = save_model("qwen2-tied", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    tied = load_weights(path, torch.float32)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    save_file(weights | {"lm_head.weight": embedding + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"ties lm_head.weight to the embedding .*Set tie_word_embeddings"):
        load_weights(path, torch.float32)


@pytest.mark.parametrize("name", ["demo", "demo-moe", "demo-hybrid", "demo-vl"])
def test_a_demo_that_cannot_be_kept_anywhere_says_what_to_set(name, monkeypatch, tmp_path):
    """Home directories are read-only in many containers, or HOME is /root, of a user without access to it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("RL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=rf"--model {name}: .*/file/cache, which cannot be written \(Not a dir.*RL_CACHE"):
        resolve(name)
    monkeypatch.setenv("RL_CACHE", str(tmp_path))

    def refused(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(UserError, match=rf"--model {name}: .*, which cannot be written \(Permission denied\).*RL_CACHE"):
        resolve(name)
