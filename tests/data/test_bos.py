"""A prompt that is a plain string begins with one BOS, whether the tokenizer adds it or the string has it already."""

from pathlib import Path

import pytest
from test_data import dataset, write
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = "abcdefghijklmnopqrstuvwxyz+=0123456789\n:[]/_|<>ISTNUR"


def of_bytes(bos: str, eos: str, *, adds_bos: bool, adds_eos: bool = False) -> PreTrainedTokenizerFast:
    """A byte tokenizer like Llama 3's and Qwen's, with a post-processor that adds the given tokens."""
    special = [bos, eos, "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *BYTES])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    words = [bos] * adds_bos + ["$A"] + [eos] * adds_eos
    template = processors.TemplateProcessing(single=" ".join(words), special_tokens=[(bos, 0), (eos, 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)


def of_pieces(kind: type, special: list[str], **how) -> PreTrainedTokenizerBase:
    """A tokenizer of pieces like Llama 2's, Mistral's and Gemma's, with a mark for blanks."""
    vocab = {token: i for i, token in enumerate([*special, *LETTERS, "▁"])}
    return kind(vocab=vocab, merges=[], **how)


LLAMA, GEMMA = ["<unk>", "<s>", "</s>"], ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
ADDING = {
    "llama 3": lambda: of_bytes("<|begin_of_text|>", "<|eot_id|>", adds_bos=True),
    "llama 2": lambda: of_pieces(LlamaTokenizer, LLAMA, add_bos_token=True),
    "mistral": lambda: of_pieces(LlamaTokenizer, LLAMA, add_bos_token=True, legacy=True),
    "gemma": lambda: of_pieces(GemmaTokenizer, GEMMA, add_bos_token=True),
    "with an end, too": lambda: of_bytes("<s>", "</s>", adds_bos=True, adds_eos=True),
}
SILENT = {
    "qwen": lambda: of_bytes("<|endoftext|>", "<|im_end|>", adds_bos=False),
    "llama 2 without": lambda: of_pieces(LlamaTokenizer, LLAMA, add_bos_token=False),
}
TEXTS = ["BOShello 1+1=", "BOS hello", "BOS\nhello", "BOS[INST] 1+1= [/INST]", "BOS"]


def read(path: Path, tokenizer: PreTrainedTokenizerBase, *prompts, split: str = "train") -> list[list[int]]:
    """Return the token ids of these prompts, read from a file."""
    rows = [{"prompt": prompt, "data_source": "x", "ground_truth": "1"} for prompt in prompts]
    return [prompt.ids for prompt in dataset(write(path, *rows), split=split, tokenizer=tokenizer, max_prompt_length=100)]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("kind", ADDING)
def test_a_string_with_its_own_bos_gets_no_second_one(tmp_path, kind, split):
    """It is taken as it is: an end token is not added either."""
    tokenizer = ADDING[kind]()
    texts = [text.replace("BOS", tokenizer.bos_token) for text in TEXTS]
    assert all(tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) > 1 for text in texts), "the tokenizer adds one"
    found = read(tmp_path / "x.jsonl", tokenizer, *texts, split=split)
    for text, ids in zip(texts, found, strict=True):
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1, text
        rest = text.split(tokenizer.bos_token)[-1]
        expected = tokenizer(tokenizer.bos_token + rest, add_special_tokens=False)["input_ids"]
        assert ids == expected, text


@pytest.mark.parametrize("kind", [*ADDING, *SILENT])
def test_other_strings_are_what_the_tokenizer_makes_of_them(tmp_path, kind):
    """A BOS in the middle is the user's own."""
    tokenizer = (ADDING | SILENT)[kind]()
    texts = ["1+1=", " 1+1=", f"1+1={tokenizer.bos_token}2+2=", tokenizer.bos_token[:-1]]
    if kind in SILENT:
        texts += [text.replace("BOS", tokenizer.bos_token) for text in TEXTS]
    found = read(tmp_path / "x.jsonl", tokenizer, *texts)
    assert found == [tokenizer(text)["input_ids"] for text in texts]
    assert all((ids[0] == tokenizer.bos_token_id) == (kind in ADDING) for ids in found[:4])


def test_a_tokenizer_without_a_bos(tmp_path):
    tokenizer = of_bytes("<|endoftext|>", "<|im_end|>", adds_bos=False)
    tokenizer.bos_token = None
    assert read(tmp_path / "x.jsonl", tokenizer, "<|endoftext|>1+1=") == [tokenizer("<|endoftext|>1+1=")["input_ids"]]
