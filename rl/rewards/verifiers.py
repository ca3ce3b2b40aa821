"""The built-in verifiers, and the data sources that each of them serves.

A verifier is a function with verl's signature, (data_source, solution_str, ground_truth, extra_info) -> float, or a dict with
"score" and further numbers. rl/rewards/pool.py runs them, or a user's own function.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rl.rewards.answers import BOX, answer_line, boxed, canonical, hash_line, last_number, number, quantity, same
from rl.rewards.args import CODE, CodeArgs

GEO3K = re.compile(r"<think>(?>.*?</think>)(?>.*?\\boxed\{).*?\}", re.DOTALL)  # atomic groups: the time is linear


def gsm8k(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, format_score: float = 0.0
) -> float:
    """Return 1 if the ground truth follows the last "####" in the last 300 characters, format_score if another number does,
    else 0.

    This is verl's strict method with two differences. It compares numbers, so "#### $18", "18.0", "**18**", "x = 18" and
    "####18" are right if 18 is. "#### 18 or 3" is not a number, while verl reads the first one.
    """
    line = hash_line(solution_str[-300:])
    given = None if line is None else _number(line.rstrip("!"))
    if given is None:
        return 0.0
    return 1.0 if given == _truth(ground_truth) else format_score


def gsm8k_flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return 1 if the last number of the response is the ground truth, else 0. This is verl's flexible method, but it compares
    numbers."""
    given = last_number(solution_str)
    return float(given is not None and given == _truth(ground_truth))


def _truth(ground_truth: str) -> Fraction | None:
    """Return the number of a ground truth, which may be a whole answer with "####" before the number, as in GSM8K's files."""
    return _number(str(ground_truth).rpartition("####")[2])


def _number(text: str) -> Fraction | None:
    text = canonical(text)
    value = number(text)
    return quantity(text) if value is None else value


def math_verify(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    r"""Return 1 if the last \boxed{} (without any, the last line "Answer: ...") is the ground truth, else 0.

    verl's grader of MATH compares spellings. This one accepts everything that verl's does, and other spellings of the same
    result. Neither computes anything for the answer: \boxed{\binom{8}{4}} is not 70.
    """
    answer = boxed(solution_str) if BOX.search(solution_str) else answer_line(solution_str)
    return float(answer is not None and same(answer, str(ground_truth)))


def math_dapo(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""Return 1 if the last "Answer: ..." (without any, the last \boxed{}) is the ground truth, else -1: DAPO's scale (arXiv
    2503.14476). acc is 1 or 0.

    verl's grader compares spellings, and only after "Answer:" in the last 300 characters. This one accepts everything that
    verl's does.
    """
    answer = answer_line(solution_str) or boxed(solution_str)
    right = float(answer is not None and same(answer, str(ground_truth)))
    return {"score": 2 * right - 1, "acc": right}


def geo3k(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""Return 0.9 accuracy + 0.1 format, as in verl. The whole response must have the form <think>...</think>...\boxed{...}...:
    nothing may precede <think>, not even a space."""
    answer = boxed(solution_str)
    right = float(answer is not None and same(answer, str(ground_truth), any_root=True))
    well_formed = float(GEO3K.match(solution_str) is not None)
    return {"score": 0.9 * right + 0.1 * well_formed, "acc": right, "format": well_formed}


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
