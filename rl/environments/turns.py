"""The tokens between two turns of the model, and the message in a turn's tokens.

An environment's answer is appended to the sampled tokens, which are never encoded again. The text around the answer is the chat
template's. To find it, a dummy conversation is rendered with a mark in place of the model's turn: the text after the end token
that follows the mark is the text before the next sampled token. Names of special tokens within an answer are encoded as plain
text, because an answer is data.
"""

import json
import re

from transformers import PreTrainedTokenizerBase

from rl.environments.calls import format_of, parse
from rl.errors import UserError

MARK = "mark7f3a"  # in place of the model's text
BREAK = "\ue000"  # cuts the name of a special token in an answer; a private-use character, removed from answers
ANSWER = {"role": "tool", "content": "answer"}
SHORTEST = 3  # characters of a name that is cut: whitespace and single letters among the added tokens are plain text anyway
UNUSED = r"(?i:<[^<>\s]?(?:unused|reserved)[^<>\s]*>)"  # thousands in some tokenizers


class Turns:
    """The turns of one model with its tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schemas: list[dict], end_tokens: set[int], form: str = "auto"):
        """schemas: of the tools, in the form for chat templates. Raise UserError for an unsuitable chat template."""
        self.tokenizer = tokenizer
        self.schemas = schemas or None
        self.end_tokens = end_tokens
        if not tokenizer.chat_template:
            raise UserError("the model's tokenizer has no chat template, so the tokens between two turns are unknown.")
        self._ends = [tokenizer.convert_ids_to_tokens(token) for token in sorted(end_tokens)]
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if not re.fullmatch(UNUSED, token.content)]
        names = sorted((name for name in added if len(name.strip()) >= SHORTEST), key=len, reverse=True)
        self._names = re.compile("|".join([*map(re.escape, names), UNUSED]))
        self._parameters = {s["function"]["name"]: s["function"].get("parameters", {}) for s in schemas or ()}
        self._calls = self._accepted_calls() if schemas else []
        self.form = self._form() if form == "auto" and schemas else form
        self.begins_thinking = self._render([{"role": "user", "content": "?"}]).rstrip().endswith("<think>")
        self.between([ANSWER if schemas else {"role": "user", "content": "?"}])

    def between(self, messages: list[dict], is_cut: bool = False) -> list[int]:
        """Return the tokens of the messages [{role, content}] after a turn of the model, from its end token (not included) to
        the model's next turn. is_cut: the turn lacks its end token, which is then included."""
        is_tool = any(message["role"] == "tool" for message in messages)
        said = {"role": "assistant", "content": "", "tool_calls": self._calls} if is_tool and self._calls else None
        said = said or {"role": "assistant", "content": MARK}
        text = self._render([{"role": "user", "content": "?"}, said, *map(self._as_data, messages)])
        rest = text[text.index(MARK) + len(MARK) :] if MARK in text else ""
        found = min(((rest.index(end), end) for end in self._ends if end in rest), default=None)
        if found is None:
            raise UserError(
                "between a turn and the next message the chat template puts none of the model's end tokens "
                f"({', '.join(self._ends)}). Name the one that it puts there as eos_token_id in generation_config.json."
            )
        at, end = found
        return [self.tokenizer.convert_tokens_to_ids(end)] * is_cut + self._encode(rest[at + len(end) :])

    def prompt(self, messages: list[dict], added: list[dict] | str) -> list[int]:
        """Return the tokens of a prompt: its messages, and those that the environment adds, or text added to the last one."""
        if isinstance(added, str):
            last = messages[-1]
            return self._encode(self._render([*messages[:-1], last | {"content": last["content"] + self._cut(added)}]))
        return self._encode(self._render([*messages, *map(self._as_data, added)]))

    def conversation(self, messages: list[dict]) -> list[int]:
        """Return the tokens of a prompt of an agent's messages, in the form of rl/environments/chat.py. All are data."""
        return self._encode(self._render([self._as_data(message) | self._as_calls(message) for message in messages]))

    def message(self, ids: list[int]) -> dict:
        """Return the model's message {role, content, calls}. A call is {"name", "arguments"}, or a malformed one's error."""
        whole = self.tokenizer.decode(ids, skip_special_tokens=True)
        said = {"role": "assistant", "content": whole, "calls": []}
        if not self.schemas:
            return said
        content, found = parse(self.text(ids), self.form, self._parameters, self.begins_thinking)
        return said | {"content": content if found else whole, "calls": found}

    def text(self, ids: list[int]) -> str:
        """Return a turn's text with its special tokens, except its end token."""
        return self.tokenizer.decode(ids[:-1] if ids[-1:] and ids[-1] in self.end_tokens else ids)

    def _render(self, messages: list[dict]) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tools=self.schemas, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"the model's chat template refuses the roles {roles} ({error}).") from None

    def _encode(self, text: str) -> list[int]:
        parts = self.tokenizer(text.split(BREAK), add_special_tokens=False)["input_ids"]
        return [token for part in parts for token in part]

    def _as_data(self, message: dict) -> dict:
        """Return the message with names of special tokens cut, and with a tool's name and call id, which templates may need."""
        plain = {"role": message["role"], "content": self._cut(message["content"])}
        if message["role"] != "tool":
            return plain
        return plain | {"name": self._cut(message.get("name", "tool")), "tool_call_id": "call00001"}

    def _as_calls(self, message: dict) -> dict:
        """Return a message's calls in the form that the template accepts."""
        if not message.get("calls"):
            return {}
        takes_text = bool(self._calls) and isinstance(self._calls[0]["function"]["arguments"], str)
        calls = []
        for call in message["calls"]:
            text = self._cut(json.dumps(call["arguments"], ensure_ascii=False))
            function = {"name": self._cut(call["name"]), "arguments": text if takes_text else json.loads(text)}
            calls.append({"type": "function", "id": "call00001", "function": function})
        return {"tool_calls": calls}

    def _cut(self, text: str) -> str:
        text = text.replace(BREAK, "").encode("utf-8", "replace").decode()  # lone surrogates are no text
        return self._names.sub(lambda match: match[0][0] + BREAK + match[0][1:], text)

    def _accepted_calls(self) -> list[dict]:
        """Return a dummy turn's calls in the form that the template accepts: with arguments as an object, or as text. If it
        renders neither, return no calls: a tool's answer then follows text."""
        for arguments in ({"mark": MARK}, f'{{"mark": "{MARK}"}}'):
            name = self.schemas[0]["function"]["name"]
            calls = [{"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}]
            said = {"role": "assistant", "content": "", "tool_calls": calls}
            try:
                if MARK in self._render([{"role": "user", "content": "?"}, said, self._as_data(ANSWER)]):
                    return calls
            except UserError:
                continue
        return []

    def _form(self) -> str:
        if self._calls:
            said = {"role": "assistant", "content": "", "tool_calls": self._calls}
            text = self._render([{"role": "user", "content": "?"}, said, self._as_data(ANSWER)])
            if form := format_of(text[text.rindex("?", 0, text.index(MARK)) :]):
                return form
        raise UserError("the chat template writes a call in none of our formats. Name one with --tool-format.")
