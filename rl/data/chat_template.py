"""--chat-template-args and --system-prompt: defaults that are written into the model's chat template.

So they hold wherever a conversation becomes tokens: prompts, turns of episodes, calls of agents, demonstrations. A checkpoint
has them too: whoever serves it formats prompts as in training. Arguments that a caller gives go before these.
"""

import json
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rl.errors import UserError

UNTRIMMED = "{{ '' }}"  # templates lose a line end that follows a block


def set_defaults(tokenizer: PreTrainedTokenizerBase, words: Sequence[str], system: str | None) -> None:
    """Change the tokenizer's chat template. words: "name=value" each; system: a message for conversations that begin without
    one. Raise UserError if that is impossible."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        kind = "several chat templates" if template else "no chat template"
        raise UserError(
            f"--chat-template-args and --system-prompt need one chat template, and the model's tokenizer has {kind}."
        )
    blocks = [_argument(word, template) for word in words]
    if system:
        first = f"[{{'role': 'system', 'content': {system!r}}}]"
        blocks.append(
            "{% if not messages or messages[0]['role'] not in ['system', 'developer'] %}"
            f"{{% set messages = {first} + messages %}}{{% endif %}}"
        )
    tokenizer.chat_template = "".join(blocks) + UNTRIMMED + template


def _argument(word: str, template: str) -> str:
    """Return the block that sets an argument unless a caller does."""
    name, equals, text = word.partition("=")
    if not (equals and name.isidentifier()):
        raise UserError(f"--chat-template-args {word}: give name=value, such as enable_thinking=false.")
    if not re.search(rf"\b{name}\b", template):
        raise UserError(f"--chat-template-args {word}: the model's chat template does not mention {name}. Check its spelling.")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
