"""The built-in verifiers, compared with human judgements (fixtures/graders.jsonl): right and wrong answers as models write
them, by data source and kind."""

import json
import re

import pytest
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from math_grader.graders import gsm8k, gsm8k_flexible, math_dapo
from rl.rewards.verifiers import BUILT_IN, CODE, exact, verifier, verifier_name

ROWS = [json.loads(line) for line in (ROOT / "tests" / "fixtures" / "graders.jsonl").read_text().splitlines()]


def accuracy(source: str, text: str, truth: str) -> float:
    value = verifier(verifier_name(source))(source, text, truth)
    return value["acc"] if isinstance(value, dict) else value


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['source']}-{row['kind']}-{row['truth']}")
def test_judged_responses(row):
    judged = [(text, 1.0) for text in row["right"]] + [(text, 0.0) for text in row["wrong"]]
    missed = [
        (text[-100:], f"should be {score}") for text, score in judged if accuracy(row["source"], text, row["truth"]) != score
    ]
    assert not missed, f"ground truth {row['truth']}"


def test_the_table_covers_every_verifier_with_right_and_wrong_responses():
    judged = {BUILT_IN[verifier_name(row["source"])] for row in ROWS if row["right"] and row["wrong"]}
    assert judged == set(BUILT_IN.values()) - {"exact", CODE} and sum(len(r["right"]) + len(r["wrong"]) for r in ROWS) > 800


def test_verls_name_math_is_verls_grader():
    """verl serves "math" with DAPO's grader: +1 and -1, and "Answer: " counts before a box."""
    assert verifier(verifier_name("math")) is verifier(verifier_name("math_dapo")) is math_dapo
    assert (
        verifier("math")("math", "Answer: 4", "4")["score"] == 1 and verifier("math")("math", "Answer: 5", "4")["score"] == -1
    )
    assert verifier("math")("math", "Answer: 5\n\\boxed{4}", "4")["score"] == -1


def test_scales():
    assert math_dapo("", "Answer: 4", "4") == {"score": 1, "acc": 1, "undecided": 0, "pred": "4"}
    assert math_dapo("", "4", "4") == {"score": -1, "acc": 0, "undecided": 0}
    assert exact("demo", " 46 ", "46") == 1 and exact("demo", "4 6", "46") == 0
    assert gsm8k("", "#### 7", "72", format_score=0.1)["score"] == 0.1 and gsm8k("", "7", "72", format_score=0.1)["score"] == 0
    assert gsm8k("", "#### 72 or 7", "72", format_score=0.1)["score"] == 0, "two numbers are not the format"


@pytest.mark.parametrize("truth", ["72", 72, 72.0, "70 + 2 = <<70+2=72>>72 in all.\n#### 72", "#### 72", "so\n#### 72.0\n"])
def test_a_ground_truth_may_be_a_number_or_a_whole_answer_of_gsm8k(truth):
    """Otherwise every response scores 0 and no metric says why."""
    assert gsm8k("", "#### 72", truth)["score"] == gsm8k_flexible("", "It is 72", truth) == 1
    assert gsm8k("", "#### 70", truth)["score"] == gsm8k_flexible("", "It is 2", truth) == 0
    assert accuracy("lighteval/MATH", r"\boxed{18}", 18) == accuracy("math_dapo", "Answer: 18", 18) == 1


GEOMETRY = [line.split("\t") for line in (ROOT / "tests" / "fixtures" / "geometry.tsv").read_text().splitlines()[1:]]


@pytest.mark.parametrize(("text", "right", "formed"), GEOMETRY)
def test_geometry_is_scored_as_in_verl(text, right, formed):
    text, right, formed = map(json.loads, (text, right, formed))
    value = verifier(verifier_name("hiyouga/geometry3k"))("hiyouga/geometry3k", text, "5")
    boxes = re.findall(r"box(?:ed)?\s*\{(\w)\}", text)
    preds = {"pred": boxes[-1]} if boxes else {}
    score = pytest.approx(0.9 * right + 0.1 * formed)
    assert value == {"score": score, "acc": right, "format": formed, "undecided": 0} | preds


PIECES = [*"0123456789.,-+$%#{}()[]\\ \n=eExa/^_*:", r"\boxed{", r"\frac", r"\text{", "Answer:", "####", *"½²√\u2212"]


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_no_text_is_too_odd(text):
    """The cheap verifiers run in the rank itself, where an exception would end the run."""
    for response in (text, f"#### {text}"):
        assert gsm8k("", response, "5")["score"] in (0, 1) and gsm8k_flexible("", response, "5") in (0, 1)
