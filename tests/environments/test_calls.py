"""Calls in a turn's text, in three formats: each malformed one has a reason, and the good ones next to it are read.

Arguments in tags have the types of the tool's schema: a table, which vLLM's own parsers of these families are compared with.
"""

import json
import time

import pytest
from families import FAMILIES, OTHERS, tokenizer_of

from user_processes.calls import parse

INTEGER, NUMBER, BOOLEAN, STRING, NULL = ({"type": kind} for kind in ("integer", "number", "boolean", "string", "null"))
ARRAY, OBJECT = {"type": "array", "items": {}}, {"type": "object"}
OPTIONAL = {"anyOf": [INTEGER, NULL], "default": None}  # pydantic writes `int | None` so
POINT = {"type": "object", "properties": {"x": INTEGER, "on": {"type": "boolean"}}}
SAME = [  # as vLLM's parsers: schema, text, value
    (INTEGER, "5", 5),
    (INTEGER, "-5", -5),
    (INTEGER, "5.0", 5),
    (INTEGER, "1e3", 1000),
    (INTEGER, "seven", "seven"),
    (INTEGER, "5.5", 5.5),
    (INTEGER, "true", True),
    (INTEGER, "True", "True"),
    (INTEGER, "[1]", [1]),
    (INTEGER, "9" * 5000, "9" * 5000),
    (NUMBER, "2.5", 2.5),
    (NUMBER, "5", 5),
    (NUMBER, "NaN", "NaN"),
    (NUMBER, "1e999", "1e999"),
    (BOOLEAN, "True", True),
    (BOOLEAN, "False", False),
    (BOOLEAN, "true", True),
    (BOOLEAN, "FALSE", False),
    (BOOLEAN, "1", True),
    (BOOLEAN, "yes", "yes"),
    (STRING, "True", "True"),
    (STRING, "None", "None"),
    (STRING, "null", "null"),
    (STRING, "5", "5"),
    (STRING, '{"a": 1}', '{"a": 1}'),
    (STRING, "  x\n\ny ", "  x\n\ny "),
    (STRING, "", ""),
    ({}, "5", "5"),
    ({"description": "any"}, "True", "True"),
    (OPTIONAL, "5", 5),
    (OPTIONAL, "null", None),
    ({"anyOf": [STRING, NULL]}, "null", None),
    ({"anyOf": [STRING, NULL]}, "5", "5"),
    ({"anyOf": [STRING, INTEGER]}, "5", 5),
    ({"anyOf": [STRING, INTEGER]}, "five", "five"),
    ({"oneOf": [BOOLEAN, INTEGER]}, "true", True),
    ({"oneOf": [BOOLEAN, INTEGER]}, "7", 7),
    ({"anyOf": [{"anyOf": [NUMBER, NULL]}, ARRAY]}, "[1, 2]", [1, 2]),
    ({"allOf": [INTEGER]}, "5", 5),
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": ["integer", "null"]}, "5", 5),
    ({"type": ["string", "number"]}, "x", "x"),
    ({"type": "int"}, "5", 5),
    ({"type": "str"}, "5", "5"),
    (ARRAY, '["a", 1, null]', ["a", 1, None]),
    (ARRAY, "a, b", "a, b"),
    (ARRAY, "[1, 1e999]", "[1, 1e999]"),
    (OBJECT, '{"a": {"b": [true]}}', {"a": {"b": [True]}}),
    (OBJECT, "{'a': 1}", "{'a': 1}"),
    (POINT, '{"x": 3, "on": false}', {"x": 3, "on": False}),
    ({"enum": ["a", "b"]}, "a", "a"),
    ({"type": "string", "enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": [True, None]}, "null", None),
]
OURS = [  # where vLLM leaves text, or takes an alternative that the value is not of
    (OPTIONAL, "None", None),
    ({"anyOf": [STRING, NULL]}, "None", None),
    ({"type": "integer", "nullable": True}, "None", None),  # transformers writes `int | None` so
    (NULL, "None", None),
    (ARRAY, "[True, None]", [True, None]),
    (OBJECT, '{"a": True, "None": "False"}', {"a": True, "None": "False"}),
    ({"$ref": "#/$defs/Point"}, '{"x": 3}', {"x": 3}),
    ({"anyOf": [{"$ref": "#/$defs/Point"}, NULL]}, "None", None),
    ({"$ref": "#/$defs/Count"}, "5", 5),
    ({"$ref": "#/$defs/Tree"}, '{"left": {"left": null}}', {"left": {"left": None}}),
    ({"$ref": "#/$defs/Missing"}, "5", "5"),
    ({"enum": ["1", 2]}, "1", "1"),
    ({"const": 3}, "3", 3),
]
DEFS = {"Point": POINT, "Count": {"allOf": [INTEGER]}, "Tree": {"type": "object", "anyOf": [{"$ref": "#/$defs/Tree"}, NULL]}}
QWEN = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"


def parameters(schema: dict) -> dict:
    return {"type": "object", "properties": {"a": schema}, "$defs": DEFS}


@pytest.mark.parametrize("form", [QWEN, GLM])
def test_an_argument_is_of_its_type(form):
    for schema, text, value in SAME + OURS:
        _, (call,) = parse(form.format(text), "xml", {"f": parameters(schema)})
        assert json.dumps(call) == json.dumps({"name": "f", "arguments": {"a": value}}), (schema, text)


def test_an_argument_without_a_schema_is_text():
    assert parse(QWEN.format("5"), "xml", {})[1] == [{"name": "f", "arguments": {"a": "5"}}]
    assert parse(GLM.format("5"), "xml", {"f": {"properties": {}}})[1] == [{"name": "f", "arguments": {"a": "5"}}]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '"\\"' * 50_000, "True" * 30_000, "9" * 100_000])
def test_a_text_that_nothing_can_read_stays_text(text):
    for schema in (ARRAY, OBJECT, INTEGER, OPTIONAL, NUMBER):
        _, (call,) = parse(QWEN.format(text), "xml", {"f": parameters(schema)})
        assert call["arguments"] == {"a": text}


def test_a_schema_of_another_form_raises_nothing():
    """An agent brings the schemas of its tools."""
    for value in (5, "x", {"a": 1}, [{"a": 1}], [5, None], None):
        for schema in [{"properties": {"a": {"anyOf": value}}}, {"properties": {"a": value}}, {"properties": value}]:
            _, (call,) = parse(QWEN.format("5"), "xml", {"f": schema})
            assert call["arguments"]["a"] in (5, "5")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_think", "glm4moe", "qwen3", "llama3_1"])
def test_vllm_s_parsers_read_the_same(family):
    """The last two formats are JSON: there the model itself writes the types."""
    parsers = pytest.importorskip("vllm.tool_parsers")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

    name = {"qwen3_5_think": "qwen3_coder", "glm4moe": "glm47", "qwen3": "hermes", "llama3_1": "llama3_json"}[family]
    kind, tokenizer = parsers.ToolParserManager.get_tool_parser(name), tokenizer_of(family)
    form = (FAMILIES | OTHERS)[family][2]
    for schema, text, value in SAME if form == "xml" else SAME + OURS:
        call = {"name": "f", "arguments": {"a": value}}
        said = QWEN.format(text) if family == "qwen3_5_think" else GLM.format(text) if form == "xml" else json.dumps(call)
        said = f"<tool_call>\n{said}\n</tool_call>" if form == "hermes" else said
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters(schema if form == "xml" else STRING)}}
        request = ChatCompletionRequest(messages=[], model="policy", tools=[tool])
        parser = kind(tokenizer, [ChatCompletionToolsParam.model_validate(tool)])
        theirs = [json.loads(of.function.arguments) for of in parser.extract_tool_calls(said, request).tool_calls]
        assert theirs == [{"a": value}], (schema, text)
        assert parse(said, form, {"f": tool["function"]["parameters"]})[1] == [call]


PIECES = ["<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "<parameter=a>", "<parameter="]
PIECES += ["</parameter>", "<arg_key>", "<arg_key>a</arg_key>", "<arg_key>a</arg_key><arg_value>", "<arg_value>"]
PIECES += ["</arg_value>", "<", "\n", "a ", '{"name": "f"}', '{"name": "f", "parameters": {}};', '{"name"', "[", '"', "\\"]
PIECES += ['\\"', "True", "<think>", "</think>"]
STARTS = ["", "<tool_call>", "<tool_call><function=f>", "<tool_call>f", "<tool_call><function=f><parameter=a>"]
STARTS += ["<tool_call>f<arg_key>a</arg_key><arg_value>", '{"name": "f"}', "<|python_tag|>"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hermes", "xml", "llama"])
def test_the_time_of_a_parser_is_linear(form):
    """CPU time for a text eight times as long: eight times as much if it is linear, 64 times if it is quadratic."""
    schemas = {"f": parameters(ARRAY)}

    def seconds(text: str) -> float:
        begun = time.process_time()
        parse(text, form, schemas)
        return time.process_time() - begun

    def is_linear(short: str, long: str) -> bool:
        return seconds(long) < 24 * max(seconds(short), 1e-3)

    for start in STARTS:
        for end in ("", "</function></tool_call>", "</tool_call>"):
            for piece in PIECES:
                texts = [start + piece * (chars // len(piece)) + end for chars in (4_000, 32_000)]
                assert any(is_linear(*texts) for _ in range(3)), (start, piece, end)


# ------------------------------------------------------------------------------------------------------ whole calls

SCHEMAS = {"f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}
GOOD = {"name": "f", "arguments": {"n": 7, "s": "x"}}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"n": 7, "s": "x"}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"n": 7, "s": "x"}}'


def test_calls_stand_in_order_and_text_is_kept():
    two = HERMES.replace('"x"', '"y"')
    content, calls = parse(f"First {HERMES} then {two} done", "hermes", SCHEMAS)
    assert content == "First  then  done" and [call["arguments"]["s"] for call in calls] == ["x", "y"]
    assert parse(f"<|python_tag|>{LLAMA}; {LLAMA}", "llama", SCHEMAS) == ("", [GOOD, GOOD])


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
