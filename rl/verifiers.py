"""The built-in verifiers: graders of responses, and which of them serves which data source.

A verifier is a function (data_source, solution_str, ground_truth, extra_info) -> float, or a dict with "score" and further
numbers: verl's signature. Who runs them, and a user's own function: rl/scoring.py.
"""

import logging
import re
from collections.abc import Callable


def gsm8k(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, format_score: float = 0.0
) -> float:
    """1 if the last "#### number" within the last 300 characters is the ground truth, format_score if it is another number,
    0 if there is none (verl's strict method)."""
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str[-300:])
    clean = lambda text: str(text).replace(",", "").replace("$", "")  # noqa: E731
    if not found:
        return 0.0
    return 1.0 if clean(found[-1]) == clean(ground_truth) else format_score


def gsm8k_flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 if the last number of the response is the ground truth, else 0."""
    found = [n.rstrip(".,").replace(",", "") for n in re.findall(r"-?[0-9][0-9.,]*", solution_str)]
    return float(bool(found) and found[-1] == str(ground_truth).replace(",", "").replace("$", ""))


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds; None if there is none or its brace is never closed."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for i in range(start + len(r"\boxed"), len(text) if start >= 0 else 0):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + len(r"\boxed{") : i]
    return None


def math_verify(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    r"""1 if the last \boxed{} (or without any, the last line "Answer: ...") equals the ground truth as mathematics, else 0."""
    from math_verify import parse, verify

    # Only the marked answer is parsed: math-verify would otherwise take any number of the text, or all boxes at once.
    answer = last_boxed(solution_str)
    if r"\boxed" not in solution_str and (lines := re.findall(r"(?im)^\s*answer\s*:\s*(.+?)\s*$", solution_str)):
        answer = lines[-1].strip("$ ")
    if not (answer and answer.strip()):
        return 0.0
    # No time limits of its own: they are signals, and the pool has one. It would warn of that in every process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(rf"\boxed{{{ground_truth}}}", parsing_timeout=None)
    return float(verify(gold, parse(rf"\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None))


def math_dapo(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    """math_verify as +1 / -1, DAPO's scale (arXiv 2503.14476); acc stays 1 / 0."""
    right = math_verify(data_source, solution_str, ground_truth)
    return {"score": 2 * right - 1, "acc": right}


def geo3k(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""0.9 accuracy + 0.1 format; the format is <think>...</think>...\boxed{...}..., over the whole response."""
    right = math_verify(data_source, solution_str, ground_truth) if r"\boxed" in solution_str else 0.0
    well_formed = float(bool(re.fullmatch(r"(?s)\s*<think>.*</think>.*\\boxed\{.*\}.*", solution_str)))
    return {"score": 0.9 * right + 0.1 * well_formed, "acc": right, "format": well_formed}


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 if the response, stripped, is the ground truth."""
    return float(solution_str.strip() == str(ground_truth).strip())


BUILT_IN: dict[str, Callable] = {
    "demo": exact,
    "openai/gsm8k": gsm8k,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "lighteval/MATH": math_verify,
    "DigitalLearningGmbH/MATH-lighteval": math_verify,
    "HuggingFaceH4/MATH-500": math_verify,
    "math": math_verify,
    "math_dapo": math_dapo,
    "math_dapo_reasoning": math_dapo,
    "aime": math_dapo,  # and every name that begins so: aime24, aime_2025, ...
    "hiyouga/geometry3k": geo3k,
    "geo3k": geo3k,
}
# A few string operations that cannot hang: scored at once. Everything else goes to the pool: the user's function, which may
# do anything, and math, where a response of the model's choice is handed to sympy and can keep it busy for ever.
HARMLESS = {exact, gsm8k, gsm8k_flexible}


def verifier_name(data_source: str) -> str | None:
    """The name in BUILT_IN that serves the data_source; None if none does."""
    if data_source in BUILT_IN:
        return data_source
    return "aime" if str(data_source).startswith("aime") else None
