"""An agent's calls in the form of OpenAI's chat completions: what a request asks for, and what its answer looks like.

Left out: options that would change the policy's sampling, and other models.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MODEL = "policy"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
USUAL = {"n": 1, "logprobs": False, "functions": [], "response_format": {"type": "text"}}  # other values are refused


class Refused(Exception):
    """A request that cannot be answered: its HTTP status and error body."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


@dataclass(frozen=True)
class Call:
    """A request for the model's next turn."""

    messages: list[dict]  # {role, content} with text; an assistant's "calls" [{name, arguments}]; a tool's name
    tools: list[dict]  # in the form for chat templates
    most: int | None  # limit of the tokens to sample
    streams: bool
    counts: bool  # whether a stream ends with the numbers of tokens

    @classmethod
    def of(cls, body: Any) -> "Call":
        """Return the call of a request's body. Raise Refused if it cannot be answered."""
        try:
            if body.get("model") != MODEL:
                raise Refused(
                    404, f"there is no model {body.get('model')!r:.100} here: {MODEL!r} is the one", "model_not_found"
                )
            for name in USUAL:
                if body.get(name) not in (None, USUAL[name]):
                    raise Refused(400, f"{name} {json.dumps(body[name]):.100}: the policy samples one answer, as it likes")
            most = None
            for name in ("max_tokens", "max_completion_tokens"):  # if both are given, the second counts
                if body.get(name) is not None:
                    most = body[name]
                    if type(most) is not int or most < 1:
                        raise Refused(400, f"{name} {most!r:.100}: must be a whole number of at least 1")
            options = body.get("stream_options") or {}
            counts = bool(options.get("include_usage"))
            return cls(as_messages(body["messages"]), as_tools(body.get("tools")), most, bool(body.get("stream")), counts)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise Refused(400, f"the request cannot be read: {type(error).__name__}: {error}") from None


def as_messages(given: list[dict]) -> list[dict]:
    """Return a request's messages in the form of Call. Raise Refused, or one of Python's errors, for any other form."""
    if not given:
        raise ValueError("messages: must be a list with at least one message")
    messages = []
    names: dict[str, str] = {}  # of tools, by call id
    for message in given:
        found = {"role": ROLES[message["role"]], "content": _text(message.get("content"))}
        if found["role"] == "assistant":
            found["content"] = found["content"].strip()
            found["calls"] = []
            for call in message.get("tool_calls") or ():
                names[str(call.get("id"))] = call["function"]["name"] + ""
                found["calls"].append({"name": call["function"]["name"], "arguments": _arguments(call["function"])})
        elif found["role"] == "tool":
            found["name"] = names.get(str(message.get("tool_call_id")), "tool")
        messages.append(found)
    return messages


def _text(content: str | list[dict] | None) -> str:
    if not isinstance(content, list):
        return (content or "") + ""
    if any(part["type"] != "text" for part in content):
        raise Refused(400, "only text is possible here, no images or other parts")
    return "".join(part["text"] for part in content)


def _arguments(function: dict) -> Any:
    """Return a call's arguments; as text if they are not JSON."""
    text = function.get("arguments") or "{}"
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def as_tools(given: list[dict] | None) -> list[dict]:
    """Return a request's tools in the form for chat templates. Raise Refused, or one of Python's errors, for any other form."""
    tools = []
    for tool in given or ():
        function = tool["function"]
        parameters = function.get("parameters") or {}
        if tool["type"] != "function" or not isinstance(function["name"], str) or not isinstance(parameters, dict):
            raise Refused(400, "tools must have the form {type: function, function: {name, parameters}}")
        tools.append({"type": "function", "function": function | {"parameters": parameters}})
    return tools


def completion(number: int, message: dict, sampled: int, before: int, is_cut: bool) -> dict:
    """Return the answer to call `number` of an episode. message: {content, reasoning, calls}; sampled, before: numbers of
    tokens; is_cut: whether the call's max_tokens cut it."""
    calls = [
        {"id": f"call_{number}_{i}", "type": "function", "function": call | {"arguments": json.dumps(call["arguments"])}}
        for i, call in enumerate(message["calls"])
    ]
    said = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    said |= {"reasoning_content": message["reasoning"]} if message["reasoning"] else {}
    said |= {"tool_calls": calls} if calls else {}
    reason = "length" if is_cut else "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": said, "finish_reason": reason, "logprobs": None}
    usage = {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}
    head = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": int(time.time()), "model": MODEL}
    return head | {"choices": [choice], "usage": usage}


def chunks(answer: dict, counts: bool) -> Iterator[str]:
    """Yield a completion as the events of a stream: the message, its finish reason and, if requested, the token counts."""
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(delta["tool_calls"])]
    parts = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}]
    parts += [{"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}]
    parts += [{"choices": [], "usage": answer["usage"]}] if counts else []
    for part in [*(json.dumps(head | part) for part in parts), "[DONE]"]:
        yield f"data: {part}\n\n"
