"""What environments and tools return, as text for the model: every kind of value, and images, which are refused."""

import base64
import dataclasses
import datetime
import decimal
import enum
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import BaseModel

from rl.environments.observation import BadValue, as_text
from rl.environments.programs import Programs, as_added, as_messages


@dataclasses.dataclass
class Point:
    x: int
    label: str = "a"


class Model(BaseModel):
    n: int
    inner: dict


class Color(enum.StrEnum):
    RED = "red"


class Words:
    def __str__(self):
        return "words of its own"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (2.5, "2.5"),
        ([1, "é"], '[1, "é"]'),
        ((1, 2), "[1, 2]"),
        ([("a", 1)], '[["a", 1]]'),
        ({"a": {"b": None}}, '{"a": {"b": null}}'),
        ({1: 2}, '{"1": 2}'),
        ({3, 1}, "[1, 3]"),
        (Point(3), '{"x": 3, "label": "a"}'),
        ([Point(3)], '[{"x": 3, "label": "a"}]'),
        (Model(n=1, inner={"p": 2}), '{"n": 1, "inner": {"p": 2}}'),
        (np.float32(0.5), "0.5"),
        (np.int64(7), "7"),
        (np.arange(4).reshape(2, 2), "[[0, 1], [2, 3]]"),
        (torch.tensor([1, 2]), "[1, 2]"),
        (Color.RED, "red"),
        (datetime.date(2026, 1, 2), '"2026-01-02"'),
        (decimal.Decimal("1.5"), '"1.5"'),
        (Path("a/b"), '"a/b"'),
        (b"bytes", '"bytes"'),
        (Words(), '"words of its own"'),
        ([{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}], "two parts"),
        ([{"type": "button", "text": "x"}], '[{"type": "button", "text": "x"}]'),
        ({"type": "text", "text": "x"}, '{"type": "text", "text": "x"}'),
    ],
)
def test_a_value_has_a_text(value, text):
    assert as_text(value) == text
    assert as_messages([{"role": "user", "content": value}]) == [{"role": "user", "content": text}]


def file_of(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, kind)
    return file.getvalue()


PICTURE = Image.new("RGB", (2, 2))
DATA = "data:image/png;base64," + base64.b64encode(file_of("PNG")).decode()
IMAGES = [
    PICTURE,
    [PICTURE, "text"],
    {"screen": {"now": PICTURE}},
    Point(PICTURE),
    *map(file_of, ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"]),
    {"screen": file_of("PNG")},
    bytearray(file_of("PNG")),
    [{"type": "image", "image": PICTURE}, {"type": "text", "text": "a screen"}],
    [{"type": "image"}],
    [{"type": "image_url", "image_url": {"url": DATA}}],
    {"type": "image_url", "image_url": {"url": DATA}},
    [{"type": "input_image", "image_url": DATA}],
    [{"type": "image", "data": DATA, "mimeType": "image/png"}],
    [{"type": "input_audio", "input_audio": {}}],
    [{"type": "file", "file": {"file_data": DATA}}],
    {"content": [{"type": "text", "text": "a screen"}, {"type": "image", "data": DATA, "mimeType": "image/png"}]},
    DATA,
]


@pytest.mark.parametrize("value", IMAGES, ids=range(len(IMAGES)))
def test_an_image_is_refused_wherever_it_is(value):
    """In a tool's result, in what reset returns as TRL's do and as messages, and in what step returns."""

    class Own:
        tools = ()

        def reset(self, row, seed):
            return [{"role": "user", "content": value}]

        def step(self, message):
            return [{"role": "user", "content": value}], None, False

    class OfTrl:
        def reset(self, **row):
            return value

        def look(self):
            """Looks."""
            return value

        async def wait(self):
            """Waits."""
            return value

    own, of_trl = Programs([Own], are_tools=False).new(), Programs([OfTrl], are_tools=False).new()
    calls = [{"role": "assistant", "content": "", "calls": [{"name": name, "arguments": {}}]} for name in ("look", "wait")]
    asked = [lambda: own.reset({}, 0), lambda: own.step({"role": "assistant", "content": "", "calls": []})]
    asked += [lambda: of_trl.reset({}, 0), lambda: of_trl.step(calls[0]), lambda: of_trl.step(calls[1])]
    for ask in asked:
        with pytest.raises(BadValue, match="only text is possible here"):
            ask()


def test_a_directory_s_entries_are_no_content():
    entries = [{"type": "file", "name": "a.txt"}, {"type": "dir", "name": "b"}]
    assert as_text(entries) == json.dumps(entries)


def test_an_object_without_a_text_is_refused():
    for value in (object(), io.BytesIO(), (i for i in range(3)), {"a": object()}):
        with pytest.raises(BadValue, match="no text"):
            as_text(value)
    loop: list = []
    loop.append(loop)
    for value in (loop, {(1, 2): 3}):
        with pytest.raises(BadValue, match="cannot be written as JSON"):
            as_text(value)


def test_what_reset_adds():
    message = {"role": "user", "content": "x"}
    assert as_added(None) == as_added([]) == [] and as_added("text") == "text"
    assert as_added([message]) == as_added((message,)) == [message]
    assert as_added([{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]) == "one two"
    assert as_added(["a", 1]) == '["a", 1]'
    assert as_added({"board": [0, 1]}) == '{"board": [0, 1]}' and as_added(np.arange(2)) == "[0, 1]"
    for wrong in (message, [message, "text"], [{"role": "user"}]):
        with pytest.raises(BadValue, match="not a"):
            as_added(wrong)
    with pytest.raises(BadValue, match="only text"):
        as_added([message | {"images": [PICTURE]}])
