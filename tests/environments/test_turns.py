"""The tokens between turns: the chat template's own, appended, and an environment's words are data in them."""

import pytest
from families import FAMILIES, WIDE, end_tokens, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.errors import UserError
from user_code.programs import EpisodeProgram
from user_code.turns import Turns

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
TOOL, USER = {"role": "tool", "name": "calculate", "content": "391"}, {"role": "user", "content": "391"}
# family -> what stands between a sampled end token and the next sampled one, after a call and after text
BETWEEN = {
    "qwen2_5": ("\n<|im_start|>user\n<tool_response>\n391\n</tool_response><|im_end|>\n<|im_start|>assistant\n",) * 2,
    "qwen3_5_think": (
        "\n<|im_start|>user\n<tool_response>\n391\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
        "\n<|im_start|>user\n391<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "llama3_1": (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"391"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        "<|start_header_id|>user<|end_header_id|>\n\n391<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "glm4moe": ("\n<tool_response>\n391\n</tool_response><|assistant|>", "\n391<|assistant|>"),
    "deepseekv3": (
        "<|tool▁outputs▁begin|><|tool▁output▁begin|>391<|tool▁output▁end|><|tool▁outputs▁end|>".translate(WIDE),
        "<|User|>391<|Assistant|><think>\n".translate(WIDE),
    ),
    "gemma3": (None, "\n<start_of_turn>user\n391<end_of_turn>\n<start_of_turn>model\n"),
}
BETWEEN["qwen2_5"] = BETWEEN["qwen3"] = (BETWEEN["qwen2_5"][0], "\n<|im_start|>user\n391<|im_end|>\n<|im_start|>assistant\n")
TURNS = {}


def turns_of(family: str, with_tools: bool = True) -> Turns:
    if (family, with_tools) not in TURNS:
        form = "auto" if FAMILIES[family][2] else "hermes"
        TURNS[family, with_tools] = Turns(tokenizer_of(family), [SCHEMA] * with_tools, end_tokens(family), form)
    return TURNS[family, with_tools]


class Asks:
    """An environment that always asks, and the programs that make it."""

    new = lambda self: self  # noqa: E731
    reset = lambda self, row, seed: []  # noqa: E731
    step = lambda self, message: ([USER], None, False)  # noqa: E731


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_to_a_turn_that_a_stop_string_ended_begins_with_the_end_token(family):
    turns = turns_of(family, with_tools=False)
    program = EpisodeProgram(Asks(), turns, [])
    program.reset({"row": {}, "seed": 0, "own_seed": 1})
    said = turns.tokenizer("<answer>6</answer>", add_special_tokens=False)["input_ids"]
    stopped, *ended = (program.step({"ids": ids})["ids"] for ids in (said, *([*said, end] for end in turns.end_tokens)))
    assert stopped[0] in turns.end_tokens and all(ids == stopped[1:] for ids in ended)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_between_two_turns_is_the_template_s_own(family):
    """Complaints 1, 2, 11: no separator is lost, no role marker is there twice, and the end token is the sampled one."""
    after_call, after_text = BETWEEN[family]
    turns = turns_of(family)
    if after_call:
        assert turns.tokenizer.decode(turns.between([TOOL])) == after_call
    else:  # the template has no role for tools
        assert turns.between([TOOL]) == turns.between([USER | {"content": "<tool_response>\n391\n</tool_response>"}])
    turns = turns_of(family, with_tools=False)
    assert turns.tokenizer.decode(turns.between([USER])) == after_text


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60)
def test_an_answer_is_data_whatever_it_holds(data):
    """Names of special tokens, lone surrogates and private-use characters make no special token, and lose no text."""
    family = data.draw(st.sampled_from([name for name in FAMILIES if name != "gemma3"]))
    turns, (special, _, _) = turns_of(family), FAMILIES[family]
    pieces = st.one_of(st.sampled_from(special), st.text(max_size=5), st.sampled_from(["\ud800", "<|", "|>", "mark7f3a"]))
    text = "x" + "".join(data.draw(st.lists(pieces, max_size=6))) + "x"
    empty = turns.between([TOOL | {"content": "xx"}])
    ids = turns.between([TOOL | {"content": text}])
    is_special = set(turns.tokenizer.convert_tokens_to_ids(special))
    assert [i for i in ids if i in is_special] == [i for i in empty if i in is_special]
    plain = text.replace("\ue000", "").encode("utf-8", "replace").decode()
    if family == "llama3_1":  # its template quotes
        return
    assert plain in turns.tokenizer.decode(ids)


def test_a_base_model_s_end_token_is_refused():
    """The end token that the template puts behind an answer is not among those that end a response."""
    tokenizer = tokenizer_of("qwen2_5")
    with pytest.raises(UserError, match="puts none of the model's end tokens"):
        Turns(tokenizer, [], {tokenizer.convert_tokens_to_ids("<|endoftext|>")}, "auto")


def test_a_turn_without_a_call_says_what_a_plain_response_says():
    """One-turn environment: the text is that which a verifier would be given without one."""
    turns = turns_of("qwen3")
    ids = turns.tokenizer("<think>\nwell\n</think>\n\n42<|im_end|>", add_special_tokens=False)["input_ids"]
    assert turns.message(ids)["content"] == turns.tokenizer.decode(ids, skip_special_tokens=True)


def test_a_tool_s_name_is_data_too():
    """The model chooses it, and some templates show it."""
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = tokenizer.chat_template.replace("message.content", "(message.name or '') + message.content")
    turns = Turns(tokenizer, [SCHEMA], end_tokens("qwen2_5"))
    ids = turns.between([TOOL | {"name": "\ud800<|im_end|>"}])
    assert "?<|im_end|>391" in tokenizer.decode(ids) and ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1


def test_a_reserved_token_in_an_answer_is_text():
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.add_tokens(["<|reserved_special_token_5|>", "<unused7>"], special_tokens=True)
    ids = Turns(tokenizer, [], end_tokens("qwen2_5")).between([USER | {"content": "<|reserved_special_token_5|><unused7>"}])
    assert "<|reserved_special_token_5|><unused7>" in tokenizer.decode(ids) and max(ids) < len(tokenizer) - 2


def test_text_that_reset_adds_belongs_to_the_last_message():
    """As in TRL. It is data: the name of a special token in it is text."""
    turns = turns_of("qwen2_5")
    asked = {"role": "user", "content": "Which?"}
    end = turns.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = turns.prompt([asked], {"content": " One of <|im_end|>2."})
    assert "Which? One of <|im_end|>2.<|im_end|>" in turns.tokenizer.decode(ids)
    assert ids.count(end) == turns.prompt([asked], []).count(end)
