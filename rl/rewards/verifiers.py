"""The built-in verifiers, and the data sources that each of them serves.

A verifier is a function with verl's signature, (data_source, solution_str, ground_truth, extra_info) -> float, or a dict with
"score" and further numbers. rl/rewards/pool.py runs them, or a user's own function.
"""

import re
from collections.abc import Callable
from typing import Any

from math_grader.answers import answer_line, hash_line, is_number, last_number, same
from math_grader.box import boxed
from math_grader.text import BOX, NotUnderstood
from rl.rewards.args import CODE, CodeArgs

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
    return graded(1.0 if right else format_score if is_format else 0.0, right)


def gsm8k_flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return 1 if the last number of the response is the ground truth, else 0. This is verl's flexible method, but it compares
    numbers. It reads no words: "at least 18" is 18."""
    given = last_number(solution_str)
    return float(given is not None and given == last_number(truth_of_gsm8k(ground_truth)))


def truth_of_gsm8k(ground_truth: str) -> str:
    """Return the number of a ground truth, which may be a whole answer with "####" before the number, as in GSM8K's files."""
    return str(ground_truth).rpartition("####")[2]


def graded(score: float, right: bool | None, **more: float) -> dict:
    """Return a score with acc, and undecided: 1 for an answer that the grader cannot decide, so that a person sees how many
    there are (reward/extra/undecided/mean)."""
    return {"score": score, "acc": float(right is True), "undecided": float(right is None), **more}


def math_verify(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""Return a score of 1 if the last \boxed{} (without any, the last line "Answer: ...") is the ground truth, else 0.

    verl's grader of MATH compares spellings. This one accepts other spellings of the same result, too. Neither computes
    anything for the answer: \boxed{\binom{8}{4}} is not 70.
    """
    right = _right(solution_str, ground_truth, boxed if BOX.search(solution_str) else answer_line)
    return graded(float(right is True), right)


def _right(solution_str: str, ground_truth: Any, find: Callable[[str], str | None], any_root: bool = False) -> bool | None:
    """Return whether the answer that `find` finds is right: False without one, None if that cannot be decided."""
    try:
        answer = find(solution_str)
    except NotUnderstood:
        return None
    return False if answer is None else same(answer, str(ground_truth), any_root)


def math_dapo(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""Return a score of 1 if the last "Answer: ..." (without any, the last \boxed{}) is the ground truth, else -1: DAPO's
    scale (arXiv 2503.14476).

    verl's grader compares spellings, and only after "Answer:" in the last 300 characters.
    """
    right = _right(solution_str, ground_truth, lambda text: answer_line(text) or boxed(text))
    return graded(1.0 if right else -1.0, right)


def geo3k(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""Return 0.9 accuracy + 0.1 format, as in verl. The whole response must have the form <think>...</think>...\boxed{...}...:
    nothing may precede <think>, not even a space."""
    right = _right(solution_str, ground_truth, boxed, any_root=True)
    well_formed = float(GEO3K.match(solution_str) is not None)
    return graded(0.9 * bool(right) + 0.1 * well_formed, right, format=well_formed)


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return 1 if the response is the ground truth, else 0. Spaces around both are ignored."""
    return float(solution_str.strip() == str(ground_truth).strip())


def code(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None, limits: dict | None = None
) -> dict:
    """Return the fraction of the ground truth's tests that the response's program passes, in a sandbox
    (rl/rewards/programs/grade.py). limits: as CodeArgs.limits returns them."""
    from rl.rewards.programs.grade import grade  # late: only programs need it

    return grade(solution_str, ground_truth, limits or CodeArgs().limits(in_all=10.0))


BUILT_IN: dict[str, Callable] = {
    "demo": exact,
    "openai/gsm8k": gsm8k,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "lighteval/MATH": math_verify,
    "DigitalLearningGmbH/MATH-lighteval": math_verify,
    "HuggingFaceH4/MATH-500": math_verify,
    "math": math_dapo,
    "math_dapo": math_dapo,
    "math_dapo_reasoning": math_dapo,
    "aime": math_dapo,  # also for longer names: aime24, aime_2025, ...
    "hiyouga/geometry3k": geo3k,
    "geo3k": geo3k,
    CODE: code,
    **dict.fromkeys(("apps", "codecontests", "codeforces", "taco"), code),
}
# The rank itself runs these: a few string operations, which cannot hang. Scoring processes run everything else: the
# user's function, which may do anything, and the graders of mathematics, which parse whatever the model writes.
HARMLESS = {exact, gsm8k, gsm8k_flexible}


def verifier_name(data_source: str, reward: str | None = None) -> str | None:
    """Return the name in BUILT_IN of the data_source's verifier; None if there is none. reward: --reward, unless it names the
    user's function."""
    if reward == CODE:
        return CODE
    if data_source in BUILT_IN:
        return data_source
    return "aime" if str(data_source).startswith("aime") else None
