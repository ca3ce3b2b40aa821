"""Small tokenizers with the special tokens of model families, and their own chat templates (tests/fixtures/chat_templates)."""

from helpers import ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = [*CHATML, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
GLM += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<arg_key>", "</arg_key>"]
GLM += ["<arg_value>", "</arg_value>"]
MARKS = ["begin", "end", "calls▁begin", "calls▁end", "call▁begin", "call▁end", "outputs▁begin", "outputs▁end"]
WIDE = str.maketrans("|", "\uff5c")  # the bar in DeepSeek's names
DEEPSEEK = [f"<|{n}|>".translate(WIDE) for n in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep")]
DEEPSEEK += [f"<|tool▁{mark}|>".translate(WIDE) for mark in (*MARKS[2:], "output▁begin", "output▁end")] + [
    "<think>",
    "</think>",
]
GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
# family -> its special tokens, those that end a turn, and how it writes calls
FAMILIES = {
    "qwen2_5": (QWEN, ["<|im_end|>"], "hermes"),
    "qwen3": (QWEN, ["<|im_end|>"], "hermes"),
    "qwen3_5_think": (QWEN, ["<|im_end|>"], "xml"),
    "llama3_1": (LLAMA, ["<|eot_id|>", "<|eom_id|>"], "llama"),
    "glm4moe": (GLM, ["<|endoftext|>", "<|user|>", "<|observation|>"], "xml"),
    "deepseekv3": (DEEPSEEK, DEEPSEEK[1:2], None),
    "gemma3": (GEMMA, ["<end_of_turn>"], None),
}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """One token a byte, and the family's special ones. As in their own tokenizers some of these are not marked special."""
    special, ends, _ = FAMILIES[family]
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    plain.add_special_tokens([name for name in special if "tool_" not in name and "think" not in name and "arg_" not in name])
    plain.add_tokens([name for name in special if "tool_" in name or "think" in name or "arg_" in name])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=ends[0], bos_token=special[0])
    tokenizer.chat_template = (ROOT / "tests" / "fixtures" / "chat_templates" / f"{family}.jinja").read_text()
    return tokenizer


def end_tokens(family: str) -> set[int]:
    """The ids of the tokens that end a turn."""
    return set(tokenizer_of(family).convert_tokens_to_ids(FAMILIES[family][1]))
