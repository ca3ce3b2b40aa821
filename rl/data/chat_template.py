"""--chat-template-args and --system-prompt: defaults that are written into the model's chat template.

So they hold wherever a conversation becomes tokens: prompts, turns of episodes, calls of agents, demonstrations. A checkpoint
has them too: whoever serves it formats prompts as in training. Arguments that a caller gives go before these.
"""

import copy
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl.errors import UserError

UNTRIMMED = "{{ '' }}"  # templates lose a line end that follows a block
PYTHONS = {"True": True, "False": False, "None": None}
OF_A_CALL = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


def with_defaults(tokenizer: PreTrainedTokenizerBase, words: Sequence[str], system: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a changed chat template. words: "name=value" each; system: a message for conversations that
    begin without one. Raise UserError if that is impossible."""
    if not (words or system):
        return tokenizer
    template = tokenizer.chat_template
    if not isinstance(template, str):
        kind = "several chat templates" if template else "no chat template"
        raise UserError(f"--chat-template-args, --system-prompt: the model's tokenizer has {kind}. Save one with it.")
    blocks = [_argument(word, template) for word in words]
    if system:
        first = f"[{{'role': 'system', 'content': {system!r}}}]"
        blocks.append(
            "{% if not messages or messages[0]['role'] not in ['system', 'developer'] %}"
            f"{{% set messages = {first} + messages %}}{{% endif %}}"
        )
    head = "".join(blocks) + UNTRIMMED
    changed = copy.copy(tokenizer)
    if not template.startswith(head):  # a model that was trained with these flags has them
        changed.chat_template = head + template
    if system:
        _check_shown(changed, system)
    return changed


def _argument(word: str, template: str) -> str:
    """Return the block that sets an argument unless a caller does."""
    name, equals, text = word.partition("=")
    if not (equals and name.isidentifier()) or name in OF_A_CALL:
        raise UserError(f"--chat-template-args {word}: give name=value of its own arguments: enable_thinking=false.")
    if not re.search(rf"\b{name}\b", template):
        raise UserError(f"--chat-template-args {word}: the model's chat template does not mention {name}. Check its spelling.")
    return f"{{% if {name} is not defined %}}{{% set {name} = {_value(text)!r} %}}{{% endif %}}"


def _value(text: str) -> Any:
    """Return what the text is as JSON, or in Python's spelling; otherwise the text."""
    if text in PYTHONS:
        return PYTHONS[text]
    try:
        value = json.loads(text, parse_constant=str)
    except ValueError:
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value


def _check_shown(tokenizer: PreTrainedTokenizerBase, system: str) -> None:
    """Raise UserError unless the template shows the system prompt."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    except Exception as error:  # a template may raise anything
        text = f" ({type(error).__name__}: {error})"
        raise UserError(
            f"--system-prompt: the model's chat template refuses system messages{text:.200}. Leave it out."
        ) from None
    if system.strip() not in text:
        raise UserError("--system-prompt: the model's chat template drops system messages. Write it into the prompts.")
