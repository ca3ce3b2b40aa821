"""The built-in verifiers, compared with human judgements (fixtures/graders.jsonl). Wrong answers are never paid: ordered pairs
of different ones, and generated ones (wrong_answers.py). Right ones are: a table of spellings, and published solutions. None is
evaluated, takes long, or is an error."""

import json
import os
import re
from itertools import permutations, product
from pathlib import Path

import pytest
from helpers import GSM8K, ROOT, cpu_limit
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wrong_answers import wrong_answers

from math_grader.answers import same
from math_grader.graders import geo3k, gsm8k, gsm8k_flexible, math_dapo, math_verify
from rl.rewards.args import CODE
from rl.rewards.score import BUILT_IN, exact, verifier, verifier_name

ROWS = [json.loads(line) for line in (ROOT / "tests" / "fixtures" / "graders.jsonl").read_text().splitlines()]
GEO3K = Path(os.environ.get("RL_GEO3K", ROOT.parent / "shared" / "data" / "geo3k"))  # train.parquet
SHAPES = [  # where each grader looks for the answer
    (gsm8k, "#### {}"),
    (math_verify, "so $\\boxed{{{}}}$."),
    (math_dapo, "Answer: {}"),
    (geo3k, "<think>a</think> \\boxed{{{}}}"),
]
EQUIVALENT = [  # ground truths of the fixture that are the same answer, by hand
    {r"\frac{1}{2}", r"\frac12"},
    {"12.5", r"12.5\%"},
    {"x>3", r"(3,\infty)"},
    {"2x+3", "y=2x+3"},
    {"70", r"\binom{8}{4}"},
    {r"\frac{1}{3}", r"0.\overline{3}"},
    {r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"},
    {"33", "033"},
]


def paid_texts(count: int, seed: int) -> list[tuple[str, str, str, str]]:
    """Return the wrong answers that some grader pays, of `count` generated ones."""
    found = []
    for i, (kind, text, truth) in enumerate(wrong_answers(seed, count)):
        grader, shape = SHAPES[i % len(SHAPES)]
        if grader("", shape.format(text), truth)["acc"]:
            found.append((grader.__name__, kind, text, truth))
    return found


@pytest.mark.parametrize(("count", "seed"), [(2000, 11), pytest.param(40_000, 12, marks=pytest.mark.slow)])
def test_none_of_thousands_of_wrong_answers_is_paid(count, seed):
    with cpu_limit(60 * count / 2000):
        assert paid_texts(count, seed) == []


@pytest.mark.slow
def test_different_answers_never_pay_for_each_other():
    """All ordered pairs of the fixture's ground truths: 37,056 pairs of right answers found four holes once."""
    truths = sorted({str(row["truth"]) for row in ROWS})
    equal = {pair for group in EQUIVALENT for pair in permutations(group, 2)}
    assert len(truths) > 100 and len(equal & set(permutations(truths, 2))) == 2 * len(EQUIVALENT)
    assert [(a, b) for a, b in permutations(truths, 2) if same(a, b) and (a, b) not in equal] == []


@pytest.mark.slow
def test_right_spellings_never_pay_for_another_answer():
    """Every labelled right response, against the ground truth of every other row of its source."""
    by_source: dict[str, list[dict]] = {}
    for row in ROWS:
        by_source.setdefault(row["source"], []).append(row)
    paid = []
    for source, rows in by_source.items():
        if source == "gsm8k_flexible":
            continue
        grader = verifier(source) if source in BUILT_IN else math_dapo
        for row, other in product(rows, rows):
            group = next((group for group in EQUIVALENT if row["truth"] in group), {row["truth"]})
            if other["truth"] not in group:
                paid += [(text, other["truth"]) for text in row["right"] if grader(source, text, other["truth"])["acc"]]
    assert paid == []


# --------------------------------------------------------------------------------------------------- right ones


def right_answers() -> list[tuple[str, str]]:
    """Return (spelling, ground truth) of fixtures/right_answers.tsv: the first three spellings of a number with each text that
    may stand around it, all spellings of numbers, and others."""
    rows = [line.split("\t") for line in (ROOT / "tests" / "fixtures" / "right_answers.tsv").read_text().splitlines()]
    around = [row[1] for row in rows if row[0] == "around"]
    numbers: dict[str, list[str]] = {}
    for row in rows:
        if row[0] == "number":
            numbers.setdefault(row[2], []).append(row[1])
    found = [(text.replace("@", spelling), truth) for truth, its in numbers.items() for spelling in its[:3] for text in around]
    return found + [(row[1], row[2]) for row in rows if row[0] in ("number", "other")]


@pytest.mark.parametrize("grader, shape", SHAPES[1:], ids=lambda part: getattr(part, "__name__", ""))
def test_right_spellings_are_paid(grader, shape):
    answers = right_answers()
    assert len(answers) > 700
    refused = [(text, truth) for text, truth in answers if not grader("", shape.format(text), truth)["acc"]]
    assert refused == []


@pytest.mark.parametrize("part", ["test", pytest.param("train", marks=pytest.mark.slow)])
def test_every_published_solution_of_gsm8k_is_paid(part):
    path = GSM8K / f"{part}.parquet"
    if not path.exists():
        pytest.skip(f"no {path}")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(path, columns=["extra_info", "reward_model"]).to_pylist()
    solutions = [(row["extra_info"]["answer"], row["reward_model"]["ground_truth"]) for row in rows]
    assert [
        solution
        for solution, truth in solutions
        if gsm8k("", solution, truth) != {"score": 1, "acc": 1, "undecided": 0, "pred": solution.rpartition("####")[2].strip()}
    ] == []
    boxed = [(solution.rpartition("####")[2].strip(), truth) for solution, truth in solutions]
    assert [text for text, truth in boxed if not math_verify("", f"\\boxed{{{text}}}", truth)["acc"]] == []


def test_every_ground_truth_of_geometry_is_paid_for_itself():
    path = GEO3K / "train.parquet"
    if not path.exists():
        pytest.skip(f"no {path}")
    parquet = pytest.importorskip("pyarrow.parquet")
    truths = [row["ground_truth"] for row in parquet.read_table(path, columns=["reward_model"])["reward_model"].to_pylist()]
    assert truths and all(
        geo3k("", f"<think>a</think>\\boxed{{{truth}}}", truth)["score"] == pytest.approx(1) for truth in truths
    )


# ------------------------------------------------------------------------------------------------------ undecided


UNDECIDED = [line.split("\t") for line in (ROOT / "tests" / "fixtures" / "undecided.tsv").read_text().splitlines()[1:]]


@pytest.mark.parametrize(("text", "truth", "undecided"), [*UNDECIDED, ("7" * 500, "7", 1)])
def test_an_answer_that_cannot_be_decided_is_counted(text, truth, undecided):
    assert math_verify("", f"\\boxed{{{text}}}", truth)["undecided"] == int(undecided)
    assert math_dapo("", f"Answer: {text}", truth)["undecided"] == int(undecided)


AROUND = [line.split("\t") for line in (ROOT / "tests" / "fixtures" / "around_a_box.tsv").read_text().splitlines()]


BRACKETS = [r"(\boxed{1}, \boxed{2})", r"[\boxed{1,2}]", r"\{\boxed{1}, \boxed{2}\}"]


@pytest.mark.parametrize(("kind", "text"), [*AROUND, *(("brackets", text) for text in BRACKETS)])
def test_what_touches_a_box_is_part_of_the_answer_and_prose_is_not(kind, text):
    value = math_verify("", text.replace("<newline>", "\n"), "1,2" if kind == "brackets" else "7")
    assert (value["acc"], value["undecided"]) == ((1, 0) if kind == "prose" else (0, 1))


@pytest.mark.parametrize(
    "text", ["Wrong answer: 7", "Not the answer: 7", "Answer: -\n7", "Answer: (\n7", "Answer: 7\r8", "Answer: 7\x0c8"]
)
def test_what_is_around_a_marked_answer_is_part_of_it(text):
    for grader in (math_verify, math_dapo):
        assert grader("", text, "7")["acc"] == 0


def test_a_response_without_an_answer_is_decided():
    for grader in (gsm8k, math_verify, math_dapo, geo3k):
        value = grader("", "I do not know.", "7")
        assert value["acc"] == value["undecided"] == 0


# ------------------------------------------------------------------------------------------------------------- the form


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
PLACES = [
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
    texts = [shape((unit * length)[:length]) for shape in PLACES for length in (300, 1000, 40_000)]
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


# ----------------------------------------------------------------------------------------------------- human judgements


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


ODD = [*"0123456789.,-+$%#{}()[]\\ \n=eExa/^_*:", r"\boxed{", r"\frac", r"\text{", "Answer:", "####", *"½²√\u2212"]


@settings(max_examples=500)
@given(st.lists(st.sampled_from(ODD), max_size=30).map("".join))
def test_no_text_is_too_odd(text):
    """The cheap verifiers run in the rank itself, where an exception would end the run."""
    for response in (text, f"#### {text}"):
        assert gsm8k("", response, "5")["score"] in (0, 1) and gsm8k_flexible("", response, "5") in (0, 1)
