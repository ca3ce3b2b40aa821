"""How a model learns of its tools: its chat template shows them, the prompt explains them, or they are described here."""

import json
from dataclasses import dataclass

from rl.errors import UserError

KNOWN = "{# the model knows its tools #}"  # a comment in the chat template of a model that was trained with its tools
MARKS = {"hermes": "<tool_call>", "xml": "<tool_call>", "llama": '"name"'}  # that each explanation of a format contains
HERMES = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # the words of Qwen2.5's chat template


@dataclass(frozen=True)
class Tools:
    """The tools that a model may call."""

    schemas: list[dict]  # in the form for chat templates
    form: str  # how the model writes a call: "hermes", "llama" or "xml"
    is_native: bool = True  # whether the chat template shows the tools and their answers, and writes calls in this form
    are_known: bool = False  # whether the model needs to be shown none (KNOWN)
    role: str = "system"  # of the first message, which a description is added to: "user" if the template refuses the other
    system: str | None = None  # --system-prompt, which comes before a description

    @property
    def for_template(self) -> list[dict] | None:
        """The schemas that the chat template gets."""
        return self.schemas or None if self.is_native else None

    def described(self, messages: list[dict], raw: list[dict] | None = None) -> list[dict]:
        """Return a prompt's messages with a description of the tools, unless the template shows them or the prompt explains
        calls. raw: the messages before names of special tokens were cut. Raise UserError if the form has no description."""
        if self.is_native or self.explained(raw or messages):
            return messages
        if self.form != "hermes":
            raise UserError(
                "neither the chat template nor the prompt shows the tools. Give --tool-format hermes, which describes them, or "
                "describe them in the prompt."
            )
        schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.schemas)
        text = HERMES.format(schemas=schemas)
        if not messages or messages[0]["role"] != self.role:
            before = f"{self.system}\n\n" if self.system and self.role == "system" else ""
            return [{"role": self.role, "content": before + text}, *messages]
        first, *rest = messages
        both = (first["content"], text) if self.role == "system" else (text, first["content"])
        return [first | {"content": "\n\n".join(both)}, *rest]

    def explained(self, messages: list[dict]) -> bool:
        """Return whether the messages explain how to call a tool."""
        return any(MARKS[self.form] in message["content"] for message in messages)

    def check_text(self, text: str) -> None:
        """Raise UserError for a prompt that is plain text, which no chat template renders, and that does not explain calls."""
        if self.schemas and not self.are_known and not self.explained([{"content": text}]):
            raise UserError(
                "the prompt is plain text, in which the model sees no tools. Give prompts as chat messages, or describe the "
                f"tools in them, with {MARKS[self.form]}."
            )
