"""OpenAI's Responses: a conversation is a list of items, whole in each request or behind its `previous_response_id`.

Left out: tools that OpenAI runs, items stored elsewhere, reading a response again, and thoughts, which stay among the tokens.
"""

import dataclasses
import time
from collections.abc import AsyncIterator

from user_processes.protocols import form
from user_processes.protocols.chat import ROLES, failure  # noqa: F401 (failure: errors are those of chat completions)
from user_processes.protocols.form import Answer, Call, Refused


def call(given: dict, answered: list[tuple[list[dict], Answer]]) -> Call:
    """Return the call of a request's body. answered: the conversation with each of the episode's answers, and the answer.
    Raise Refused, or one of Python's errors, if it cannot be answered."""
    form.check(given, background=False, conversation="", prompt={}, top_logprobs=0)
    messages: list[dict] = []
    names: dict[str, str] = {}  # of tools, by call id
    if previous := given.get("previous_response_id"):
        before, answer = answered[int(previous.removeprefix("resp_"))]
        messages += before
        names |= {id: name for id, name, _ in answer.written_calls}
    if told := given.get("instructions"):
        messages = [{"role": "system", "content": told + ""}, *(m for m in messages if m["role"] != "system")]
    items = given["input"]
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        _add(item, messages, names)
    if not messages:
        raise ValueError("input: must be a text, or a list with at least one item")
    tools = [
        form.tool(tool["type"] == "function", tool.get("name"), tool.get("parameters"), tool.get("description"))
        for tool in given.get("tools") or ()
    ]
    schema = form.schema_of((given.get("text") or {}).get("format"))
    return Call(messages, tools, form.count(given, "max_output_tokens"), bool(given.get("stream")), schema=schema)


def _add(item: dict, messages: list[dict], names: dict[str, str]) -> None:
    """Add an item. A function's call belongs to the model's message before it."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = ROLES[item["role"]]
        content = item["content"]
        messages.append(form.said(form.text_of(content)) if role == "assistant" else {"role": role} | form.content_of(content))
    elif kind == "function_call":
        names[item["call_id"]] = item["name"]
        if not messages or messages[-1]["role"] != "assistant":
            messages.append(form.said(""))
        (call,) = form.said("", [item])["calls"]
        messages[-1] = messages[-1] | {"calls": [*messages[-1]["calls"], call]}
    elif kind == "function_call_output":
        name = names.get(item["call_id"], "tool")
        messages.append({"role": "tool", "name": name} | form.content_of(item["output"]))
    elif kind != "reasoning":
        raise Refused(400, f"input: {kind!r:.100}: only messages and the calls of functions are possible here")


def _items(answer: Answer) -> list[dict]:
    status = "incomplete" if answer.is_cut else "completed"
    part = {"type": "output_text", "text": answer.content, "annotations": []}
    text = {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "status": status, "content": [part]}
    return [text] * bool(answer.content or not answer.calls) + [
        {"id": f"fc_{id}", "type": "function_call", "status": status, "call_id": id, "name": name, "arguments": arguments}
        for id, name, arguments in answer.written_calls
    ]


def body(answers: list[Answer]) -> dict:
    """Return the answer to a call."""
    (answer,) = answers
    status = "in_progress" if not answer.is_whole else "incomplete" if answer.is_cut else "completed"
    usage = {"input_tokens": answer.before, "output_tokens": answer.sampled, "total_tokens": answer.before + answer.sampled}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    found = {"id": f"resp_{answer.number}", "object": "response", "created_at": int(time.time()), "model": form.MODEL}
    found |= {"output": _items(answer) if answer.is_whole else [], "status": status, "usage": usage, "error": None}
    found |= {"incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None, "instructions": None}
    return found | {"metadata": {}, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}


async def events(call: Call, pieces: AsyncIterator[tuple[str, str, Answer]]) -> AsyncIterator[dict]:
    """Yield numbered events: text as it is sampled, and calls when they are whole."""
    number = 0
    async for event in _events(pieces):
        yield event | {"sequence_number": number}
        number += 1


async def _events(pieces: AsyncIterator[tuple[str, str, Answer]]) -> AsyncIterator[dict]:
    has_begun = has_text = False
    async for kind, text, answer in pieces:
        if not has_begun:
            for name in ("response.created", "response.in_progress"):
                yield {"type": name, "response": body([dataclasses.replace(answer, is_whole=False)])}
        has_begun = True
        at = {"output_index": 0, "item_id": f"msg_{answer.number}", "content_index": 0}
        part = {"type": "output_text", "text": "", "annotations": []}
        if kind == "content" and not has_text:
            item = {"id": at["item_id"], "type": "message", "role": "assistant", "status": "in_progress", "content": []}
            yield {"type": "response.output_item.added", "output_index": 0, "item": item}
            yield {"type": "response.content_part.added", **at, "part": part}
            has_text = True
        if kind == "content":
            yield {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []}
        for index, item in enumerate(_items(answer) if kind == "end" else ()):
            if item["type"] == "message":
                yield {"type": "response.output_text.done", **at, "text": answer.content, "logprobs": []}
                yield {"type": "response.content_part.done", **at, "part": item["content"][0]}
            else:
                begun = item | {"status": "in_progress", "arguments": ""}
                yield {"type": "response.output_item.added", "output_index": index, "item": begun}
                its = {"output_index": index, "item_id": item["id"]}
                yield {"type": "response.function_call_arguments.delta", **its, "delta": item["arguments"]}
                its |= {"name": item["name"], "arguments": item["arguments"]}
                yield {"type": "response.function_call_arguments.done", **its}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
    final = body([answer])
    yield {"type": f"response.{final['status']}", "response": final}
