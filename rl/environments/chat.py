"""An OpenAI-compatible endpoint for one agent: puts its chat completions into a queue and sends the answers.

Each session has a separate server with a separate key, on 127.0.0.1 and a free port; or it gets its connections from the
gateway (rl/environments/gateway.py). A call waits in a thread until it is answered; simultaneous calls are answered one after
another. Left out: options that would change the policy's sampling, and other models.
"""

import contextlib
import json
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rl.environments.json_server import Handler, Refused, Server
from rl.environments.programs import BadValue, as_reward

MODEL = "policy"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
NO_ROOM = "the response's budget of tokens or turns is used up: --max-response-length, --max-turns"
ENDED = "this episode has ended"


@dataclass(frozen=True)
class End:
    """The end of an agent's episode. reward: None if a grader scores it; failure: why it cannot be scored."""

    reward: Any = None
    failure: str | None = None


class Call:
    """A chat completion that waits for its answer."""

    def __init__(self, body: dict):
        """body: of the request. Raise Refused if it cannot be answered."""
        if body.get("model") != MODEL:
            raise Refused(404, f"there is no model {body.get('model')!r:.100} here: {MODEL!r} is the one", "model_not_found")
        for name, usual in (("n", 1), ("logprobs", False), ("functions", []), ("response_format", {"type": "text"})):
            if body.get(name) not in (None, usual):
                raise Refused(400, f"{name} {json.dumps(body[name]):.100}: the policy samples one answer, as it likes")
        self.messages, self.tools = as_messages(body.get("messages")), as_tools(body.get("tools"))
        self.most: int | None = None  # limit of the tokens to sample
        for name in ("max_tokens", "max_completion_tokens"):  # if both are given, the second counts
            most = body.get(name)
            if most is not None and (type(most) is not int or most < 1):
                raise Refused(400, f"{name} {most!r:.100}: must be a whole number of at least 1")
            self.most = self.most if most is None else most
        self.streams = bool(body.get("stream"))
        options = body.get("stream_options")
        self.counts = not self.streams or (isinstance(options, dict) and bool(options.get("include_usage")))
        self.answer: dict | Refused | None = None  # a completion
        self.was_read = False  # whether the client has read the answer, as far as the connection shows
        self._answered, self._written = threading.Event(), threading.Event()

    def reply(self, answer: dict | Refused) -> None:
        """Set the answer, and wait until it is written."""
        self.answer = answer
        self._answered.set()
        self._written.wait()

    def wait(self) -> dict | Refused:
        """Wait for the answer and return it."""
        self._answered.wait()
        return self.answer

    def end(self, was_read: bool) -> None:
        """Note that the answer was written, or could not be."""
        self.was_read = was_read
        self._written.set()


def as_messages(value: Any) -> list[dict]:
    """Return a request's messages: role and content (text), an assistant's "calls", [{name, arguments}], and a tool's name.
    Raise Refused for messages of any other form."""
    if not isinstance(value, list) or not value:
        raise Refused(400, "messages: must be a list with at least one message")
    messages, names = [], {}
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
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(400, f"tools[{number}]: must have the form {{type: function, function: {{name, parameters}}}}")
        tools.append({"type": "function", "function": function | {"parameters": function.get("parameters") or {}}})
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


class Endpoint(Server):
    """The server of a session. It puts the calls, and the end that a worker sends, into `news`."""

    def __init__(self, news: queue.SimpleQueue, is_served: bool = False):
        """is_served: the gateway checks keys and passes connections on; otherwise the server has its own port and key."""
        super().__init__(("127.0.0.1", 0), ChatHandler, bind_and_activate=not is_served)
        self.news, self.closes, self.ended = news, is_served, threading.Lock()  # ended: acquired by the first end
        if not is_served:
            self.key = secrets.token_hex(16)
            threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables for a client of this endpoint."""
        url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": self.key, "OPENAI_MODEL": MODEL}


class ChatHandler(Handler):
    """A client of a session."""

    server: Endpoint
    routes = MappingProxyType({"GET /v1/models": "models", "POST /v1/chat/completions": "chat", "POST /v1/episodes/end": "end"})

    def models(self, _: dict) -> dict:
        """Return the list of models: the policy."""
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}]}

    def chat(self, body: dict) -> None:
        """Answer a chat completion."""
        try:
            call = Call(body)
        except (ValueError, TypeError, RecursionError) as error:
            raise Refused(400, f"the request is not a chat completion: {error}") from None
        if self.server.ended.locked():
            raise Refused(410, ENDED)
        self.server.news.put(call)
        answer, was_read = call.wait(), False
        try:
            is_open = self.is_open()
            self._answer(call, answer)
            was_read = is_open
        finally:
            call.end(was_read)

    def _answer(self, call: Call, answer: dict | Refused) -> None:
        if isinstance(answer, Refused):
            self.send(answer.status, answer.body)
        elif call.streams:
            lines = [*(json.dumps(chunk) for chunk in chunks(answer, call.counts)), "[DONE]"]
            self.write(200, "text/event-stream", "".join(f"data: {line}\n\n" for line in lines).encode())
        else:
            self.send(200, answer)

    def end(self, body: dict) -> None:
        """End the episode, as its worker asks: {"reward": 1.0}, {} for the grader, or {"error": "why it cannot be scored"}."""
        if not self.server.closes:
            raise Refused(404, "an agent's command ends its episode by exiting")
        if unknown := body.keys() - {"reward", "error"}:
            raise Refused(400, f"an end has reward or error, not {sorted(unknown)[0]!r:.100}")
        try:
            reward = as_reward(body.get("reward"))
        except BadValue as error:
            raise Refused(400, str(error)) from None
        error = body.get("error")
        if error is not None and (reward is not None or not isinstance(error, str)):
            raise Refused(400, "error: a text, and no reward next to it")
        if not self.server.ended.acquire(blocking=False):
            raise Refused(410, ENDED)
        try:
            self.send(200, {"ended": True})  # before the end is put: it ends the episode's process
        finally:
            self.server.news.put(End(reward, None if error is None else f"was ended by its worker: {error or 'no reason'}"))
