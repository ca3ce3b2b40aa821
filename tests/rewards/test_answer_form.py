"""A response is compared as a text: nothing is evaluated, nothing takes long, and no text is an error."""

import pytest
from helpers import cpu_limit
from hypothesis import example, given, settings
from hypothesis import strategies as st

from math_grader.answers import same
from math_grader.graders import geo3k
from rl.rewards.verifiers import BUILT_IN, CODE, verifier


def paid(grader, answer: str, truth: str) -> bool:
    """Return whether the grader accepts the boxed answer."""
    value = grader("", f"<think>so</think> The answer is $\\boxed{{{answer}}}$.", truth)
    return bool(value["acc"] if isinstance(value, dict) else value)


def test_geometry_takes_a_root_with_square_factors():
    """verl's grader of Geometry3K accepts it; those problems do not ask for a simplified root."""
    assert paid(geo3k, r"\sqrt{884}", r"2\sqrt{221}") and not paid(geo3k, r"\sqrt{884}", r"2\sqrt{222}")
    assert not paid(geo3k, r"\sqrt{25}", "5") and not paid(geo3k, r"\sqrt{30^2-4^2}", r"2\sqrt{221}")


@pytest.mark.parametrize(("rounded", "is_right"), [("3.46", True), ("3.47", False), ("3.45", False)])
def test_what_follows_about_is_a_rounding(rounded, is_right):
    assert paid(verifier("math_dapo"), rf"x = 2\sqrt{{3}} \approx {rounded}", r"2\sqrt{3}") == is_right


# --------------------------------------------------------------------------------------------- degenerate answers

UNITS_WITHOUT_SPACES = (
    r"( ) [ { } | ½ ² √( 9^ 9! - + 1. 1, x x= = < <a> $ $a a$ \ \frac \frac1 \sqrt \sqrt{ \left( \text{ \text{a} "
    r"\boxed{ \boxed{1} \begin{pmatrix} & \\ \cup \sin \overline{1} 1/ x^ {x _ # <think> </think> "
)
UNITS = UNITS_WITHOUT_SPACES.split()
UNITS += ["\\boxed 1 ", "\\int ", "#### ", "Answer: ", "answer ", "answer is ", " "]
UNITS += ["\n", "or ", "and ", "since ", "9e9 ", "1 ", "\ufdfa"]
SHAPES = [
    lambda body: rf"\boxed{{{body}}}",
    lambda body: rf"\boxed{{{body}5}}",
    lambda body: body,
    lambda body: rf"\boxed{{1}}{body}x\boxed{{2}}",
    lambda body: f"Answer: {body}",
    lambda body: f"#### {body}",
    lambda body: f"<think>{body}</think>\\boxed{{{body}",
]


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_degenerate_responses_cost_next_to_nothing(unit):
    """A thousand brackets cost 4 s of CPU time once. The bound is far above what is needed, about a millisecond each."""
    texts = [shape((unit * length)[:length]) for shape in SHAPES for length in (300, 1000, 40_000)]
    with cpu_limit(10):
        for text in texts:
            for grader in {verifier(source) for source in BUILT_IN if BUILT_IN[source] != CODE}:
                value = grader("", text, "5x+7")
                assert (value["acc"] if isinstance(value, dict) else value) == 0


TOWERS = r"9^{9^{9^{9}}} 10^{10^{10}} 2^{100000000} 100000! 9!!!! \binom{1000000}{500000} \sum_{i=1}^{10000000}i (x+1)^{500}"
TOWERS += r" \sqrt{999999999999999999999999999989} \sqrt[99999999]{2} \frac{1}{0} 0^{-1} 1e999"


@pytest.mark.parametrize("tower", TOWERS.split())
def test_nothing_is_evaluated(tower):
    with cpu_limit(5):
        for truth in ("5", r"\frac{1}{2}", "x^2+1", "(1,2)", tower):
            same(tower, truth)
            same(truth, tower)
        assert same(tower, tower) and not same(tower, "5")


PIECES_WITHOUT_SPACES = (
    r"0 1 2 3 4 5 6 7 8 9 . , - + % { } ( ) [ ] | \ = x y i e / ^ _ ! & < > \frac \sqrt \pi \left( \right) \{ \} "
    r"{2} {x} \begin{pmatrix} \end{pmatrix} \\ \infty \text{cm} ½ "
)
PIECES = PIECES_WITHOUT_SPACES.split()
PIECES += [" ", "'", "\\cdot ", "\\pm ", "\\cup ", "\\in ", "\\sin ", " or ", "\\le "]


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.sampled_from(["5", "x+1", "(1,2)", "1,2", r"[0,\infty)", "y=x"]),
)
@example("\\frac1", "5")
def test_every_text_is_compared_without_an_error(text, truth):
    same(text, truth), same(truth, text), same(text, text)
