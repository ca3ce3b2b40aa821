"""Wrong answers, made from templates (fixtures/wrong_answers.tsv) and words in several languages (fixtures/wrong_words.tsv):
an operation, a choice, a hedge, a second value, another unit, an order or a bracket that matters. It uses nothing of rl/."""

import random
import re
from collections.abc import Callable

from helpers import ROOT


def _rows(name: str) -> list[list[str]]:
    lines = (ROOT / "tests" / "fixtures" / name).read_text().splitlines()
    return [line.split("\t") for line in lines if not line.startswith("# ")]


WORDS: dict[str, list[list[str]]] = {}
for name, words in _rows("wrong_words.tsv"):
    WORDS.setdefault(name, []).append(words.split("|"))
TEMPLATES: dict[str, list[tuple[str, str]]] = {}
for kind, wrong, truth in _rows("wrong_answers.tsv"):
    TEMPLATES.setdefault(kind, []).append((wrong, truth))
PLACE = re.compile(r"<([a-z_]+)>")


def whole(rng: random.Random) -> str:
    return str(rng.randint(2, 900))


def decimal(rng: random.Random) -> str:
    return f"{rng.randint(1, 90)}.{rng.randint(1, 9)}"


def thousands(rng: random.Random) -> str:
    return f"{rng.randint(1000, 99999):,}"


def fraction(rng: random.Random) -> str:
    below = rng.choice([2, 3, 5, 7, 11, 13])
    return rf"\frac{{{rng.choice([n for n in range(1, 40) if n % below])}}}{{{below}}}"


def irrational(rng: random.Random) -> str:
    return rng.choice([rf"{rng.randint(2, 9)}\sqrt{{{rng.choice([2, 3, 5, 7])}}}", rf"{rng.randint(2, 9)}\pi"])


VALUES: dict[str, list[Callable]] = {  # by kind; about a decimal is that decimal, and brackets make lists of thousands
    "hedge": [whole, fraction, irrational],
    "bracket": [whole, fraction],
    "span": [whole],
    "second": [whole, decimal, thousands, fraction],
}


def _places(rng: random.Random, kind: str) -> dict[str, str]:
    """Return a text for each place of a template."""
    make = rng.choice(VALUES.get(kind, [whole, whole, decimal, thousands, fraction, irrational]))
    values: set[str] = set()
    while len(values) < 3:
        values.add(make(rng))
    v, w, u = rng.sample(sorted(values), 3)
    if kind == "span":
        v, w = sorted((v, w), key=int)
    n, k = rng.randint(11, 90), rng.randint(2, 9)
    c = rng.choice([3, 5, 7])
    a, b = rng.sample(range(1, 10), 2) if kind == "digits" else (rng.randint(1, 9), rng.randint(1, c - 1))
    if kind == "order":
        a, b, c = rng.sample(range(-9, 40), 3)
    unit, thing = rng.sample(WORDS["unit"][0], 2)
    letters = rng.choice(WORDS["letters"][0])
    numbers = {"n": n, "k": k, "a": a, "b": b, "c": c, "less": n - 2, "more": n + 3, "times": n * k, "squared": n * n}
    numbers |= {"next": k + 1, "hundredfold": n * 100, "bk": b * k, "ck": c * k, "c_b": c - b}
    if kind == "digits":
        signs = {"subscript": 0x2080 + b, "circled": 0x245F + a, "devanagari": 0x0966 + b, "arabic": 0x0660 + b}
        numbers |= {name: chr(code) for name, code in signs.items()} | {"superscript": "\u2070\u00b9\u00b2\u00b3"[b % 4]}
    spoken = {name: rng.choice(rng.choice(WORDS[name])) for name in ("before", "after", "hedge", "hedge_after")}
    nonsense = "".join(rng.choice(letters) for _ in range(rng.randint(4, 9)))
    texts = {"v": v, "w": w, "u": u, "unit": unit, "thing": thing, "power": rng.choice(["^2", "^3"]), "nonsense": nonsense}
    return {name: str(number) for name, number in numbers.items()} | texts | spoken


def wrong_answers(seed: int, count: int) -> list[tuple[str, str, str]]:
    """Return (kind, wrong answer, ground truth)."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        kind = rng.choice(sorted(TEMPLATES))
        wrong, truth = rng.choice(TEMPLATES[kind])
        places = _places(rng, kind)
        text, truth = (PLACE.sub(lambda place: places.get(place[1], place[0]), part) for part in (wrong, truth))  # noqa: B023
        around = rng.choice(["{}", "{}", "${}$", " {} ", "{}."]) if "$" not in text and text[-1] != "\\" else "{}"
        found.append((kind, around.replace("{}", text), truth))
    return found
