"""OpenAI's chat completions.

Left out: options that would change the policy's sampling.
"""

import time
from collections.abc import AsyncIterator

from user_processes.protocols import form
from user_processes.protocols.form import Answer, Call, Refused

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def call(given: dict, answered: list) -> Call:
    """Return the call of a request's body. Raise Refused, or one of Python's errors, if it cannot be answered."""
    form.check(given, logprobs=False, functions=[])
    most = form.count(given, "max_tokens", "max_completion_tokens")
    messages = as_messages(given["messages"])
    tools = [
        form.tool(tool["type"] == "function", **{"parameters": None} | tool["function"]) for tool in given.get("tools") or ()
    ]
    schema = form.schema_of(given.get("response_format"))
    counts = bool((given.get("stream_options") or {}).get("include_usage"))
    stop = form.stops(given.get("stop"))
    return Call(messages, tools, most, bool(given.get("stream")), form.count(given, "n") or 1, schema, stop, counts)


def as_messages(given: list[dict]) -> list[dict]:
    """Return a request's messages in the form of Call."""
    if not given:
        raise ValueError("messages: must be a list with at least one message")
    messages = []
    names: dict[str, str] = {}  # of tools, by call id
    for message in given:
        role = ROLES[message["role"]]
        content = message.get("content")
        if role == "assistant":
            calls = message.get("tool_calls") or ()
            names |= {str(call.get("id")): call["function"]["name"] for call in calls}
            messages.append(form.said(form.text_of(content), [call["function"] for call in calls]))
        else:
            name = {"name": names.get(str(message.get("tool_call_id")), "tool")} if role == "tool" else {}
            messages.append({"role": role} | form.content_of(content) | name)
    return messages


def _head(answers: list[Answer], kind: str) -> dict:
    return {"id": f"chatcmpl-{answers[0].number}", "object": kind, "created": int(time.time()), "model": form.MODEL}


def _calls(answer: Answer) -> list[dict]:
    return [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in answer.written_calls
    ]


def _reason(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.calls else "stop"


def _usage(answers: list[Answer]) -> dict:
    before = answers[0].before
    sampled = sum(answer.sampled for answer in answers)
    return {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}


def body(answers: list[Answer]) -> dict:
    """Return the answer to a call."""
    choices = []
    for index, answer in enumerate(answers):
        message = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
        message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        message |= {"tool_calls": _calls(answer)} if answer.calls else {}
        choices.append({"index": index, "message": message, "finish_reason": _reason(answer), "logprobs": None})
    return _head(answers, "chat.completion") | {"choices": choices, "usage": _usage(answers)}


async def events(call: Call, pieces: AsyncIterator[tuple[str, str, Answer]]) -> AsyncIterator[dict | str]:
    """Yield chunks: text as it is sampled, calls when they are whole, the finish reason and, if requested, the token counts."""
    whole: list[Answer] = []
    async for kind, text, answer in pieces:
        head = _head([*whole, answer], "chat.completion.chunk")
        deltas = [{"reasoning_content" if kind == "reasoning" else "content": text}]
        if kind == "end":
            whole.append(answer)
            calls = [{"index": i} | call for i, call in enumerate(_calls(answer))]
            deltas = [{"tool_calls": calls}, {}] if calls else [{}]
        for delta in deltas:
            reason = None if delta else _reason(answer)
            delta = {"role": "assistant"} | delta if delta else {}
            yield head | {"choices": [{"index": answer.index, "delta": delta, "finish_reason": reason}]}
    if call.counts:
        yield head | {"choices": [], "usage": _usage(whole)}
    yield "[DONE]"


def failure(refused: Refused) -> dict:
    """Return the body of an error."""
    return {"error": {"message": str(refused), "type": "invalid_request_error", "param": None, "code": refused.code}}
