"""Images in what environments and agents say. In a message of ours, `content` is text with a MARK for each image, and `images`
are their files. The known forms of a part are

    {"type": "image", "image": a PIL image, an array of uint8, or a file's bytes}    TRL, transformers
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}         OpenAI; also input_image, without url
    {"type": "image", "source": {"type": "base64", "data": ...}}                     Anthropic
    {"type": "image", "data": ..., "mimeType": ...}                                  MCP
    {"type": "image"}, next to the message's own list of images                      datasets, verl

Left out: addresses and paths, which name what nobody has looked at; videos and sound.
"""

import base64
import io
from collections.abc import Iterator, Mapping
from typing import Any

from rl.errors import ImageError
from user_processes.child import BadValue

MARK = "\ue001"  # a private-use character, which is removed from text
TEXT_ALONE = "an image, and --model takes text alone: take a model of images and text (docs/images.md)"
FORMS = "give a PIL image, an array of uint8, a file's bytes, or its base64 as in data:image/png;base64,..."


def joined(parts: list[Any], given: Any = ()) -> dict:
    """Return the content, and the images if there are any, of a message of parts: text, and images of the kinds above. given:
    the message's own list of images, of which those that no part stands for come first. Raise BadValue."""
    own = iter(given)
    text = ""
    files: list[bytes] = []
    for part in parts:
        if is_image(part):
            text += MARK
            files.append(_file(_value(part, own)))
        else:
            text += str.__str__(part["text"]).replace(MARK, "")
    left = [_file(value) for value in own]
    found = {"content": MARK * len(left) + text}
    return found | {"images": left + files} if left or files else found


def is_image(value: Any) -> bool:
    """Return whether a value or a part of a message is an image."""
    if isinstance(value, Mapping):
        return value.get("type") in ("image", "image_url", "input_image")
    return any(kind.__module__.partition(".")[0] == "PIL" for kind in type(value).__mro__)


def parts_of(message: dict) -> dict:
    """Return the message as chat templates and TRL take it: content with images as parts."""
    if not message.get("images"):
        return message
    files = iter(message["images"])
    first, *rest = message["content"].split(MARK)
    parts = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image", "image": next(files)}, {"type": "text", "text": text}]
    kept = {name: value for name, value in message.items() if name != "images"}
    return kept | {"content": [part for part in parts if part.get("text") != ""]}


def behind(messages: list[dict], added: list[dict] | dict) -> list[dict]:
    """Return a prompt with what is added to it: messages, or content for the last one."""
    if not isinstance(added, dict):
        return [*messages, *added]
    *before, last = messages or [{"role": "user", "content": ""}]
    return [*before, last | added | {"content": last["content"] + added["content"]}]


def sent(messages: list[dict]) -> dict:
    """Return the messages' images in the form that goes to the rank."""
    files = [base64.b64encode(file).decode() for message in messages for file in message.get("images", ())]
    return {"images": files} if files else {}


def files_of(answer: dict) -> list[bytes]:
    """Return the images' files in an answer that came in that form."""
    return [base64.b64decode(file) for file in answer.get("images", ())]


def _value(part: Any, own: Iterator) -> Any:
    if not isinstance(part, Mapping):
        return part
    named = (part.get(name) for name in ("image_url", "image", "source", "data"))
    value = next((value for value in named if value is not None), None)
    value = next(own, None) if value is None else value
    if isinstance(value, Mapping):
        value = value.get("url") or value.get("data") or value.get("bytes")
    return value


def _file(value: Any) -> bytes:
    """Return an image as a file of a format that every rank reads. Raise BadValue."""
    import numpy as np  # late: few environments have images
    from PIL import Image

    from rl.images import to_rgb

    try:
        if isinstance(value, str):
            head, _, data = value.rpartition(",")
            value = base64.b64decode(data if head.startswith("data:") else value, validate=True)
        if not isinstance(value, bytes):
            picture = value if isinstance(value, Image.Image) else Image.fromarray(np.asarray(value))
            picture.save(buffer := io.BytesIO(), "PNG", compress_level=1)
            value = buffer.getvalue()
        to_rgb(value)
        return value
    except ImageError as error:
        raise BadValue(f"an image {error}: {FORMS}") from None
    except (TypeError, ValueError, OSError):
        raise BadValue(f"an image is {value!r:.60}: {FORMS}") from None
