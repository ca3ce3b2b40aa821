"""A user's environment, tools as functions, and a TRL environment's class as it is, all as one program."""

import asyncio
import base64
import dataclasses
import datetime
import enum
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import BaseModel
from tiny_vlm import png

from rl.images import to_rgb
from user_processes.programs import BadValue, Programs, as_added, as_content, as_messages, as_reward


def divide(a: int, b: int) -> float:
    """Divides.

    Args:
        a: The dividend.
        b: The divisor.
    """
    return a / b


def offline(page: str) -> str:
    """Reads a page.

    Args:
        page: Which.
    """
    raise ConnectionError("no network")


class OfTrl:
    """As TRL's documentation has it: public methods are tools, state is the object's."""

    def reset(self, **row) -> str | None:
        self.truth, self.answer = row["ground_truth"], None
        return f"It is {row['hint']}."

    def guess(self, word: str) -> str:
        """Guesses a word.

        Args:
            word: The word.
        """
        self.answer = word
        return "noted"

    def get_reward(self) -> float:
        return float(self.answer == self.truth)

    def _hidden(self):
        raise AssertionError


def said(*calls, content=""):
    return {"role": "assistant", "content": content, "calls": list(calls)}


def read(path: str) -> str:
    """Reads a file.

    Args:
        path: Its path.
    """
    return Path(path).read_text()


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def test_tools_answer_in_order_and_say_what_is_wrong():
    programs = Programs([divide, offline], are_tools=True)
    assert [schema["function"]["name"] for schema in programs.schemas()] == ["divide", "offline"]
    program = programs.new()
    assert program.reset({}, 0) == []
    calls = [call("divide", a=7, b=2), call("divide", a=1, b=0), call("divide", a=1), call("other"), "the call has no end"]
    messages, reward, done = program.step(said(*calls))
    contents = [message["content"] for message in messages]
    assert contents[0] == "3.5" and "ZeroDivisionError" in contents[1] and "missing a required argument: 'b'" in contents[2]
    assert "there is no tool 'other'" in contents[3] and contents[4] == "error: the call has no end"
    assert {message["role"] for message in messages} == {"tool"} and reward is None and not done
    assert program.step(said(content="3.5")) == ([], None, True)
    missing = Programs([read], are_tools=True).new().step(said(call("read", path="/no/such/file")))
    assert missing[0][0]["content"].startswith("error: FileNotFoundError")  # the model gave the path
    with pytest.raises(ConnectionError):  # the machine's failure is no answer to the model
        program.step(said(call("offline", page="x")))


def test_async_calls_of_a_turn_run_at_the_same_time():
    """The first can only end after the second; answers are in the order of the calls."""
    come = asyncio.Event()

    async def waits(page: str) -> str:
        await asyncio.wait_for(come.wait(), 30)
        return f"waited for {page}"

    async def comes(page: str) -> str:
        come.set()
        raise ValueError(f"no {page}")

    program = Programs([waits, comes, divide], are_tools=True).new()
    calls = [call("waits", page="x"), call("divide", a=1, b=2), call("comes", page="y")]
    contents = [message["content"] for message in program.step(said(*calls))[0]]
    assert contents == ["waited for x", "0.5", "error: ValueError: no y"]


def test_a_trl_environment_runs_unchanged():
    programs = Programs([OfTrl], are_tools=False)
    (schema,) = programs.schemas()
    assert schema["function"]["name"] == "guess" and list(schema["function"]["parameters"]["properties"]) == ["word"]
    assert programs.scores_at_end
    program, other = programs.new(), programs.new()
    row = {"ground_truth": "cat", "hint": "small", "prompt": []}
    assert program.reset(row, 0) == {"content": "It is small."} == other.reset(row, 0)
    messages, reward, done = program.step(said(call("guess", word="cat")))
    assert messages == [{"role": "tool", "name": "guess", "content": "noted"}] and reward is None and not done
    assert program.step(said(content="done")) == ([], 1.0, True) and other.reward() == 0.0


def test_tools_are_the_bound_methods_as_in_trl():
    class WithHelpers(OfTrl):
        @staticmethod
        def describe(observation):
            return observation

        @classmethod
        def rules(cls) -> str:
            """Says the rules."""
            return cls.__name__

    programs = Programs([WithHelpers], are_tools=False)
    assert {schema["function"]["name"] for schema in programs.schemas()} == {*Programs([OfTrl], False).functions, "rules"}
    assert programs.new().step(said(call("rules")))[0][0]["content"] == "WithHelpers"


def test_an_environment_s_own_tools_are_shown_and_its_calls_handed_over():
    class Own:
        tools = (divide,)

        async def step(self, message):
            self.message = message
            return [{"role": "tool", "content": "ok"}], np.float32(0.5), False

    programs = Programs([Own], are_tools=False)
    assert [schema["function"]["name"] for schema in programs.schemas()] == ["divide"] and not programs.scores_at_end
    program = programs.new()
    _, reward, done = program.step(said(call("divide", a=1, b=2), "the call has no end"))
    assert program.instance.message["tool_calls"] == [{"type": "function", "function": call("divide", a=1, b=2)}]
    assert program.instance.message["malformed"] == ["the call has no end"] and (reward, done) == (0.5, False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, 10**400, "1", [1]])
def test_a_reward_that_is_none_of_ours_is_refused(value):
    with pytest.raises(BadValue):
        as_reward(value)
    assert as_reward(None) is None and as_reward(True) == 1.0


# ---------------------------------------------------------------------------------------- what they return, as text


@dataclasses.dataclass
class Point:
    x: object
    label: str = "a"


class Model(BaseModel):
    n: int
    inner: dict


class Color(enum.StrEnum):
    RED = "red"


ENTRIES = [{"type": "file", "name": "a.txt"}, {"type": "dir", "name": "b"}]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (2.5, "2.5"),
        ([1, "é"], '[1, "é"]'),
        ([("a", 1)], '[["a", 1]]'),
        ({1: {"b": None}}, '{"1": {"b": null}}'),
        ({3, 1}, "[1, 3]"),
        ([Point(3)], '[{"x": 3, "label": "a"}]'),
        (Model(n=1, inner={"p": 2}), '{"n": 1, "inner": {"p": 2}}'),
        (np.float32(0.5), "0.5"),
        (np.arange(4).reshape(2, 2), "[[0, 1], [2, 3]]"),
        (torch.tensor([1, 2]), "[1, 2]"),
        (Color.RED, "red"),
        (datetime.date(2026, 1, 2), '"2026-01-02"'),
        (Path("a/b"), '"a/b"'),
        (b"bytes", '"bytes"'),
        ([{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}], "two parts"),
        (ENTRIES, str(ENTRIES).replace("'", '"')),
    ],
)
def test_a_value_has_a_text(value, text):
    assert as_content(value) == {"content": text}
    assert as_messages([{"role": "user", "content": value}]) == [{"role": "user", "content": text}]


PICTURE = Image.linear_gradient("L").convert("RGB").resize((8, 6))
FILE = png(PICTURE)
CODED = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{CODED}"
TEXT = {"type": "text", "text": "a screen"}
SHOWN = [  # what shows PICTURE, and then some text
    {"content": PICTURE},
    {"content": [{"type": "image", "image": PICTURE}, TEXT]},
    {"content": [{"type": "image", "image": np.asarray(PICTURE)}, TEXT]},
    {"content": [{"type": "image", "image": FILE}, TEXT]},
    {"content": [{"type": "image", "image": {"bytes": FILE, "path": None}}, TEXT]},
    {"content": [{"type": "image_url", "image_url": {"url": URL}}, TEXT]},
    {"content": [{"type": "input_image", "image_url": URL}, TEXT]},
    {"content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CODED}}, TEXT]},
    {"content": [{"type": "image", "data": CODED, "mimeType": "image/png"}, TEXT]},
    {"content": [{"type": "image"}, TEXT], "images": [PICTURE]},
    {"content": "a screen\ue001", "images": [PICTURE]},
]


def of_message(content: object) -> list:
    """Asks for each way in which an environment may say this."""

    class Own:
        tools = ()

        async def reset(self, row, seed):
            return [{"role": "user", "content": content}]

        def step(self, message):
            return [{"role": "user", "content": content}], None, False

    class OfTrl:
        def reset(self, **row):
            return content

        def look(self):
            """Looks."""
            return content

        async def wait(self):
            """Waits."""
            return content

    own, of_trl = Programs([Own], are_tools=False).new(), Programs([OfTrl], are_tools=False).new()
    asked = [lambda: own.reset({}, 0)[0], lambda: own.step(said())[0][0], lambda: of_trl.reset({}, 0)]
    return [*asked, lambda: of_trl.step(said(call("look")))[0][0], lambda: of_trl.step(said(call("wait")))[0][0]]


@pytest.mark.parametrize("given", SHOWN, ids=range(len(SHOWN)))
def test_an_image_is_read_wherever_it_is_and_in_the_forms_of_others(given):
    """In a tool's result, in what reset returns as TRL's do and as messages, and in what step returns."""
    messages = as_messages([{"role": "user"} | given])
    if "images" not in given:
        messages += [ask() for ask in of_message(given["content"])]
    for message in messages:
        assert message["content"] == "\ue001" + ("" if given["content"] is PICTURE else "a screen")
        (file,) = message["images"]
        assert np.array_equal(to_rgb(file), np.asarray(PICTURE))


WRONG = [
    ([PICTURE, "text"], "an image within a value"),
    ({"screen": {"now": PICTURE}}, "an image within a value"),
    (Point(PICTURE), "an image within a value"),
    ([{"type": "image"}], "an image is None"),
    ({"type": "image_url", "image_url": {}}, "an image is None"),
    ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "an image is 'https"),
    ({"type": "image", "image": "/etc/passwd"}, "an image is '/etc"),
    ({"type": "image", "image": np.zeros((4, 4, 3))}, "an image is array"),
    ({"type": "image", "image": FILE[:-30]}, "an image cannot be decoded"),
    ([{"type": "video", "video": "a.mp4"}], "only text and images are possible here"),
]


@pytest.mark.parametrize(("value", "wrong"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_image_is_refused_wherever_it_is(value, wrong):
    for ask in of_message(value):
        with pytest.raises(BadValue, match=wrong):
            ask()


def test_what_reset_adds():
    message = {"role": "user", "content": "x"}
    assert as_added(None) == as_added([]) == [] and as_added("text") == {"content": "text"}
    assert as_added([message]) == as_added((message,)) == [message]
    assert as_added([{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]) == {"content": "one two"}
    assert as_added(["a", 1]) == {"content": '["a", 1]'} and as_added({"board": [0, 1]}) == {"content": '{"board": [0, 1]}'}
    for wrong in (message, [message, "text"], [{"role": "user"}]):
        with pytest.raises(BadValue, match="not a"):
            as_added(wrong)
    with pytest.raises(BadValue, match="cannot be written as JSON"):
        as_content({(1, 2): 3})
