r"""The final answer of a response: found, parsed, and compared with the ground truth.

An answer is marked in one of three ways: \boxed{...} (MATH, Geometry3K), a line "Answer: ..." (DAPO, AIME) or "#### ..."
(GSM8K). The last mark counts. A response that mentions the right number without a mark is wrong.

An answer is understood completely, or undecided, which is wrong. Only the words of words.py may accompany a value: any
other one might change it ("not 25", "25 lakh") or leave a choice ("25 or 30").
"""

import re
from fractions import Fraction
from functools import lru_cache

from math_grader.compare import agree, explains
from math_grader.form import is_literal
from math_grader.sentence import Answer, read
from math_grader.text import LONGEST, LONGEST_TRUTH, NotUnderstood, latex

ANSWER = re.compile(
    r"(?i)(?:\b(not|wrong|incorrect)\s+(?:(?:the|an?|final)\s+)*)?answer(?:\s+is)?[*_`\s]{0,4}[:\N{FULLWIDTH COLON}]"
)
NOTHING = re.compile(r"[\s*_`$#{}.|]*(?:\\[\[(]|-{3,})?[\s*_`$]*")  # markup without an answer
NUMBER = r"(?:[0-9]+(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
EXPONENT = r"(?:[eE][+-]?[0-9]{1,3}(?![0-9.]))?"

# ---------------------------------------------------------------------------------------------- finding the answer


def answer_line(text: str) -> str | None:
    """Return the text after the last "Answer:", from the first line that has any. Return None without one. Raise NotUnderstood
    after "wrong answer:"."""
    marks = list(ANSWER.finditer(text))
    lines = text[marks[-1].end() :].split("\n") if marks else []
    line = next((line for line in lines if not NOTHING.fullmatch(line)), None)
    if line is None:
        return None
    mark = marks[-1]
    if mark[1]:
        raise NotUnderstood("not the answer")
    return closed(text[text.rfind("\n", 0, mark.start()) + 1 : mark.end()], line)


def closed(before: str, line: str) -> str:
    """Return a line without the ends of the markup that began before it: of "**Answer: 5**" and \\textbf{Answer: 5}."""
    for mark in ("**", "__", "*", "_", "`"):
        if before.count(mark) % 2:
            line = line.replace(mark, " ", 1)
        before = before.replace(mark, "")
    for _ in range(before.count("{") - before.count("}")):
        line = line.replace("}", " ", 1) if line.count("}") > line.count("{") else line
    return line


def hash_line(text: str) -> str | None:
    """Return the text after the last "####" that has text after it on its line. Return None without one."""
    found = list(re.finditer(r"(?<!#)#{4,}(?!#)\s*((?:(?!#{4})[^\n])*[^\n#\s])", text))
    if not found:
        return None
    start = found[-1].start()
    return closed(text[text.rfind("\n", 0, start) + 1 : start], found[-1][1])


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text. A hyphen after a number or a word is not a minus."""
    end = next((i for i in range(len(text), 0, -1) if text[i - 1].isdecimal()), 0)
    text = "".join(map(latex, text[max(0, end - 200) : end])).replace("\\$", "$")
    found = re.findall(rf"((?<![\w)}}\]])-\s?)?\$?((?:{NUMBER}){EXPONENT})", text)
    return Fraction(re.sub(r"[\s,]", "", "".join(found[-1])).rstrip(".")) if found else None


# ------------------------------------------------------------------------------------------------------ comparison


def same(answer: str, truth: str, any_root: bool = False, prose: bool = False) -> bool | None:
    r"""Return whether both are the same number, word or mathematical object in the same form (compare.py); None if that
    cannot be decided. Nothing is computed for the answer: 2+3 is not 5. any_root: accept \sqrt{884} for 2\sqrt{221}. prose: the
    answer is no formula, so 5 m is five meters."""
    try:
        right = _read_truth(truth)
        given = read(answer, prose, max(LONGEST, 2 * len(truth)))
        return _same(given, right, any_root)
    except NotUnderstood:
        return None


@lru_cache(256)
def _read_truth(truth: str) -> Answer:
    """Return a ground truth, which many responses are compared with."""
    return read(truth, longest=LONGEST_TRUTH)


def _same(given: Answer, right: Answer, any_root: bool) -> bool | None:
    if given.tokens == right.tokens:
        return True
    if right.tree and right.tree[0] == "name" and given.choice == right.tree[1]:  # (C) 7
        return True
    if given.tree is None or right.tree is None:
        return None
    if given.units and right.units and given.units != right.units:
        return False
    if given.reason and not explains(given.reason, given.tree):
        raise NotUnderstood("another value")
    return agree(given.tree, right.tree, any_root)


def is_number(answer: str) -> bool:
    """Return whether an answer in prose is one number."""
    try:
        tree = read(answer, prose=True).tree
        return tree is not None and tree[0] in ("number", "negative", "quotient", "percent") and is_literal(tree)
    except NotUnderstood:
        return False
