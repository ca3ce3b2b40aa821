"""Prompts that a teacher reads in the place of the policy's (--teacher-prompt): with the answer, a solution or a hint in them.

A template takes the place of the text of a prompt's last message, or of a prompt that is a string:

    {prompt} Here is a solution: {answer} Now solve it yourself.

{prompt} is the text that it replaces, {ground_truth} the row's ground truth, and every other name a column or a key of
extra_info. What is put in is not read again, and braces around anything but a name stay. Left out: images.
"""

import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

from rl.data.prompts import Measured, PromptDataset, PromptOrder, Text
from rl.data.tables import ground_truth
from rl.errors import UserError

NAME = re.compile(r"\{(\w+)\}")


class TeacherPrompts(PromptDataset):
    """A PromptDataset's rows with the teacher's prompts. Raises UserError for a row that does not fit the template."""

    def __init__(self, prompts: PromptDataset, template: str):
        """With --filter-overlong-prompts, rows whose prompts for the teacher are too long leave `prompts`, too."""
        vars(self).update(vars(prompts))
        self.policys, self.template = prompts, template
        kept = {*self._measure("the teacher's prompts").kept}
        self.rows = prompts.rows = array("q", (row for row in prompts.rows if row in kept))
        if not self.rows:
            raise UserError(f"no prompt of the teacher is left at --max-prompt-length {self.args.max_prompt_length}. Raise it.")

    def ids_of(self, order: PromptOrder, ticket: int, prompt_ids: list[int]) -> list[int]:
        """The ticket's prompt for the teacher. prompt_ids: what its generator sampled from, or UserError is raised."""
        _, index = order(ticket)
        row = self.policys[index]
        if row.ids != prompt_ids:
            raise UserError(
                f"{row.where}: the responses of ticket {ticket} follow another prompt. With --teacher-prompt all ranks must "
                "see the same files, and the reset of an --env must not add to the prompt."
            )
        return self[index].ids

    def in_words(self) -> str:
        """The first prompt, in a line."""
        first = self[0]
        return f"the teacher reads of {first.where}: {first.text!r}"

    def _render(self, where: str, row: dict) -> Text:
        """The row's prompt as the teacher will read it."""
        asked = self._asked(row)
        if not asked:
            raise UserError(f"{where}: the row has no prompt, which --teacher-prompt is put into. Leave the flag out.")
        if isinstance(asked, str):
            asked = self._filled(where, row, asked)
        else:
            *before, last = asked
            asked = [*before, last | {"content": self._filled(where, row, last["content"])}]
        return super()._render(where, row | {self.args.prompt_key: asked})

    def _filled(self, where: str, row: dict, prompt: str) -> str:
        extra = row.get("extra_info")
        known = extra if isinstance(extra, dict) else {}
        known = known | row | {"ground_truth": ground_truth(row), "prompt": prompt}

        def value(found: re.Match) -> str:
            name = found[1]
            if known.get(name) is None:
                names = ", ".join(sorted(name for name, value in known.items() if value is not None))
                raise UserError(f"{where}: nothing is there for {{{name}}} of --teacher-prompt. The row has {names}.")
            return _text(known[name])

        return NAME.sub(value, self.template)

    def _wanted(self, columns: Sequence[str]) -> list[str]:
        return [*columns]

    def _measure_row(self, found: Measured, row: int, columns: dict, text: Text, ids: list[int]) -> None:
        limit = self.args.max_prompt_length
        if len(ids) <= limit:
            found.kept.append(row)
        elif not self.args.filter_overlong_prompts:
            raise UserError(
                f"{self._where(row)}: the teacher's prompt has {len(ids)} tokens, more than {limit}. Raise "
                "--max-prompt-length, or leave such rows out with --filter-overlong-prompts."
            )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
