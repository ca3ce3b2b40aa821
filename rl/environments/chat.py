"""An agent's calls in the form of OpenAI's chat completions.

Left out: options that would change the policy's sampling, and other models.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rl.environments.programs import BadValue, as_reward

MODEL = "policy"
CHAT, FINISH = "POST /v1/chat/completions", "POST /v1/episodes/end"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
NO_ROOM = "the response's budget of tokens or turns is used up: --max-response-length, --max-turns"
ENDED = "this episode has ended"


class Refused(Exception):
    """A request that cannot be answered: its HTTP status and error body."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


@dataclass(frozen=True)
class End:
    """The end of an agent's episode. reward: None if a grader scores it; failure: why it cannot be scored."""

    reward: Any = None
    failure: str | None = None


class Call:
    """A chat completion that waits for its answer."""

    def __init__(self, body: dict, send: Callable[[dict], None]):
        """body: of the request; send: sends {status, kind, text}. Raise Refused if it cannot be answered."""
        if body.get("model") != MODEL:
            raise Refused(404, f"there is no model {body.get('model')!r:.100} here: {MODEL!r} is the one", "model_not_found")
        for name, usual in (("n", 1), ("logprobs", False), ("functions", []), ("response_format", {"type": "text"})):
            if body.get(name) not in (None, usual):
                raise Refused(400, f"{name} {json.dumps(body[name]):.100}: the policy samples one answer, as it likes")
        self.messages = as_messages(body.get("messages"))
        self.tools = as_tools(body.get("tools"))
        self.most: int | None = None  # limit of the tokens to sample
        for name in ("max_tokens", "max_completion_tokens"):  # if both are given, the second counts
            most = body.get(name)
            if most is not None and (type(most) is not int or most < 1):
                raise Refused(400, f"{name} {most!r:.100}: must be a whole number of at least 1")
            self.most = self.most if most is None else most
        self.streams = bool(body.get("stream"))
        options = body.get("stream_options")
        self.counts = not self.streams or (isinstance(options, dict) and bool(options.get("include_usage")))
        self._send = send

    def reply(self, answer: dict | Refused) -> None:
        """Send the answer: a completion, or a refusal."""
        streams = self.streams and not isinstance(answer, Refused)
        self._send(as_events(chunks(answer, self.counts)) if streams else as_http(answer))


def as_http(answer: dict | Refused) -> dict:
    """Return an answer's status, content type and text."""
    status, body = (answer.status, answer.body) if isinstance(answer, Refused) else (200, answer)
    return {"status": status, "kind": "application/json", "text": json.dumps(body)}


def as_events(answers: Iterable[dict]) -> dict:
    """Return the same for a stream of answers."""
    lines = [*map(json.dumps, answers), "[DONE]"]
    return {"status": 200, "kind": "text/event-stream", "text": "".join(f"data: {line}\n\n" for line in lines)}


def as_end(body: dict) -> End:
    """Return the end that a worker sends: {"reward": 1.0}, {} for the grader, or {"error": "why it cannot be scored"}. Raise
    Refused for anything else."""
    if unknown := body.keys() - {"reward", "error"}:
        raise Refused(400, f"an end has reward or error, not {sorted(unknown)[0]!r:.100}")
    try:
        reward = as_reward(body.get("reward"))
    except BadValue as error:
        raise Refused(400, str(error)) from None
    error = body.get("error")
    if error is not None and (reward is not None or not isinstance(error, str)):
        raise Refused(400, "error: a text, and no reward next to it")
    return End(reward, None if error is None else f"was ended by its worker: {error or 'no reason'}")


def as_messages(value: Any) -> list[dict]:
    """Return a request's messages: role and content (text), an assistant's "calls", [{name, arguments}], and a tool's name.
    Raise Refused for messages of any other form."""
    if not isinstance(value, list) or not value:
        raise Refused(400, "messages: must be a list with at least one message")
    messages = []
    names = {}
    for number, given in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(given, dict) or given.get("role") not in ROLES:
            raise Refused(400, f"{where}: must be an object whose role is one of {', '.join(ROLES)}")
        message = {"role": ROLES[given["role"]], "content": _text(given.get("content"), where)}
        if message["role"] == "assistant":
            message["content"] = message["content"].strip()
            message["calls"] = [_call(call, names, where) for call in given.get("tool_calls") or ()]
        elif message["role"] == "tool":
            message["name"] = names.get(str(given.get("tool_call_id")), "tool")
        messages.append(message)
    return messages


def _text(content: Any, where: str) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise Refused(400, f"{where}: only text is possible here, no images or other parts")
    if not all(isinstance(part.get("text"), str) for part in parts):
        raise Refused(400, f"{where}: its content is not text")
    return "".join(part["text"] for part in parts)


def _call(given: Any, names: dict[str, str], where: str) -> dict:
    """Return the parsed call; its arguments stay text if they are not JSON. names: tools by call id; the call is added."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, f"{where}: a tool call must have the form {{id, type, function: {{name, arguments}}}}")
    names[str(given.get("id"))] = function["name"]
    arguments = function.get("arguments") or "{}"
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}


def as_tools(value: Any) -> list[dict]:
    """Return a request's tools in the form for chat templates. Raise Refused for tools of any other form."""
    tools = []
    for number, tool in enumerate(value if isinstance(value, list) else [value] if value else []):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        parameters = (isinstance(function, dict) and function.get("parameters")) or {}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(parameters, dict):
            raise Refused(400, f"tools[{number}]: must have the form {{type: function, function: {{name, parameters}}}}")
        tools.append({"type": "function", "function": function | {"parameters": parameters}})
    return tools


def completion(number: int, message: dict, sampled: int, before: int, is_cut: bool) -> dict:
    """Return the answer to call `number` of a session. message: {content, reasoning, calls}; sampled, before: numbers of
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


def chunks(answer: dict, counts: bool) -> Iterator[dict]:
    """Yield a completion as the chunks of a stream: the message, its finish reason and, if requested, the token counts."""
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(delta["tool_calls"])]
    yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield head | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    if counts:
        yield head | {"choices": [], "usage": answer["usage"]}
