"""Anthropic's messages.

Left out: tools that Anthropic runs, documents, and thoughts, which stay among the tokens.
"""

import dataclasses
import json
from collections.abc import AsyncIterator

from user_processes.protocols import form
from user_processes.protocols.form import Answer, Call, Refused

KINDS = {401: "authentication_error", 404: "not_found_error"}  # by status; others are invalid requests
THOUGHTS = ("thinking", "redacted_thinking")


def call(given: dict, answered: list) -> Call:
    """Return the call of a request's body. Raise Refused, or one of Python's errors, if it cannot be answered."""
    form.check(given, mcp_servers=[])
    messages = [{"role": "system", "content": form.text_of(given["system"])}] if given.get("system") else []
    names: dict[str, str] = {}  # of tools, by call id
    for message in given["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = {kind: [block for block in blocks if block["type"] == kind] for kind in ("tool_use", "tool_result")}
        rest = [block for block in blocks if block["type"] not in ("tool_use", "tool_result", *THOUGHTS)]
        if message["role"] == "assistant":
            names |= {block["id"]: block["name"] for block in parts["tool_use"]}
            calls = [{"name": block["name"], "arguments": block["input"]} for block in parts["tool_use"]]
            messages.append(form.said(form.text_of(rest), calls))
            continue
        for block in parts["tool_result"]:
            name = names.get(block["tool_use_id"], "tool")
            messages.append({"role": "tool", "name": name} | form.content_of(block.get("content")))
        if rest or not parts["tool_result"]:
            messages.append({"role": {"user": "user", "system": "system"}[message["role"]]} | form.content_of(rest))
    if not given["messages"]:
        raise ValueError("messages: must be a list with at least one message")
    tools = [
        form.tool(tool.get("type") in (None, "custom"), tool["name"], tool.get("input_schema"), tool.get("description"))
        for tool in given.get("tools") or ()
    ]
    schema = form.schema_of(given.get("output_format") or (given.get("output_config") or {}).get("format"))
    more = {"schema": schema, "stop": form.stops(given.get("stop_sequences"))}
    return Call(messages, tools, form.count(given, "max_tokens"), bool(given.get("stream")), **more)


def _blocks(answer: Answer) -> list[dict]:
    blocks = [{"type": "text", "text": answer.content}] if answer.content or not answer.calls else []
    for id, name, arguments in answer.written_calls:
        blocks.append({"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)})
    return blocks


def body(answers: list[Answer]) -> dict:
    """Return the answer to a call."""
    (answer,) = answers
    ended = "stop_sequence" if answer.stopped_by else "end_turn"
    reason = "max_tokens" if answer.is_cut else "tool_use" if answer.calls else ended
    usage = {"input_tokens": answer.before, "output_tokens": answer.sampled}
    found = {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": form.MODEL, "usage": usage}
    found |= {"stop_reason": reason if answer.is_whole else None, "stop_sequence": answer.stopped_by or None}
    return found | {"content": _blocks(answer) if answer.is_whole else []}


async def events(call: Call, pieces: AsyncIterator[tuple[str, str, Answer]]) -> AsyncIterator[dict]:
    """Yield events: text as it is sampled, and calls when they are whole."""
    has_begun = has_text = False
    async for kind, text, answer in pieces:
        if not has_begun:
            yield {"type": "message_start", "message": body([dataclasses.replace(answer, is_whole=False)])}
        has_begun = True
        if kind == "content" and not has_text:
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            has_text = True
        if kind == "content":
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        for index, block in enumerate(_blocks(answer) if kind == "end" else ()):
            if block["type"] == "tool_use":
                yield {"type": "content_block_start", "index": index, "content_block": block | {"input": {}}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
    whole = body([answer])
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": answer.sampled}}
    yield {"type": "message_stop"}


def failure(refused: Refused) -> dict:
    """Return the body of an error."""
    return {"type": "error", "error": {"type": KINDS.get(refused.status, "invalid_request_error"), "message": str(refused)}}
