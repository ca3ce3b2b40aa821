"""The one form of a request and of an answer. Each protocol translates its own into it: it has `call`, of a request's body;
`body`, of whole answers; `events`, of pieces of answers; and `failure`.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from user_processes import pictures
from user_processes.child import BadValue

MODEL = "policy"


class Refused(Exception):
    """A request that cannot be answered, with its HTTP status."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Call:
    """A request for the model's next turn."""

    messages: list[dict]  # {role, content, images} (pictures.py); an assistant's "calls" [{name, arguments}]; a tool's name
    tools: list[dict]  # in the form for chat templates
    most: int | None = None  # limit of the tokens to sample
    streams: bool = False
    n: int = 1  # answers
    schema: str = ""  # JSON schema that the answer is to keep to
    stop: tuple[str, ...] = ()  # strings that end the answer, and are not in its text
    counts: bool = False  # whether a stream of chat completions ends with the numbers of tokens


@dataclass(frozen=True)
class Answer:
    """The model's turn."""

    number: int  # of the answer in its episode
    index: int  # among the answers to its call
    before: int  # tokens of the conversation before the turn
    sampled: int = 0  # tokens
    reasoning: str = ""
    content: str = ""
    calls: list[dict] = field(default_factory=list)  # {name, arguments}
    is_cut: bool = False  # whether the call's limit cut it
    stopped_by: str = ""  # the call's stop string that ended it
    is_whole: bool = False  # otherwise only the numbers above are known

    @property
    def written_calls(self) -> list[tuple[str, str, str]]:
        """The id, name and arguments of each call."""
        numbered = enumerate(self.calls)
        return [(f"call_{self.number}_{i}", call["name"], json.dumps(call["arguments"])) for i, call in numbered]


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turn the errors of a request of another form into Refused."""
    try:
        yield
    except BadValue as error:
        raise Refused(400, str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IndexError) as error:
        raise Refused(400, f"the request cannot be read: {type(error).__name__}: {error}") from None


def check(given: dict, **usual: Any) -> None:
    """Raise Refused for another model, or if an option has another value than None and the usual one."""
    if given.get("model") != MODEL:
        raise Refused(404, f"there is no model {given.get('model')!r:.100} here: {MODEL!r} is the one", "model_not_found")
    for name, value in usual.items():
        if given.get(name) not in (None, value):
            raise Refused(400, f"{name} {json.dumps(given[name]):.100}: leave it out, the policy samples freely")


def count(given: dict, *names: str) -> int | None:
    """Return a number; if several are given, the last one. Raise Refused if one is not a number of at least 1."""
    found = None
    for name in names:
        if given.get(name) is not None:
            found = given[name]
            if type(found) is not int or found < 1:
                raise Refused(400, f"{name} {found!r:.100}: must be a whole number of at least 1")
    return found


def stops(wanted: str | list[str] | None) -> tuple[str, ...]:
    """Return the strings that end an answer. Raise Refused if one is empty, or no string."""
    found = (wanted,) if isinstance(wanted, str) else tuple(wanted or ())
    if not all(isinstance(text, str) and text for text in found):
        raise Refused(400, f"stop {json.dumps(wanted):.100}: must be a text, or a list of texts that are not empty")
    return found


def schema_of(wanted: dict | None) -> str:
    """Return the JSON schema of a text's format; empty if it may be any text."""
    kind = (wanted or {"type": "text"})["type"]
    if kind == "json_schema":
        return json.dumps(wanted.get("json_schema", wanted)["schema"])
    return {"text": "", "json_object": '{"type": "object"}'}[kind]


def content_of(content: str | list[dict] | None) -> dict:
    """Return the content, and images, of a message, in the form of pictures.py."""
    if not isinstance(content, list):
        return {"content": (content or "") + ""}
    if any(part["type"] not in ("text", "input_text", "output_text") and not pictures.is_image(part) for part in content):
        raise Refused(400, "only text and images are possible here, no other parts")
    return pictures.joined(content)


def text_of(content: str | list[dict] | None) -> str:
    """Return the text of a message that has nothing else."""
    found = content_of(content)
    if "images" in found:
        raise Refused(400, "images are possible in messages of the user and of tools")
    return found["content"]


def said(text: str, calls: list[dict] | None = None) -> dict:
    """Return an assistant's message. calls: {name, arguments}, which stay text if they are not JSON."""
    message = {"role": "assistant", "content": text.strip(), "calls": []}
    for call in calls or ():
        arguments = call.get("arguments")
        with contextlib.suppress(ValueError, RecursionError):
            arguments = arguments if isinstance(arguments, dict) else json.loads(arguments or "{}")
        message["calls"].append({"name": call["name"] + "", "arguments": arguments})
    return message


def tool(is_function: bool, name: str, parameters: dict | None, description: str | None = None, **more: Any) -> dict:
    """Return a tool in the form for chat templates."""
    if not (is_function and isinstance(name, str) and isinstance(parameters or {}, dict)):
        raise Refused(400, "tools must be functions, with a name and a JSON schema of their parameters")
    told = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name} | told | more | {"parameters": parameters or {}}}
