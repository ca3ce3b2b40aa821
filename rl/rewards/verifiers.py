"""The built-in verifiers, the data sources that each of them serves, and a warning for prompts that do not ask for its format.

A verifier is a function with verl's signature (math_grader/graders.py). rl/rewards/pool.py runs them, or a user's own function.
The packages math_grader and program_grader are imported when a row needs them.
"""

from collections.abc import Callable, Sequence
from typing import Any

CODE = "code"  # --reward code, and the name of its grader
SHARE = 0.9  # of the time for a response that its programs get
LOOKED_AT = 64  # the number of prompts that the warning is based on
BUILT_IN = {  # data_source -> the verifier's name
    "demo": "exact",
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "gsm8k_flexible": "gsm8k_flexible",
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math_verify"),
    **dict.fromkeys(("math", "math_dapo", "math_dapo_reasoning"), "math_dapo"),
    "aime": "math_dapo",  # also for longer names: aime24, aime_2025, ...
    "hiyouga/geometry3k": "geo3k",
    "geo3k": "geo3k",
    **dict.fromkeys((CODE, "apps", "codecontests", "codeforces", "taco"), CODE),
}
# The rank itself runs these: a few string operations, which cannot hang. Scoring processes run everything else: the
# user's function, which may do anything, and the graders of mathematics, which parse whatever the model writes.
HARMLESS = {"exact", "gsm8k", "gsm8k_flexible"}


def verifier_name(data_source: str, reward: str | None = None) -> str | None:
    """Return the name in BUILT_IN of the data_source's verifier; None if there is none. reward: --reward, unless it names the
    user's function."""
    if reward == CODE:
        return CODE
    if data_source in BUILT_IN:
        return data_source
    return "aime" if str(data_source).startswith("aime") else None


def verifier(name: str) -> Callable:
    if (kind := BUILT_IN[name]) in OWN:
        return OWN[kind]
    from math_grader import graders

    return getattr(graders, kind)


def grade(data_source: str, **item: Any) -> float | dict:
    """Return the value of a built-in verifier. data_source: its name in BUILT_IN; item: the verifier's other arguments."""
    return verifier(data_source)(data_source, **item)


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return 1 if the response is the ground truth, else 0. Spaces around both are ignored."""
    return float(solution_str.strip() == str(ground_truth).strip())


def code(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None, seconds_in_all: float = 10.0
) -> dict:
    """Return the fraction of the ground truth's tests that the response's program passes, in a sandbox. seconds_in_all: the
    time for all its tests."""
    from program_grader import grade

    return grade(solution_str, ground_truth, seconds_in_all=SHARE * seconds_in_all)


OWN = {"exact": exact, CODE: code}


def format_of(data_source: str) -> Any:
    """Return the format that prompts of this source must ask for, a Format of math_grader/graders.py; None if its grader needs
    none, or if there is no grader."""
    kind = BUILT_IN.get(verifier_name(data_source), "exact")
    if kind in OWN:
        return None
    from math_grader.graders import FORMATS

    return FORMATS.get(kind)


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
