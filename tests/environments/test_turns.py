"""The tokens between turns: the chat template's own, appended, and an environment's words are data in them. Templates show the
tools, calls and answers, or they are written in Qwen2.5's words, or the run is refused."""

import dataclasses

import pytest
from families import FAMILIES, OTHERS, WIDE, end_tokens, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import verl_row, write

from rl.data.args import DataArgs
from rl.data.prompts import PromptDataset
from rl.errors import UserError
from user_processes.programs import EpisodeProgram
from user_processes.tools import KNOWN, Tools
from user_processes.turns import Turns

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


# ---------------------------------------------------------------------------------------------------------------- tools


SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a cat?"}
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


def turns_in(family: str, form: str = "auto") -> Turns:
    return Turns(tokenizer_of(family), [SCHEMA], end_tokens(family), form)


def test_each_template_is_looked_at():
    assert NATIVE | LACK.keys() == FAMILIES.keys() | OTHERS.keys()


@pytest.mark.parametrize("family", sorted(NATIVE))
def test_a_template_that_does_it_all_is_left_to_do_it(family):
    turns = turns_in(family)
    assert turns.tools.is_native and turns.tools.form == (FAMILIES | OTHERS)[family][2]
    check_all_is_shown(turns)
    assert turns.tools.described([ASKED]) == [ASKED]


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
    text = turns._render([ASKED, asked, ANSWERS[0] | {"tool_call_id": "call00001"}])
    begin, end = ('{"name"', "<|eot_id|>") if family == "llama3_1" else ("<tool_call>", "</tool_call>")
    at = text.index(begin, text.index(ASKED["content"]))
    whole = text[at : text.index(end, at)] + (end if begin == "<tool_call>" else "")
    said = f"</think>{whole}" if turns.begins_thinking else whole
    ids = turns.tokenizer(said, add_special_tokens=False)["input_ids"]
    assert turns.message(ids)["calls"] == [{"name": "f", "arguments": VALUES}]


@pytest.mark.parametrize("family", sorted(LACK))
def test_a_template_that_lacks_something_is_refused_with_what_to_do(family):
    with pytest.raises(UserError, match=f"{LACK[family]}.*Give --tool-format hermes"):
        turns_in(family)


@pytest.mark.parametrize("family", sorted(NATIVE | LACK.keys() - {"gptoss"}))
def test_in_the_hermes_format_every_template_shows_all(family):
    turns = turns_in(family, "hermes")
    assert turns.tools.is_native == ((FAMILIES | OTHERS)[family][2] == "hermes")
    check_all_is_shown(turns)


def check_all_is_shown(turns: Turns) -> None:
    """The tools are in the prompt, their answers between turns, and an agent's calls and answers in its conversation."""
    prompt, between = turns.tokenizer.decode(turns.prompt([ASKED], [])), turns.tokenizer.decode(turns.between(ANSWERS[:1]))
    more = [{"role": "assistant", "content": "It is a pet.", "calls": []}, ASKED]
    whole = turns.tokenizer.decode(turns.prompt([], [ASKED, CALLS, *ANSWERS[:1], *more]))
    for text in (prompt, whole):
        assert "What is a cat?" in text and all(word in text for word in ("calculate", "Computes.", "expression"))
    assert "an animal" in between and "an animal" in whole and "feline" in whole


def test_what_is_written_is_what_qwen2_5_s_template_writes():
    """Tools, a call, two answers of one turn and a prompt with a system message: token for token."""
    native = turns_in("qwen2_5")
    written = turns_in("qwen2_5")
    written.tools = dataclasses.replace(written.tools, is_native=False)
    written._answers_as_user = True
    written._calls = []
    messages = [SYSTEM, ASKED, CALLS, *ANSWERS, {"role": "assistant", "content": "A pet.", "calls": []}, ASKED]
    assert written.prompt([], messages) == native.prompt([], messages)
    assert written.prompt([SYSTEM, ASKED], []) == native.prompt([SYSTEM, ASKED], [])
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
        assert tools.described([own, ASKED]) == [own, ASKED]
    Tools([SCHEMA], "llama").check_text('Answer {"name": "calculate", "parameters": {"expression": ...}}. What is a cat?')
    Tools([], "auto").check_text("What is a cat?")


def test_a_description_goes_where_the_template_shows_it():
    assert turns_in("gemma", "hermes").tools.role == "user" and turns_in("gemma3", "hermes").tools.role == "system"
    first = Tools([SCHEMA], "hermes", is_native=False, role="user").described([ASKED])
    assert [message["role"] for message in first] == ["user"] and first[0]["content"].endswith("\n\nWhat is a cat?")
    both = Tools([SCHEMA], "hermes", is_native=False).described([SYSTEM, ASKED])
    assert both[0]["content"].startswith("Be brief.\n\n# Tools") and both[1] == ASKED


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
    turns = turns_in(family, form)
    rows = [[ASKED], [{"role": "user", "content": "Call so: <tool_call>. What?"}]]
    rows += [[SYSTEM, ASKED]] if family not in ("gemma", "glm4moe") else []
    file = write(tmp_path / "rows.jsonl", *(verl_row(row) for row in rows))
    prompts = PromptDataset(
        [str(file)], "train", turns.tokenizer, DataArgs(max_prompt_length=9999), None, {"": (turns.tools, frozenset())}
    )
    assert [prompt.ids for prompt in prompts] == [turns.prompt(row, []) for row in rows]
    assert "Computes." in prompts[0].text
    assert ("Computes." in prompts[1].text) == turns.tools.is_native


def test_a_row_whose_prompt_shows_no_tools_is_named(tmp_path):
    file, chat = write(tmp_path / "rows.jsonl", verl_row("What is a cat?")), write(tmp_path / "chat.jsonl", verl_row([ASKED]))
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
