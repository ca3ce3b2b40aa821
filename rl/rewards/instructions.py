"""Prompt instructions that ask for the answer formats of the built-in graders, as in verl's data.

rl/rewards/verifiers.py says what each grader looks for. examples/make_data.py adds these instructions to prompts, and a run
warns if they are missing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rl.rewards import verifiers
from rl.rewards.verifiers import BUILT_IN, verifier_name

LOOKED_AT = 64  # the number of prompts that the warning is based on


class Format(NamedTuple):
    before: str  # precedes the problem
    after: str  # follows the problem
    marks: tuple[str, ...]  # a prompt with one of these asks for the format

    def prompt(self, problem: str) -> str:
        return f"{self.before}{problem}{self.after}"


FORMATS: dict[Callable, Format] = {
    verifiers.gsm8k: Format("", ' Let\'s think step by step and output the final answer after "####".', ("####",)),
    verifiers.math_verify: Format(
        "", " Let's think step by step and output the final answer within \\boxed{}.", ("\\boxed", "Answer:")
    ),
    verifiers.math_dapo: Format(
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
        "(without quotes) where $Answer is the answer to the problem.\n\n",
        '\n\nRemember to put your answer on its own line after "Answer:".',
        ("Answer:", "\\boxed"),
    ),
    verifiers.geo3k: Format(
        "",
        " You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
        "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}.",
        ("\\boxed",),
    ),
}


def format_of(data_source: str) -> Format | None:
    """Return the format that prompts of this source must ask for; None if its grader needs none, or if there is no grader."""
    return FORMATS.get(BUILT_IN.get(verifier_name(data_source)))


def unasked(prompts: Sequence) -> list[str]:
    """Return a warning for each data_source whose first prompts never ask for the format that its built-in grader needs."""
    seen: dict[str, list[str]] = {}
    for index in range(min(len(prompts), LOOKED_AT)):
        prompt = prompts[index]
        seen.setdefault(prompt.data_source, []).append(prompt.text)
    return [
        f"none of the first {len(texts)} prompts of {source!r} asks for {' or '.join(wanted.marks)}, without which its grader "
        f"finds no answer. Add an instruction such as {wanted.after.strip()!r} to the prompts (examples/make_data.py does), or "
        "give your own --reward."
        for source, texts in seen.items()
        if (wanted := format_of(source)) and not any(mark in text for mark in wanted.marks for text in texts)
    ]
