"""Tool calls in the text of a model's turn, in three formats.

Each call is parsed separately: if one is malformed, the model reads the reason, and the others run. Left out: formats in which
a call is not text, such as gpt-oss's channels.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping

END_OF_THINKING = "</think>"
BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
# These find a tag that is not closed, too: otherwise each of them would be looked for up to the end of the text
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?(</parameter>|\Z)", re.DOTALL)
NAME_FIRST = re.compile(r"\s*([^\s<]+)(.*)", re.DOTALL)  # GLM-4.5
PAIR = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)(</arg_value>|\Z)", re.DOTALL)
BETWEEN = re.compile(r"[ \n;]*")
LLAMA = re.compile(r"\s*(<\|python_tag\|>|\{\s*\"name\")")
PYTHON = {"True": "true", "False": "false", "None": "null"}
WORD = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|\b(?:True|False|None)\b', re.DOTALL)  # strings too, to leave them as they are
ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}


class Malformed(ValueError):
    """A call with an error. The message is for the model."""


def parse(text: str, form: str, schemas: Mapping[str, dict], is_thinking: bool = False) -> tuple[str, list[dict | str]]:
    """Return a turn's text without its calls, and its calls in order: {"name", "arguments"}, or the error of a malformed one.
    form: "hermes", "llama" or "xml". schemas: of the tools' parameters, by tool. is_thinking: whether the prompt opens a
    thought, in which nothing is a call."""
    thought, closed, said = text.rpartition(END_OF_THINKING)
    if not closed and (is_thinking or "<think>" in text):
        return text, []
    if form == "llama":
        content, found = _llama(said)
    else:
        content = BLOCK.sub("", said)
        found = [(match[1], bool(match[2])) for match in BLOCK.finditer(said)]
    read = _from_tags if form == "xml" else _from_json
    return thought + closed + content, [_call(read, body, is_closed, schemas) for body, is_closed in found]


def _call(read: Callable, body: str, is_closed: bool, schemas: Mapping[str, dict]) -> dict | str:
    try:
        if not is_closed:
            raise Malformed("the call has no end")
        return read(body, schemas)
    except Malformed as error:
        return str(error)


def _llama(text: str) -> tuple[str, list[tuple[str, bool]]]:
    """Return the text and the calls in it. Llama's calls are the whole text: JSON objects with ; or blanks between them."""
    if not LLAMA.match(text):
        return text, []
    text = text.replace("<|python_tag|>", "").strip()
    found = []
    at = 0
    while at < len(text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            end = len(text)
        found.append((text[at:end], True))
        at = BETWEEN.match(text, end).end()
    return "", found or [("", True)]


def _from_json(body: str, schemas: Mapping[str, dict]) -> dict:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the call is not JSON: {error}") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise Malformed('the call is not an object with a "name"')
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise Malformed('the call\'s "arguments" are not an object')
    return {"name": call["name"], "arguments": arguments}


def _from_tags(body: str, schemas: Mapping[str, dict]) -> dict:
    tag = PARAMETER
    match = FUNCTION.fullmatch(body)
    if not match:
        tag = PAIR
        match = NAME_FIRST.fullmatch(body)
    if not match or (tag is PAIR and match[2].strip() and "<arg_key>" not in match[2]):
        raise Malformed("the call is not <function=name> with <parameter=name> in it and </function> at its end")
    name = match[1].strip()
    if rest := tag.sub("", match[2]).strip():
        raise Malformed(f"the call has text between its parameters: {rest[:40]}")
    schema = schemas.get(name, {})
    arguments = {}
    for key, value, closed in tag.findall(match[2]):
        if not closed:
            raise Malformed(f"the parameter {key.strip()} has no end")
        arguments[key.strip()] = value
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # an agent's schema may be of any form
            arguments[key.strip()] = converted(value, schema["properties"][key.strip()], schema)
    return {"name": name, "arguments": arguments}


def format_of(rendered: str) -> str | None:
    """Return the format of a call that a chat template has rendered; None if it is not one of ours."""
    if "<tool_call>" in rendered:
        return "xml" if "<function=" in rendered or "<arg_key>" in rendered else "hermes"
    return "llama" if re.search(r"\{\s*\"name\"\s*:.*\"parameters\"\s*:", rendered, re.DOTALL) else None


# -------------------------------------------------------------------------------------------- the arguments in tags


def converted(text: str, schema: dict, root: dict) -> object:
    """Return the value of an argument that the model has written as text: it is read as each type that its JSON schema allows,
    in the order of READERS, as by the parsers of vLLM. Templates of tag formats write strings as they are, lists and objects as
    JSON, and other values as JSON or as Python does: true or True. Text that is of none of these types is read as JSON, or
    stays text: the tool says what is wrong with it. root: the schema that references ($ref) begin from."""
    leaves = [*_leaves(schema, root, set())]
    choices = [choice for leaf in leaves for choice in [*leaf.get("enum", ()), *([leaf["const"]] if "const" in leaf else [])]]
    if text in [choice for choice in choices if isinstance(choice, str)]:
        return text
    kinds = {kind for leaf in leaves for kind in _kinds(leaf)} | {_kind_of(choice) for choice in choices}
    readers = [READERS[kind] for kind in READERS if kind in kinds]
    for read in [*readers, *([_json] if kinds else [])]:
        with contextlib.suppress(ValueError, KeyError, OverflowError, RecursionError):
            return read(text)
    return text


def _leaves(schema: dict, root: dict, seen: set[str]) -> Iterator[dict]:
    """Yield the schemas that the value may have: without references and alternatives."""
    yield schema
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(name, ()):
            yield from _leaves(part, root, seen)
    reference = schema.get("$ref", "")
    if reference and reference not in seen:
        seen.add(reference)
        found = root
        for name in reference.removeprefix("#/").split("/"):
            found = found.get(name, {})
        yield from _leaves(found, root, seen)


def _kinds(leaf: dict) -> set[str]:
    given = leaf.get("type", [])
    kinds = {ALIASES.get(kind, kind) for kind in (given if isinstance(given, list) else [given])}
    return kinds | ({"null"} if leaf.get("nullable") else set())


def _kind_of(value: object) -> str:
    return {type(None): "null", str: "string"}.get(type(value)) or ALIASES[type(value).__name__]


def _null(text: str) -> None:
    if text.strip().lower() not in ("null", "none"):
        raise ValueError


def _integer(text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    value = float(text)  # 5.0 is an integer to JSON schemas
    if value != int(value):
        raise ValueError
    return int(value)


def _number(text: str) -> int | float:
    with contextlib.suppress(ValueError):
        return int(text)
    return _finite(float(text))


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _json(text: str) -> object:
    return _finite(json.loads(text))


def _of(kind: type) -> Callable[[str], object]:
    def read(text: str) -> object:
        for json_text in (text, WORD.sub(lambda match: PYTHON.get(match[0], match[0]), text)):
            with contextlib.suppress(ValueError):
                if isinstance(value := _json(json_text), kind):
                    return value
        raise ValueError

    return read


def _finite(value: object) -> object:
    json.dumps(value, allow_nan=False)  # raises ValueError
    return value


READERS = {  # in the order in which they are tried
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _of(dict),
    "array": _of(list),
    "string": str,
}
