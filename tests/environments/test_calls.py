"""Calls in a turn's text, in three formats; each malformed one has a reason, and the good ones next to it are read."""

import pytest

from rl.environments.calls import parse

SCHEMAS = {"f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}
GOOD = {"name": "f", "arguments": {"n": 7, "s": "x"}}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"n": 7, "s": "x"}}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>"
GLM = (
    "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
)
LLAMA = '{"name": "f", "parameters": {"n": 7, "s": "x"}}'


@pytest.mark.parametrize(
    ("form", "text"),
    [("hermes", HERMES), ("xml", XML), ("xml", GLM), ("llama", LLAMA), ("llama", f"<|python_tag|>{LLAMA}")],
)
def test_a_call_is_read(form, text):
    assert parse(text, form, SCHEMAS) == ("", [GOOD])


def test_calls_stand_in_order_and_text_is_kept():
    two = HERMES.replace('"x"', '"y"')
    content, calls = parse(f"First {HERMES} then {two} done", "hermes", SCHEMAS)
    assert content == "First  then  done" and [call["arguments"]["s"] for call in calls] == ["x", "y"]
    assert parse(f"{LLAMA}; {LLAMA}", "llama", SCHEMAS) == ("", [GOOD, GOOD])


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"name": "f"', "has no end"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ("hermes", '<tool_call>[{"name": "f"}]</tool_call>', '"name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not an object"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "not JSON"),
        ("llama", '{"name": "f", "parameters": ', "not JSON"),
        ("llama", '<|python_tag|>search.call(query="x")', "not JSON"),
        ("xml", "<tool_call><function=f><parameter=n>7</function></tool_call>", "has no end"),
        ("xml", "<tool_call>call f with 7</tool_call>", "<function=name>"),
    ],
)
def test_a_malformed_call_has_a_reason(form, text, reason):
    """Complaint 12: the model reads what was wrong, and no other call is lost by it."""
    _, (said,) = parse(text, form, SCHEMAS)
    assert isinstance(said, str) and reason in said
    if form == "hermes" and "has no end" not in reason:
        _, (bad, good) = parse(f"{text}{HERMES}", form, SCHEMAS)
        assert isinstance(bad, str) and good == GOOD


def test_text_is_no_call():
    assert parse("The answer is 7.", "hermes", SCHEMAS) == ("The answer is 7.", [])
    assert parse('{"answer": 7}', "llama", SCHEMAS) == ('{"answer": 7}', [])


def test_a_call_in_a_thought_is_none():
    assert parse(f"<think>{HERMES}", "hermes", SCHEMAS)[1] == []
    assert parse(HERMES, "hermes", SCHEMAS, is_thinking=True)[1] == []
    assert parse(f"{HERMES}</think>{HERMES}", "hermes", SCHEMAS, is_thinking=True)[1] == [GOOD]


def test_a_number_that_is_none_stays_text():
    assert parse(XML.replace("7", "seven"), "xml", SCHEMAS)[1][0]["arguments"]["n"] == "seven"
