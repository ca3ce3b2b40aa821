"""Every chat template shows the tools, calls and answers, or they are written in Qwen2.5's words, or the run is refused."""

import dataclasses
import json

import pytest
from families import FAMILIES, OTHERS, end_tokens, tokenizer_of
from test_turns import SCHEMA

from rl.data.args import DataArgs
from rl.data.prompts import PromptDataset
from rl.errors import UserError
from user_code.tools import KNOWN, Tools
from user_code.turns import Turns

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a cat?"}
CALLS = {"role": "assistant", "content": "Let me see.", "calls": [{"name": "calculate", "arguments": {"expression": "feline"}}]}
ANSWERS = [{"role": "tool", "name": "calculate", "content": text} for text in ("an animal", "a pet")]
NATIVE = {"qwen2_5", "qwen3", "qwen3_5_think", "qwen3_6", "nemotron_3_nano", "llama3_1", "glm4moe"}
LACK = {  # what the message says of the others
    "deepseekv3": "never shows the tools",
    "gemma3": "never shows the tools and drops the answers of tools",
    "smollm2": "never shows the tools",
    "qwen2_5_vl": "never shows the tools",
    "llama3": "never shows the tools",
    "phi3": "never shows the tools and drops the answers of tools",
    "phi3_5": "never shows the tools and drops the answers of tools",
    "cohere2": "never shows the tools and drops the answers of tools",
    "gemma": "never shows the tools and drops the answers of tools",
    "lfm2": "in none of our formats",
    "gptoss": "none of our formats",
}


def turns_of(family: str, form: str = "auto") -> Turns:
    return Turns(tokenizer_of(family), [SCHEMA], end_tokens(family), form)


def test_each_template_is_looked_at():
    assert NATIVE | LACK.keys() == FAMILIES.keys() | OTHERS.keys()


@pytest.mark.parametrize("family", sorted(NATIVE))
def test_a_template_that_does_it_all_is_left_to_do_it(family):
    turns = turns_of(family)
    assert turns.tools.is_native and turns.tools.form == (FAMILIES | OTHERS)[family][2]
    check_all_is_shown(turns)
    assert turns.tools.described([USER]) == [USER]


VALUES = {
    "text": "True",
    "number_as_text": "5",
    "count": 5,
    "ratio": -2.5,
    "flag": True,
    "off": False,
    "nothing": None,
    "maybe": None,
    "maybe_text": "x",
    "names": ["a", None, True],
    "inner": {"x": 1, "on": False, "deep": {"list": [[1], {}]}},
}
ANY_OF = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
TYPES = {"text": {"type": "string"}, "number_as_text": {"type": "string"}, "count": {"type": "integer"}, "maybe": ANY_OF}
TYPES |= {"ratio": {"type": "number"}, "flag": {"type": "boolean"}, "off": {"type": ["boolean", "null"]}}
TYPES |= {"nothing": {"type": "integer", "nullable": True}, "maybe_text": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
TYPES |= {"names": {"type": "array", "items": {}}, "inner": {"$ref": "#/$defs/Inner"}}
WIDE = {"type": "object", "properties": TYPES, "$defs": {"Inner": {"type": "object", "additionalProperties": True}}}


@pytest.mark.parametrize("family", sorted(NATIVE))
def test_what_a_template_writes_as_a_call_is_read_with_its_types(family):
    tool = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": WIDE}}
    turns = Turns(tokenizer_of(family), [tool], end_tokens(family))
    call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": VALUES}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = turns._render([USER, asked, ANSWERS[0] | {"tool_call_id": "call00001"}])
    begin, end = ('{"name"', "<|eot_id|>") if family == "llama3_1" else ("<tool_call>", "</tool_call>")
    at = text.index(begin, text.index(USER["content"]))
    whole = text[at : text.index(end, at)] + (end if begin == "<tool_call>" else "")
    said = f"</think>{whole}" if turns.begins_thinking else whole
    ids = turns.tokenizer(said, add_special_tokens=False)["input_ids"]
    assert turns.message(ids)["calls"] == [{"name": "f", "arguments": VALUES}]


@pytest.mark.parametrize("family", sorted(LACK))
def test_a_template_that_lacks_something_is_refused_with_what_to_do(family):
    with pytest.raises(UserError, match=f"{LACK[family]}.*Give --tool-format hermes"):
        turns_of(family)


@pytest.mark.parametrize("family", sorted(NATIVE | LACK.keys() - {"gptoss"}))
def test_in_the_hermes_format_every_template_shows_all(family):
    turns = turns_of(family, "hermes")
    assert turns.tools.is_native == ((FAMILIES | OTHERS)[family][2] == "hermes")
    check_all_is_shown(turns)


def check_all_is_shown(turns: Turns) -> None:
    """The tools are in the prompt, their answers between turns, and an agent's calls and answers in its conversation."""
    prompt, between = turns.tokenizer.decode(turns.prompt([USER], [])), turns.tokenizer.decode(turns.between(ANSWERS[:1]))
    more = [{"role": "assistant", "content": "It is a pet.", "calls": []}, USER]
    whole = turns.tokenizer.decode(turns.prompt([], [USER, CALLS, *ANSWERS[:1], *more]))
    for text in (prompt, whole):
        assert "What is a cat?" in text and all(word in text for word in ("calculate", "Computes.", "expression"))
    assert "an animal" in between and "an animal" in whole and "feline" in whole


def test_what_is_written_is_what_qwen2_5_s_template_writes():
    """Tools, a call, two answers of one turn and a prompt with a system message: token for token."""
    native = turns_of("qwen2_5")
    written = turns_of("qwen2_5")
    written.tools = dataclasses.replace(written.tools, is_native=False)
    written._answers_as_user = True
    written._calls = []
    messages = [SYSTEM, USER, CALLS, *ANSWERS, {"role": "assistant", "content": "A pet.", "calls": []}, USER]
    assert written.prompt([], messages) == native.prompt([], messages)
    assert written.prompt([SYSTEM, USER], []) == native.prompt([SYSTEM, USER], [])
    assert written.between(ANSWERS) == native.between(ANSWERS)


def test_gpt_oss_is_refused_without_advice_that_would_end_its_turns_early():
    for schemas, form in (([], "auto"), ([SCHEMA], "hermes")):
        with pytest.raises(UserError, match="several messages each") as raised:
            Turns(tokenizer_of("gptoss"), schemas, end_tokens("gptoss"), form)
        assert "eos_token_id" not in str(raised.value)


def test_a_prompt_that_explains_calls_is_left_as_it_is():
    own = {"role": "system", "content": "Call calculate so: <tool_call>...</tool_call>"}
    for form in ("hermes", "xml"):
        tools = Tools([SCHEMA], form, is_native=False)
        assert tools.described([own, USER]) == [own, USER]
    Tools([SCHEMA], "llama").check_text('Answer {"name": "calculate", "parameters": {"expression": ...}}. What is a cat?')
    Tools([], "auto").check_text("What is a cat?")


def test_a_description_goes_where_the_template_shows_it():
    assert turns_of("gemma", "hermes").tools.role == "user" and turns_of("gemma3", "hermes").tools.role == "system"
    first = Tools([SCHEMA], "hermes", is_native=False, role="user").described([USER])
    assert [message["role"] for message in first] == ["user"] and first[0]["content"].endswith("\n\nWhat is a cat?")
    both = Tools([SCHEMA], "hermes", is_native=False).described([SYSTEM, USER])
    assert both[0]["content"].startswith("Be brief.\n\n# Tools") and both[1] == USER


def test_a_model_that_knows_its_tools_is_shown_none():
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = tokenizer.chat_template.replace("if tools", "if false")
    with pytest.raises(UserError, match="never shows the tools"):
        Turns(tokenizer, [SCHEMA], end_tokens("qwen2_5"))
    tokenizer.chat_template = KNOWN + tokenizer.chat_template
    tools = Turns(tokenizer, [SCHEMA], end_tokens("qwen2_5")).tools
    assert tools.is_native
    tools.check_text("What is a cat?")


@pytest.mark.parametrize("form", ["auto", "hermes"])
@pytest.mark.parametrize("family", ["qwen2_5", "glm4moe", "phi3", "gemma", "smollm2"])
def test_a_row_s_prompt_is_the_one_of_its_episode(family, form, tmp_path):
    """It is measured and sampled from in the rank, and rendered again in the episode's process if reset adds to it."""
    if form == "auto" and family in LACK:
        return
    turns = turns_of(family, form)
    rows = [[USER], [{"role": "user", "content": "Call so: <tool_call>. What?"}]]
    rows += [[SYSTEM, USER]] if family not in ("gemma", "glm4moe") else []
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": row, "ground_truth": "x", "data_source": "x"}) + "\n" for row in rows))
    prompts = PromptDataset(
        [str(file)], "train", turns.tokenizer, DataArgs(max_prompt_length=9999), None, {"": (turns.tools, frozenset())}
    )
    assert [prompt.ids for prompt in prompts] == [turns.prompt(row, []) for row in rows]
    assert "Computes." in prompts[0].text
    assert ("Computes." in prompts[1].text) == turns.tools.is_native


def test_a_row_whose_prompt_shows_no_tools_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "What is a cat?", "ground_truth": "x", "data_source": "x"}) + "\n")
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"prompt": [USER], "ground_truth": "x", "data_source": "x"}) + "\n")
    tokenizer = tokenizer_of("smollm2")
    for path, tools, said in (
        (file, Tools([SCHEMA], "hermes"), "rows.jsonl row 0: the prompt is plain text"),
        (chat, Tools([SCHEMA], "xml", is_native=False), "chat.jsonl row 0: neither the chat template nor the prompt"),
    ):
        with pytest.raises(UserError, match=said):
            PromptDataset([str(path)], "train", tokenizer, DataArgs(max_prompt_length=9999), None, {"": (tools, frozenset())})


@pytest.mark.parametrize(("family", "role"), [("phi3", "tool"), ("cohere2", "tool"), ("phi3_5", "observation")])
def test_a_message_that_the_template_drops_is_refused(family, role):
    """An environment's own messages, without tools."""
    turns = Turns(tokenizer_of(family), [], end_tokens(family))
    with pytest.raises(UserError, match=f"drops messages of the role '{role}'"):
        turns.between([{"role": role, "content": "an animal"}])
    assert "an animal" in turns.tokenizer.decode(turns.between([{"role": "user", "content": "an animal"}]))
