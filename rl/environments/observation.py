"""The text of what an environment or a tool returns: text as it is, content parts of text joined, and any other value as JSON.

Dataclasses, pydantic models and arrays have the JSON of their content. Images are refused: the model would read their names.
"""

import dataclasses
import json
import re
from typing import Any

NOT_TEXT = {"image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio", "file"}  # parts
IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")  # how files of images begin
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")  # in the text that Python gives to objects without a text of their own


class BadValue(Exception):
    """The user's code returned a wrong value."""

    event = "bad_value"


def as_text(value: Any) -> str:
    """Return the text that the model reads. Raise BadValue for images and for objects without a text."""
    if isinstance(value, str):
        if value.startswith("data:image/"):
            raise _image("the address of an image")
        return str.__str__(value)  # also of an enumeration's
    within = value.get("content") if isinstance(value, dict) else None  # of a result of MCP
    parts = value if isinstance(value, list) else [value, *(within if isinstance(within, list) else [])]
    kinds = set(map(_kind, parts))
    if kinds & NOT_TEXT:
        raise _image(f"content of the type {sorted(kinds & NOT_TEXT)[0]!r}")
    if isinstance(value, list) and kinds == {"text"} and all(isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (ValueError, TypeError, RecursionError) as error:  # a key is a tuple, or a list holds itself
        raise BadValue(f"{value!r:.100} cannot be written as JSON ({error}): return text") from None


def _kind(part: Any) -> str | None:
    """Return the type of a content part; None if it is none."""
    kind = part.get("type") if isinstance(part, dict) else None
    is_entry = kind == "file" and "file" not in part  # of a directory
    return kind if isinstance(kind, str) and not is_entry else None


def _plain(value: Any) -> Any:
    """Return a value that JSON has no form for as one that it has."""
    if any(kind.__module__.partition(".")[0] == "PIL" for kind in type(value).__mro__):
        raise _image("an image")
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        if data.startswith(IMAGES) or data[8:12] == b"WEBP":
            raise _image("the bytes of an image")
        return data.decode(errors="replace")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):  # pydantic's
        return value.model_dump()
    if hasattr(value, "tolist"):  # an array or a scalar of numpy, or a tensor
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    text = str(value)
    if ADDRESS.search(text):
        raise BadValue(f"an object of the class {type(value).__name__} has no text: return text, or what JSON can hold")
    return text


def _image(what: str) -> BadValue:
    return BadValue(f"{what}: only text is possible here. Images of environments and tools are not supported yet")
