"""The tokens between two turns of the model, and the message in a turn's tokens.

An environment's answer is appended to the sampled tokens, which are never encoded again. The text around the answer is the chat
template's. To find it, a dummy conversation is rendered with a mark in place of the model's turn: the text after the end token
that follows the mark is the text before the next sampled token. Names of special tokens within an answer are encoded as plain
text, because an answer is data.
"""

import contextlib
import itertools
import json
import re

from transformers import PreTrainedTokenizerBase

from rl.errors import UserError
from user_processes import pictures
from user_processes.calls import format_of, parse
from user_processes.child import BadValue
from user_processes.tools import KNOWN, Tools

MARK = "mark7f3a"  # in place of the model's text
BREAK = "\ue000"  # cuts the name of a special token in an answer; a private-use character, removed from answers
ASKED = {"role": "user", "content": "?"}
SAID = {"role": "assistant", "content": MARK}
ANSWER = {"role": "tool", "content": "answer7f3a"}
SHORTEST = 3  # characters of a name that is cut: whitespace and single letters among the added tokens are plain text anyway
UNUSED = r"(?i:<[^<>\s]?(?:unused|reserved)[^<>\s]*>)"  # thousands in some tokenizers
HARMONY = "<|channel|>"  # of gpt-oss: a message ends with another token than a turn
PROPERTIES = {"param7f3a": {"type": "string", "description": "A text."}}
PROBE = {  # a tool to look for in what the chat template renders
    "type": "function",
    "function": {
        "name": "tool7f3a",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["param7f3a"]},
    },
}
HERMES = (
    "Give --tool-format hermes: the tools are then described in the prompt, and answers are messages of the user if the "
    "template drops those of tools."
)


class Turns:
    """The turns of one model with its tools."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: list[dict],
        end_tokens: set[int],
        form: str = "auto",
        system: str | None = None,
        images: tuple[int, list[int]] | None = None,
    ):
        """schemas: of the tools, in the form for chat templates; system: what the template says where there is no system
        message; images: the image token, and the fields of rl.images.Cut, if the model takes images. Raise UserError for
        an unsuitable chat template."""
        self.tokenizer = tokenizer
        self._images = images
        self._system = system
        self.end_tokens = end_tokens
        if not tokenizer.chat_template:
            raise UserError("the model's tokenizer has no chat template, so the tokens between two turns are unknown.")
        self._ends = [tokenizer.convert_ids_to_tokens(token) for token in sorted(end_tokens)]
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if not re.fullmatch(UNUSED, token.content)]
        names = sorted((name for name in added if len(name.strip()) >= SHORTEST), key=len, reverse=True)
        self._names = re.compile("|".join([*map(re.escape, names), UNUSED]))
        self._parameters = {s["function"]["name"]: s["function"].get("parameters", {}) for s in schemas or ()}
        self._calls: list[dict] = []  # a dummy turn's calls, in the form that the template accepts
        self._shown: dict[str, bool] = {}  # role -> whether the template shows its messages
        self.tools = Tools([], form)
        if schemas:
            self.tools = self._tools_of(schemas, form)
        self._answers_as_user = bool(schemas) and not self.tools.is_native and not self._shows("tool")
        self.begins_thinking = self._render([ASKED]).rstrip().endswith("<think>")
        self.between([ANSWER if schemas else ASKED])

    def between(self, messages: list[dict], is_cut: bool = False) -> list[int]:
        """Return the tokens of the messages [{role, content}] after a turn of the model, from its end token (not included) to
        the model's next turn. is_cut: the turn lacks its end token, which is then included."""
        for role in {message["role"] for message in messages}:
            if not (role == "tool" and (self._calls or self._answers_as_user)) and not self._shows(role):
                raise UserError(f"the model's chat template drops messages of the role {role!r}. Take another role.")
        is_tool = any(message["role"] == "tool" for message in messages)
        said = {"role": "assistant", "content": "", "tool_calls": self._calls} if is_tool and self._calls else SAID
        text = self._render([ASKED, said, *self._told(messages)])
        rest = text[text.index(MARK) + len(MARK) :] if MARK in text else ""
        found = min(((rest.index(end), end) for end in self._ends if end in rest), default=None)
        if found is None and HARMONY in self.tokenizer.chat_template:
            raise UserError(
                "the model's turns have several messages each, as gpt-oss's: --env, --tools and agents cannot read them yet. "
                "Take another model."
            )
        if found is None:
            raise UserError(
                "between a turn and the next message the chat template puts none of the model's end tokens "
                f"({', '.join(self._ends)}). Name the one that it puts there as eos_token_id in generation_config.json."
            )
        at, end = found
        return [self.tokenizer.convert_tokens_to_ids(end)] * is_cut + self._encode(rest[at + len(end) :], messages)

    def prompt(self, messages: list[dict], added: list[dict] | dict) -> list[int]:
        """Return the tokens of a prompt: the row's messages, and those of an environment or agent behind them, or content for
        the last one, which are data."""
        is_content = isinstance(added, dict)
        told = pictures.behind(messages, self._as_data(added) if is_content else self._told(added))
        text = self._render(self.tools.described(told, pictures.behind(messages, added)))
        return self._encode(text, [added] if is_content else added)

    def message(self, ids: list[int]) -> dict:
        """Return the model's message {role, content, calls}. A call is {"name", "arguments"}, or a malformed one's error."""
        whole = self.tokenizer.decode(ids, skip_special_tokens=True)
        said = {"role": "assistant", "content": whole, "calls": []}
        if not self.tools.schemas:
            return said
        content, found = parse(self.text(ids), self.tools.form, self._parameters, self.begins_thinking)
        return said | {"content": content if found else whole, "calls": found}

    def text(self, ids: list[int]) -> str:
        """Return a turn's text with its special tokens, except its end token."""
        return self.tokenizer.decode(ids[:-1] if ids[-1:] and ids[-1] in self.end_tokens else ids)

    def _render(self, messages: list[dict], tools: list[dict] | None = None) -> str:
        """Return the template's text. tools: schemas that it gets; by default those that it is to show."""
        tools = tools or self.tools.for_template
        messages = [pictures.parts_of(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"the model's chat template refuses the roles {roles} ({error}).") from None

    def _shows(self, role: str) -> bool:
        """Return whether the template shows a message of this role after a turn of the model."""
        if role not in self._shown:
            with contextlib.suppress(UserError):
                self._shown[role] = ANSWER["content"] in self._render([ASKED, SAID, self._as_data(ANSWER | {"role": role})])
        return self._shown.setdefault(role, False)

    def _encode(self, text: str, messages: list[dict]) -> list[int]:
        """Return the text's tokens, with all those of the images in these messages."""
        parts = self.tokenizer(text.split(BREAK), add_special_tokens=False)["input_ids"]
        ids = [token for part in parts for token in part]
        files = _images_of(messages)
        if not files:
            return ids
        from rl.images import Cut, size

        image_token, cut = self._images
        counts = [Cut(*cut).count(*size(file)) for file in files]
        if ids.count(image_token) != len(files):
            shown = f"{ids.count(image_token)} of {len(files)} images"
            raise BadValue(f"the model's chat template shows {shown}. Take another role.")
        return [same for token in ids for same in ([token] * counts.pop(0) if token == image_token else [token])]

    def _as_data(self, message: dict) -> dict:
        """Return the message with names of special tokens cut, and with a tool's name and call id, which templates may need."""
        if message.get("images") and not self._images:
            raise BadValue(pictures.TEXT_ALONE)
        plain = {name: message[name] for name in ("role", "images") if message.get(name)}
        plain |= {"content": self._cut(message["content"])}
        if message.get("role") != "tool":
            return plain
        return plain | {"name": self._cut(message.get("name", "tool")), "tool_call_id": "call00001"}

    def _told(self, messages: list[dict]) -> list[dict]:
        """Return messages of the environment or an agent for the template. Answers of tools that it drops become a message of
        the user, as in Qwen2.5's template."""
        told = []
        for role, of_role in itertools.groupby(messages, lambda message: message["role"]):
            data = [self._as_data(message) | self._as_calls(message) for message in of_role]
            if role == "tool" and self._answers_as_user:
                answers = "\n".join(f"<tool_response>\n{message['content']}\n</tool_response>" for message in data)
                data = [{"role": "user", "content": answers, "images": _images_of(data)}]
            told += data
        return told

    def _as_calls(self, message: dict) -> dict:
        """Return a message's calls in the form that the template accepts, or in its content."""
        if not message.get("calls"):
            return {}
        takes_text = bool(self._calls) and isinstance(self._calls[0]["function"]["arguments"], str)
        calls = []
        for call in message["calls"]:
            text = self._cut(json.dumps(call["arguments"], ensure_ascii=False))
            function = {"name": self._cut(call["name"]), "arguments": text if takes_text else json.loads(text)}
            calls.append({"type": "function", "id": "call00001", "function": function})
        if self.tools.is_native:
            return {"tool_calls": calls}
        texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
        return {"content": "\n".join([*filter(None, [self._cut(message["content"])]), *texts])}

    def _cut(self, text: str) -> str:
        text = text.replace(BREAK, "").encode("utf-8", "replace").decode()  # lone surrogates are no text
        return self._names.sub(lambda match: match[0][0] + BREAK + match[0][1:], text)

    def _tools_of(self, schemas: list[dict], form: str) -> Tools:
        """Return how the model learns of its tools. If its template does not do all of that in this form, the prompt has to, or
        the tools are described in it. Raise UserError if the template lacks something and no form is named."""
        self._calls, written, is_answered = self._accepted_calls(schemas)
        lacks = [] if self._shows_tools(schemas) else ["never shows the tools"]
        lacks += [] if is_answered else ["drops the answers of tools"]
        lacks += [] if written else ["writes a call in none of our formats"]
        if not lacks and form in ("auto", written):
            return Tools(schemas, written, are_known=KNOWN in self.tokenizer.chat_template)
        self._calls = []
        if form == "auto":
            raise UserError(f"the model's chat template {' and '.join(lacks)}. {HERMES}")
        if form != "hermes" and not self._shows("tool"):
            raise UserError(f"the model's chat template drops the answers of tools. {HERMES}")
        takes_system = False
        with contextlib.suppress(UserError):
            takes_system = MARK in self._render([{"role": "system", "content": MARK}, ASKED])
        return Tools(schemas, form, is_native=False, role="system" if takes_system else "user", system=self._system)

    def _shows_tools(self, schemas: list[dict]) -> bool:
        """Return whether the template shows tools, or says that the model knows them."""
        if KNOWN in self.tokenizer.chat_template:
            return True
        with contextlib.suppress(UserError):
            self._render([ASKED], schemas)
            text = self._render([ASKED], [PROBE])
            return "tool7f3a" in text and "param7f3a" in text
        return False

    def _accepted_calls(self, schemas: list[dict]) -> tuple[list[dict], str | None, bool]:
        """Return a dummy turn's calls in the form that the template accepts, with arguments as an object or as text; their
        format, None if it is not one of ours; and whether the template shows an answer to them. If it renders neither form, a
        tool's answer follows text."""
        for arguments in ({"mark": MARK}, f'{{"mark": "{MARK}"}}'):
            name = schemas[0]["function"]["name"]
            calls = [{"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}]
            said = {"role": "assistant", "content": "", "tool_calls": calls}
            with contextlib.suppress(UserError):
                text = self._render([ASKED, said, self._as_data(ANSWER)], schemas)
                if MARK in text:
                    form = format_of(text[text.rindex("?", 0, text.index(MARK)) :])
                    return calls, form, ANSWER["content"] in text
        return [], None, self._shows("tool")


def _images_of(messages: list[dict]) -> list[bytes]:
    return [file for message in messages for file in message.get("images", ())]
