"""Graders of whole responses, and the formats that prompts must ask for, as in verl's data.

A grader has verl's signature, (data_source, solution_str, ground_truth, extra_info) -> float, or a dict with "score", further
numbers, and "pred", the answer that it has found.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from math_grader.answers import answer_line, hash_line, is_number, last_number, same
from math_grader.box import boxed
from math_grader.text import BOX, NotUnderstood

GEO3K = re.compile(r"<think>(?>.*?</think>)(?>.*?\\boxed\{).*?\}", re.DOTALL)  # atomic groups: the time is linear


def gsm8k(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, format_score: float = 0.0
) -> dict:
    """Return a score of 1 if the ground truth follows the last "####" in the last 300 characters, format_score if another
    number does, else 0.

    This is verl's strict method with two differences. It compares numbers, so "#### $18", "18.0", "**18**", "x = 18" and
    "####18" are right if 18 is. "#### 18 or 3" is not a number, while verl reads the first one.
    """
    line = hash_line(solution_str[-300:])
    if line is None:
        return graded(0.0, False)
    right = same(line, truth_of_gsm8k(ground_truth), prose=True)
    is_format = format_score and right is False and is_number(line)
    return graded(1.0 if right else format_score if is_format else 0.0, right, line)


def gsm8k_flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return 1 if the last number of the response is the ground truth, else 0. This is verl's flexible method, but it compares
    numbers. It reads no words: "at least 18" is 18."""
    given = last_number(solution_str)
    return float(given is not None and given == last_number(truth_of_gsm8k(ground_truth)))


def truth_of_gsm8k(ground_truth: str) -> str:
    """Return the number of a ground truth, which may be a whole answer with "####" before the number, as in GSM8K's files."""
    return str(ground_truth).rpartition("####")[2]


def graded(score: float, right: bool | None, answer: str | None = None, **more: float) -> dict:
    """Return a score with acc, undecided, and pred: the answer, if one was found. undecided is 1 for an answer that the grader
    cannot decide, so that a person sees how many there are (reward/extra/undecided/mean)."""
    pred = {} if answer is None else {"pred": answer.strip()}
    return {"score": score, "acc": float(right is True), "undecided": float(right is None), **more, **pred}


def math_verify(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""Return a score of 1 if the last \boxed{} (without any, the last line "Answer: ...") is the ground truth, else 0.

    verl's grader of MATH compares spellings. This one accepts other spellings of the same result, too. Neither computes
    anything for the answer: \boxed{\binom{8}{4}} is not 70.
    """
    right, answer = _right(solution_str, ground_truth, boxed if BOX.search(solution_str) else answer_line)
    return graded(float(right is True), right, answer)


def _right(
    solution_str: str, ground_truth: Any, find: Callable[[str], str | None], any_root: bool = False
) -> tuple[bool | None, str | None]:
    """Return whether the answer that `find` finds is right, False without one, None if that cannot be decided; and the
    answer."""
    try:
        answer = find(solution_str)
    except NotUnderstood:
        return None, None
    return (False, None) if answer is None else (same(answer, str(ground_truth), any_root), answer)


def math_dapo(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""Return a score of 1 if the last "Answer: ..." (without any, the last \boxed{}) is the ground truth, else -1: DAPO's
    scale (arXiv 2503.14476).

    verl's grader compares spellings, and only after "Answer:" in the last 300 characters.
    """
    right, answer = _right(solution_str, ground_truth, lambda text: answer_line(text) or boxed(text))
    return graded(1.0 if right else -1.0, right, answer)


def geo3k(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""Return 0.9 accuracy + 0.1 format, as in verl. The whole response must have the form <think>...</think>...\boxed{...}...:
    nothing may precede <think>, not even a space."""
    right, answer = _right(solution_str, ground_truth, boxed, any_root=True)
    well_formed = float(GEO3K.match(solution_str) is not None)
    return graded(0.9 * bool(right) + 0.1 * well_formed, right, answer, format=well_formed)


class Format(NamedTuple):
    before: str  # precedes the problem
    after: str  # follows the problem
    marks: tuple[str, ...]  # a prompt with one of these asks for the format

    def prompt(self, problem: str) -> str:
        return f"{self.before}{problem}{self.after}"


FORMATS = {
    "gsm8k": Format("", ' Let\'s think step by step and output the final answer after "####".', ("####",)),
    "math_verify": Format(
        "", " Let's think step by step and output the final answer within \\boxed{}.", ("\\boxed", "Answer:")
    ),
    "math_dapo": Format(
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
        "(without quotes) where $Answer is the answer to the problem.\n\n",
        '\n\nRemember to put your answer on its own line after "Answer:".',
        ("Answer:", "\\boxed"),
    ),
    "geo3k": Format(
        "",
        " You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
        "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}.",
        ("\\boxed",),
    ),
}
