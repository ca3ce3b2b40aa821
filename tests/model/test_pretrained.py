"""A model that would train wrongly or crash late is refused at the start: files, shapes, layout and tokenizer are checked."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers import SMALL, run_script, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import train_sync
from examples.demo.sums import build_tokenizer, made_once
from rl import parts
from rl.data.args import DataArgs
from rl.data.prompts import PromptDataset
from rl.errors import UserError
from rl.generation.embedded.engine import TransformersEngine
from rl.generation.engine import EngineArgs, Request, SamplingParams
from rl.generation.generator import make_engine
from rl.model.loading import load_weights
from rl.model.pretrained import check_model, end_token_ids, load_tokenizer, resolve


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


def flip_header(path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[8:40] = b"\xff" * 32
    (path / "model.safetensors").write_bytes(data)


def lose_shard(path) -> None:
    shard(path)
    sorted(path.glob("model-*"))[1].unlink()


def lose_shard_from_index(path) -> None:
    shard(path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    gone = sorted(set(index["weight_map"].values()))[1]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != gone}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def forget_whole_file(path) -> None:
    shutil.copy(path / "model.safetensors", path / "kept")
    shard(path)
    (path / "kept").rename(path / "model.safetensors")


def damage_index(path) -> None:
    shard(path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": ')


DAMAGES = {
    "one tensor missing": (without("layers.1.mlp.up_proj.weight"), "1 of the model's weights .*up_proj.weight first"),
    "a layer missing": (without("layers.1."), r"12 of the model's weights .* model.layers.1"),
    "untied lm_head missing": (without("lm_head"), "lm_head.weight first; they would be random"),
    "no weights in the file": (without("model", "lm_head"), "of the model's weights are not in its files"),
    "no file": (lambda path: (path / "model.safetensors").unlink(), "cannot be read"),
    "empty file": (cut("model.safetensors", 0), "cannot be read"),
    "half a file": (cut("model.safetensors", 0.5), "cannot be read"),
    "damaged header": (flip_header, "cannot be read"),
    "other sizes": (lambda path: edit_json(path, "config.json", hidden_size=32), r"weights have another shape: .* by config"),
    "other vocabulary": (
        lambda path: edit_json(path, "config.json", vocab_size=36),
        r"another shape: .* \[32, 64\] in the files",
    ),
    "more layers in config.json": (
        lambda path: edit_json(path, "config.json", num_hidden_layers=3, layer_types=None),
        "not in its files",
    ),
    "a shard lost": (lose_shard, "cannot be read"),
    "a shard not listed": (lose_shard_from_index, "is not listed in model.safetensors.index.json"),
    "two sets of weights": (forget_whole_file, "model.safetensors next to"),
    "a damaged index": (damage_index, "cannot be read"),
    "an adapter": (lambda path: edit_json(path, "adapter_config.json", r=8), "Merge it into the model"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_are_not_all_there_are_refused(model, tmp_path, damage):
    act, message = DAMAGES[damage]
    act(tmp_path / "model")
    with pytest.raises(UserError, match=message) as refused:
        load_weights(model, torch.float32)
    assert f"{tmp_path}" in str(refused.value) and len(str(refused.value)) < 600


def test_sharded_whole_and_tied_weights_are_read(model, models, tmp_path, capsys):
    whole = load_weights(model, torch.float32).state_dict()
    shard(tmp_path / "model")
    sharded = load_weights(model, torch.float32).state_dict()
    assert whole.keys() == sharded.keys() and all(torch.equal(whole[name], sharded[name]) for name in whole)
    tied = load_weights(models["qwen2-tied"], torch.float32)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert capsys.readouterr().out == ""


def test_weights_that_are_not_used_are_said_once(model, tmp_path, capsys):
    edit_json(tmp_path / "model", "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    load_weights(model, torch.float32)
    out, err = capsys.readouterr()
    assert out.count("warning:") == 1 and "12 weights in the files are not used, model.layers.1." in out
    load_weights(model, torch.float32, say=False)  # the reference policy, the engine
    assert capsys.readouterr().out == "" and not err


@pytest.mark.runs
@pytest.mark.parametrize("damage", ["one tensor missing", "half a file"])
def test_a_script_says_it_in_one_line_before_it_trains(model, tmp_path, damage):
    DAMAGES[damage][0](tmp_path / "model")
    done = run_script("train_sync.py", "--model", model, "--output-dir", tmp_path / "runs", check=False, timeout=120)
    assert done.returncode == 1 and "step" not in done.stdout
    assert [line[:6] for line in done.stderr.splitlines()] == ["error:"], done.stderr


# ------------------------------------------------------------------------------------------------------- layout

OTHERS = {
    "GPT2Config": "GPT2LMHeadModel has no model.embed_tokens and no model.layers",
    "GPTNeoXConfig": "has no model.embed_tokens",
    "OPTConfig": "OPTForCausalLM has no model.embed_tokens and no model.layers",
    "BloomConfig": "BloomForCausalLM has no",
    "BertConfig": "BertLMHeadModel has no",
    "MptConfig": "MptForCausalLM has no",
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


def test_special_tokens_beyond_the_vocabulary_matter_where_prompts_have_them(model):
    tokenizer = tokenizer_of(WORDS, eos_token="<end>", additional_special_tokens=["<image>"])
    check_model(model, tokenizer, flags_of())
    tokenizer.chat_template = "{% for m in messages %}<image>{{ m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match=r"1 of the tokenizer's ids have no embedding, 32 .'<image>'.*resize"):
        check_model(model, tokenizer, flags_of())
    with pytest.raises(UserError, match=r"no embedding, 32 .'<stop>'"):
        check_model(model, tokenizer_of(WORDS, eos_token="<stop>"), flags_of())


def test_the_tokenizers_end_token_counts_as_do_those_of_the_configs(model, tmp_path):
    """A chat model's tokenizer often ends a turn with a token that its config does not name."""
    path = tmp_path / "model"
    tokenizer = tokenizer_of(WORDS, eos_token="w7")
    assert end_token_ids(model) == {1}
    assert end_token_ids(model, tokenizer) == {1, WORDS.index("w7")}
    edit_json(path, "generation_config.json", eos_token_id=[3, 4])
    assert end_token_ids(model, tokenizer) == {1, 3, 4, WORDS.index("w7")}


def test_an_engine_ends_responses_at_the_tokenizers_end_token(model, tmp_path):
    end = 9
    tokenizer_of(WORDS, eos_token=WORDS[end]).save_pretrained(tmp_path / "model")
    args = EngineArgs(engine="embedded")
    engine = make_engine(model, args, 64, torch.float32, torch.device("cpu"), False)
    assert engine.eos == {1, end}
    for i in range(8):
        engine.add(Request(i, [5, 6], SamplingParams(max_tokens=60), seed=i))
    outputs = []
    while engine.num_unfinished:
        outputs += engine.step()
    assert any(output.token_ids[-1] == end and output.finish_reason == "stop" for output in outputs)
    assert not any(end in output.token_ids[:-1] for output in outputs)


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
    load_weights(path, torch.float32)
    save_file(weights | {"lm_head.weight": embedding + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"ties lm_head.weight to the embedding .*Set tie_word_embeddings"):
        load_weights(path, torch.float32)


def test_the_demo_passes(demo_model):
    check_model(demo_model, load_tokenizer(demo_model), flags_of())
    TransformersEngine(demo_model, max_length=16)


@pytest.mark.parametrize("name", ["demo", "demo-moe", "demo-hybrid", "demo-vl"])
def test_a_demo_that_cannot_be_kept_anywhere_says_what_to_set(name, monkeypatch, tmp_path):
    """Home directories are read-only in many containers."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("RL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        UserError, match=rf"--model {name}: .*/file/cache, which cannot be written \(Not a directory\).*RL_CACHE"
    ):
        resolve(name)


@pytest.mark.parametrize("name", ["demo", "demo-moe", "demo-hybrid", "demo-vl"])
def test_a_demo_in_anothers_home_says_what_to_set(name, monkeypatch):
    """HOME=/root, and a user without access to it."""
    monkeypatch.setenv("RL_CACHE", "/root/cache")
    stat = Path.stat

    def refused(path, **how):
        if "/root/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(
        UserError, match=rf"--model {name}: .*/root/cache, which cannot be written \(Permission denied\).*RL_CACHE"
    ):
        resolve(name)


def test_a_demo_whose_disk_is_full_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("RL_CACHE", str(tmp_path))

    def full(directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match="No space left on device"):
        made_once("demo", full)
    assert not list(tmp_path.glob("demo-v*/config.json"))


@pytest.mark.parametrize("own", [1, 3])
def test_a_demo_is_made_by_one_thread_whatever_the_job_has(monkeypatch, tmp_path, own):
    """Its weights would differ in their last bits. The job continues with its own weights and seed, even if this fails."""
    monkeypatch.setenv("RL_CACHE", str(tmp_path))
    before, used = torch.get_num_threads(), []

    def make(directory):
        used.append(torch.get_num_threads())
        torch.rand(1)
        if len(used) == 1:
            raise RuntimeError("not made")
        (Path(directory) / "config.json").touch()

    torch.set_num_threads(own)
    try:
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="not made"):
            made_once("demo", make)
        assert torch.get_num_threads() == own and torch.equal(torch.get_rng_state(), state)
        made_once("demo", make)
        assert torch.get_num_threads() == own and torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(before)
    assert used == [1, 1]
