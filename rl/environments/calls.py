"""Tool calls in the text of a model's turn, in three formats.

Each call is parsed separately: if one is malformed, the model reads the reason, and the others run. Left out: formats in which
a call is not text, such as gpt-oss's channels.
"""

import json
import re
from collections.abc import Mapping

from rl.environments.argument import converted

END_OF_THINKING = "</think>"
BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
# These find a tag that is not closed, too: otherwise each of them would be looked for up to the end of the text
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?(</parameter>|\Z)", re.DOTALL)
NAME_FIRST = re.compile(r"\s*([^\s<]+)(.*)", re.DOTALL)  # GLM-4.5
PAIR = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)(</arg_value>|\Z)", re.DOTALL)
BETWEEN = re.compile(r"[ \n;]*")
LLAMA = re.compile(r"\s*(<\|python_tag\|>|\{\s*\"name\")")


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


def _call(read, body: str, is_closed: bool, schemas: Mapping[str, dict]) -> dict | str:
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
    except ValueError as error:
        raise Malformed(f"the call is not JSON: {error}") from None
    except RecursionError:
        raise Malformed("the call is not JSON: it is nested too deeply") from None
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
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    arguments = {}
    for key, value, closed in tag.findall(match[2]):
        if not closed:
            raise Malformed(f"the parameter {key.strip()} has no end")
        of_key = properties.get(key.strip())
        arguments[key.strip()] = value if of_key is None else converted(value, of_key, schema)
    return {"name": name, "arguments": arguments}


def format_of(rendered: str) -> str | None:
    """Return the format of a call that a chat template has rendered; None if it is not one of ours."""
    if "<tool_call>" in rendered:
        return "xml" if "<function=" in rendered or "<arg_key>" in rendered else "hermes"
    return "llama" if re.search(r"\{\s*\"name\"\s*:.*\"parameters\"\s*:", rendered, re.DOTALL) else None
