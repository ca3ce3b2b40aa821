"""A response's score, or the event that kept it from being scored; the built-in verifiers, and a warning for prompts that
do not ask for their format.

A verifier is a function with verl's signature (math_grader/graders.py), for some data sources. The packages math_grader and
program_grader are imported when a row needs them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.printable import one_line
from rl.ranges import LARGEST_FLOAT
from rl.rewards.args import CODE

OUT = "outage"  # of a grader (rl/rewards/outages.py)
EVENTS = ("timeout", "error", "bad_value", "died", "image", OUT)  # image: an image of the prompt is damaged
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


@dataclass(frozen=True)
class Score:
    score: float | None  # None if an event kept the response from being scored
    extra: dict[str, float] = field(default_factory=dict)
    event: str | None = None  # one of EVENTS
    message: str = ""  # of the event
    pred: str | None = None  # the answer that the grader found, for the majority vote of a validation

    @property
    def error(self) -> str | None:
        """The event with its message; None without an event."""
        return f"{self.event}: {self.message}" if self.event else None


GREEDY = "the greedy response: "  # begins the error of responses whose baseline could not be scored


def event_of(error: str) -> str:
    """Return the event of a response's error (`Score.error`)."""
    return error.removeprefix(GREEDY).partition(":")[0]


class ScoringEvents:
    """The number of responses that could not be scored so far, by kind: those of the steps, and those of validations."""

    def __init__(self):
        self._counts: Counter[str] = Counter()

    def add(self, errors: Iterable[str]) -> None:
        """Count the responses with these errors (`Score.error`)."""
        self._counts.update(map(event_of, errors))

    def metrics(self) -> dict[str, int]:
        return {f"reward/events/{kind}": self._counts[kind] for kind in EVENTS}

    def state(self) -> dict[str, int]:
        return dict(self._counts)

    def restore(self, state: dict[str, int]) -> None:
        self._counts = Counter(state)


def as_score(value: Any) -> Score:
    """Return a reward function's return value as a Score; anything but a finite fp32 number is a bad_value event."""
    is_dict = isinstance(value, dict)
    score = value.get("score") if is_dict else value
    if not (_is_number(score) and abs(score) <= LARGEST_FLOAT):
        fault = 'which has no finite number under "score"' if is_dict else "not a finite number of fp32"
        return Score(None, event="bad_value", message=one_line(f"the reward function returned {value!r:.100}, {fault}"))
    extra = {name: float(its) for name, its in value.items() if name != "score" and _is_number(its)} if is_dict else {}
    pred = value.get("pred") if is_dict else None
    return Score(float(score), extra, pred=None if pred is None else " ".join(str(pred).split()))


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, bool | int | float) and math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False


def overlong_penalty(length: int, max_response_length: int, buffer_len: int, factor: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in [-factor, 0]: 0 up to max_response_length -
    buffer_len tokens, falling linearly from there."""
    if buffer_len <= 0:
        return 0.0
    over = length - (max_response_length - buffer_len)
    return min(-over / buffer_len * factor, 0.0)


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
