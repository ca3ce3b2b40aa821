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
PHI = ["<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
COHERE = ["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"]
COHERE += ["<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"]
HARMONY = ["<|startoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
SMOL = (  # of SmolLM2
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a "
    "helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] "
    "+ '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
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
# The same of families whose templates do not do all that tools need, or are only looked at for their tools
OTHERS = {
    "qwen3_6": (QWEN, ["<|im_end|>"], "xml"),
    "nemotron_3_nano": (QWEN, ["<|im_end|>"], "xml"),
    "smollm2": (CHATML, ["<|im_end|>"], None),
    "qwen2_5_vl": (QWEN, ["<|im_end|>"], None),
    "lfm2": (["<|startoftext|>", *CHATML, "<|tool_list_start|>", "<|tool_list_end|>"], ["<|im_end|>"], None),
    "llama3": (LLAMA, ["<|eot_id|>"], None),
    "phi3": (PHI, ["<|end|>"], None),
    "phi3_5": (PHI, ["<|end|>"], None),
    "cohere2": (COHERE, ["<|END_OF_TURN_TOKEN|>"], None),
    "gemma": (GEMMA, ["<end_of_turn>"], None),
    "gptoss": (HARMONY, ["<|return|>", "<|call|>"], None),
}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """One token a byte, and the family's special ones. As in their own tokenizers some of these are not marked special."""
    special, ends, _ = (FAMILIES | OTHERS)[family]
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    plain.add_special_tokens([name for name in special if "tool_" not in name and "think" not in name and "arg_" not in name])
    plain.add_tokens([name for name in special if "tool_" in name or "think" in name or "arg_" in name])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=ends[0], bos_token=special[0])
    file = ROOT / "tests" / "fixtures" / "chat_templates" / f"{family}.jinja"
    tokenizer.chat_template = SMOL if family == "smollm2" else file.read_text()
    return tokenizer


def end_tokens(family: str) -> set[int]:
    """The ids of the tokens that end a turn."""
    return set(tokenizer_of(family).convert_tokens_to_ids((FAMILIES | OTHERS)[family][1]))
