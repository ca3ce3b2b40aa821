"""The built-in verifiers: graders of responses, and which of them serves which data source.

A verifier is a function (data_source, solution_str, ground_truth, extra_info) -> float, or a dict with "score" and further
numbers: verl's signature. Who runs them, and a user's own function: rl/rewards/pool.py.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rl.rewards.answers import BOX, answer_line, boxed, canonical, hash_line, last_number, number, quantity, same
from rl.rewards.programs.args import CODE, CodeArgs


def gsm8k(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, format_score: float = 0.0
) -> float:
    """1 if what follows the last "####" within the last 300 characters is the ground truth, format_score if it is another
    number, 0 if it is none.

    verl's strict method, which takes the first number there, but for: "#### $18", "18.0", "**18**", "x = 18" count, "####18",
    too; "#### 18 or 3" is no number. Numbers are compared as numbers.
    """
    line = hash_line(solution_str[-300:])
    given = None if line is None else _number(line.rstrip("!"))
    if given is None:
        return 0.0
    return 1.0 if given == _truth(ground_truth) else format_score


def gsm8k_flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 if the last number of the response is the ground truth, else 0: verl's flexible method, but compared as numbers."""
    given = last_number(solution_str)
    return float(given is not None and given == _truth(ground_truth))


def _truth(ground_truth: str) -> Fraction | None:
    """A whole answer of GSM8K's, as its own files have it, counts by what follows its "####"."""
    return _number(str(ground_truth).rpartition("####")[2])


def _number(text: str) -> Fraction | None:
    text = canonical(text)
    value = number(text)
    return quantity(text) if value is None else value


def math_verify(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    r"""1 if the last \boxed{} (or without any, the last line "Answer: ...") is the ground truth, else 0.

    verl's grader of MATH compares spellings. This one takes what it takes, and other spellings of the same result. Like verl's
    it computes nothing for the answer: \boxed{\binom{8}{4}} is not 70.
    """
    answer = boxed(solution_str) if BOX.search(solution_str) else answer_line(solution_str)
    return float(answer is not None and same(answer, str(ground_truth)))


def math_dapo(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""+1 if the last "Answer: ..." (or without any, the last \boxed{}) is the ground truth, else -1; DAPO's
    scale (arXiv 2503.14476). acc is 1 or 0.

    verl's grader compares spellings, within the last 300 characters, of "Answer:" alone; this one takes what it takes.
    """
    answer = answer_line(solution_str) or boxed(solution_str)
    right = float(answer is not None and same(answer, str(ground_truth)))
    return {"score": 2 * right - 1, "acc": right}


def geo3k(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""0.9 accuracy + 0.1 format, as verl scores it; the format is <think>...</think>...\boxed{...}..., over the whole
    response: nothing may stand before <think>, not even a blank."""
    answer = boxed(solution_str)
    right = float(answer is not None and same(answer, str(ground_truth), any_root=True))
    well_formed = float(_has_geo3k_format(solution_str))
    return {"score": 0.9 * right + 0.1 * well_formed, "acc": right, "format": well_formed}


def _has_geo3k_format(text: str) -> bool:
    r"""Whether it is <think>.*</think>.*\boxed{.*}.* from the first to the last character, found without going back."""
    if not text.startswith("<think>"):
        return False
    at = len("<think>")
    for mark in ("</think>", "\\boxed{", "}"):
        at = text.find(mark, at)
        if at < 0:
            return False
        at += len(mark)
    return True


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 if the response, stripped, is the ground truth."""
    return float(solution_str.strip() == str(ground_truth).strip())


def code(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None, limits: dict | None = None
) -> dict:
    """The fraction of the tests of the ground truth that the response's program passes, in a sandbox: see
    rl/rewards/programs/grade.py. limits: of CodeArgs."""
    from rl.rewards.programs.grade import grade  # late: of use to those alone who train on programs

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
    "aime": math_dapo,  # and every name that begins so: aime24, aime_2025, ...
    "hiyouga/geometry3k": geo3k,
    "geo3k": geo3k,
    CODE: code,
    **dict.fromkeys(("apps", "codecontests", "codeforces", "taco"), code),
}
# A few string operations that cannot hang: scored at once. Everything else goes to the pool: the user's function, which may
# do anything, and the graders of mathematics, which read a notation of the model's choice.
HARMLESS = {exact, gsm8k, gsm8k_flexible}


def verifier_name(data_source: str, reward: str | None = None) -> str | None:
    """The name in BUILT_IN that serves the data_source; None if none does. reward: --reward, unless it is the user's own."""
    if reward == CODE:
        return CODE
    if data_source in BUILT_IN:
        return data_source
    return "aime" if str(data_source).startswith("aime") else None
