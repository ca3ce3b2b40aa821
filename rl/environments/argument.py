"""The value of a tool call's argument that the model has written as text, by the tool's JSON schema.

Templates of tag formats write strings as they are, lists and objects as JSON, and other values as JSON or as Python does: true
or True, null or None. So a text is read as each type that the schema allows, as by the parsers of vLLM. Text that is of none of
these types is read as JSON, or stays text: the tool says what is wrong with it.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator

PYTHON = {"True": "true", "False": "false", "None": "null"}
WORD = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|\b(?:True|False|None)\b', re.DOTALL)  # strings too, to leave them as they are
ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}


def converted(text: str, schema: dict, root: dict) -> object:
    """Return the argument's value. schema: of the argument; root: the schema that its references ($ref) begin from."""
    leaves = [*_leaves(schema, root, set())]
    choices = [choice for leaf in leaves for choice in _choices(leaf)]
    if text in [choice for choice in choices if isinstance(choice, str)]:
        return text
    kinds = {kind for leaf in leaves for kind in _kinds(leaf)} | {_kind_of(choice) for choice in choices}
    for kind, read in READERS.items():
        if kind in kinds:
            with contextlib.suppress(ValueError, KeyError, OverflowError, RecursionError):
                return read(text)
    with contextlib.suppress(ValueError, RecursionError):
        return _finite(json.loads(text)) if kinds else text
    return text


def _leaves(schema: dict, root: dict, seen: set[str]) -> Iterator[dict]:
    """Yield the schemas that the value may have: without references and alternatives."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in ("anyOf", "oneOf", "allOf"):
        for part in _listed(schema.get(name)):
            yield from _leaves(part, root, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        found = root
        for name in reference.removeprefix("#/").split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        yield from _leaves(found, root, seen)


def _listed(value: object) -> list:
    """Return the value if it is a list. Schemas are data of agents, and may be of any form."""
    return value if isinstance(value, list) else []


def _choices(leaf: dict) -> list:
    return [*_listed(leaf.get("enum")), *([leaf["const"]] if "const" in leaf else [])]


def _kinds(leaf: dict) -> set[str]:
    given = leaf.get("type")
    kinds = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
    return {ALIASES.get(kind, kind) for kind in kinds} | ({"null"} if leaf.get("nullable") else set())


def _kind_of(value: object) -> str:
    return {type(None): "null", str: "string"}.get(type(value)) or ALIASES[type(value).__name__]


def _null(text: str) -> None:
    if text.strip() != "None" and text.strip().lower() != "null":
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


def _of(kind: type) -> Callable[[str], object]:
    def read(text: str) -> object:
        for json_text in (text, WORD.sub(lambda match: PYTHON.get(match[0], match[0]), text)):
            with contextlib.suppress(ValueError):
                value = _finite(json.loads(json_text))
                if isinstance(value, kind):
                    return value
        raise ValueError

    return read


def _finite(value: object) -> object:
    json.dumps(value, allow_nan=False)  # raises ValueError
    return value


def _string(text: str) -> str:
    return text


READERS = {  # in the order in which they are tried
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _of(dict),
    "array": _of(list),
    "string": _string,
}
