"""Verifiers by hand-made examples."""

import pytest

from rl.verifiers import exact, geo3k, gsm8k, gsm8k_flexible, math_dapo, math_verify


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("so it is\n#### 72", "72", 1, 1),
        ("#### 71 no, wait\n#### 72", "72", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### -5", "-5", 1, 1),
        ("####72", "72", 0, 1),  # the format asks for the blank
        ("the answer is 72.", "72", 0, 1),
        ("#### 72" + "x" * 300, "72", 0, 1),  # only the last 300 characters count
        ("#### 7", "72", 0, 0),
        ("", "72", 0, 0),
    ],
)
def test_gsm8k(text, truth, strict, flexible):
    assert gsm8k("", text, truth) == strict
    assert gsm8k_flexible("", text, truth) == flexible


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        (r"thus \boxed{\frac{1}{2}}", "0.5", 1),
        (r"thus \boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{3}", "4", 0),
        ("Answer: 42", "42", 1),
        ("Answer: $42$", "42", 1),
        ("42", "42", 0),
        ("", "42", 0),
        (r"\boxed{3}, no: \boxed{4}", "4", 1),  # the last one counts
        (r"\boxed{4}, no: \boxed{3}", "4", 0),
        (r"it is 42 \boxed{", "42", 0),  # no number of the text may leak in through a box that holds none
        (r"it is 42 \boxed{}", "42", 0),
        (r"$42$, so \boxed{5}", "42", 0),
        (r"Answer: 42, or \boxed{5}", "42", 0),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}{2}", 1),
    ],
)
def test_math(text, truth, right):
    assert math_verify("", text, truth) == right
    assert math_dapo("", text, truth) == {"score": 2 * right - 1, "acc": right}


def test_geo3k_and_demo():
    assert geo3k("", r"<think>a</think> so \boxed{5}.", "5")["score"] == pytest.approx(1.0)
    assert geo3k("", r"so \boxed{5}.", "5")["score"] == pytest.approx(0.9)
    assert geo3k("", r"<think>a</think> so \boxed{6}.", "5")["score"] == pytest.approx(0.1)
    assert geo3k("", "5", "5")["score"] == 0
    assert exact("demo", " 46 ", "46") == 1 and exact("demo", "4 6", "46") == 0
