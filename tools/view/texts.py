"""What texts show by themselves: repetition, characters that the prompt does not have, phrases that spread during a run. Words
are counted, not tokens, so that models compare."""

import itertools
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

# A mark such as <|end|> is a word, and so is a character of Chinese or Japanese
WORD = re.compile(r"</?\|?\w+\|?>|[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]")
LONGEST, SHOWN = 4, 60  # words of a phrase; phrases
RARE = 0.02  # of the responses: rarer phrases do not count


def measures(text: str, prompt: str) -> dict:
    """Return `repeated`, `compressed` and `strange` of tools/view/rows.py."""
    words = WORD.findall(text)
    grams = [*_grams(words, LONGEST)]
    data = text.encode(errors="replace")
    usual = {_script(character) for character in {*prompt}}
    strange: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if (script := _script(character)) and script not in usual:
            strange[script] += count
    return {
        "repeated": 1 - len({*grams}) / len(grams) if grams else 0.0,
        "compressed": len(zlib.compress(data)) / len(data) if data else None,
        "strange": dict(strange),
    }


def _grams(words: list[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(n)), strict=False)


@lru_cache(maxsize=1 << 16)
def _script(character: str) -> str | None:
    """Return the script of a letter, or the kind of another character; None if any text may have it."""
    if (character.isascii() and character.isprintable()) or character in "\t\n\r":
        return None
    if character == "\ufffd":
        return "broken"
    kind = unicodedata.category(character)
    if kind == "So":
        return "symbol"
    named = {"C": "control", "L": unicodedata.name(character, "unnamed").split()[0]}
    return named.get(kind[0])


def by_length(lengths: np.ndarray, scores: np.ndarray, third: np.ndarray) -> list[dict]:
    """Return the responses in at most 8 rows by length. scores: NaN where there is none; third: of the run, 0 to 2."""
    if not len(lengths):
        return []
    place = np.digitize(lengths, np.unique(np.quantile(lengths, np.linspace(0, 1, 9)[:-1], method="lower")))
    rows = []
    for here in (place == its for its in np.unique(place)):
        known = scores[here & ~np.isnan(scores)]
        early, late = (float((here & (third == its)).sum() / max((third == its).sum(), 1)) for its in (0, 2))
        row = {"from": int(lengths[here].min()), "to": int(lengths[here].max()), "responses": int(here.sum())}
        rows.append(row | {"score": float(known.mean()) if len(known) else None, "first": early, "last": late})
    return rows


def phrases(first: Sequence[tuple[str, float]], last: Sequence[tuple[str, float]]) -> list[dict]:
    """Return the phrases whose share of the responses rose most. first, last: (text, score) of responses early and late."""
    words = [[WORD.findall(text) for text, _ in part] for part in (first, last)]
    total = sum(score for _, score in last)
    common = {()}
    rows = []
    for n in range(1, LONGEST + 1):
        # Only phrases whose parts are frequent: no phrase is more frequent than its parts
        having = [
            [{gram for gram in _grams(of, n) if gram[1:] in common and gram[:-1] in common} for of in part] for part in words
        ]
        before, after = (Counter(itertools.chain.from_iterable(part)) for part in having)
        common = {gram for gram, count in after.items() if count >= RARE * len(last)}
        scores = dict.fromkeys(common, 0.0)
        for grams, (_, score) in zip(having[1], last, strict=True):
            for gram in grams & common:
                scores[gram] += score
        for gram in common:
            count, others = after[gram], len(last) - after[gram]
            row = {"phrase": " ".join(gram), "first": before[gram] / max(len(first), 1), "last": count / len(last)}
            rows.append(row | {"with": scores[gram] / count, "without": (total - scores[gram]) / others if others else None})
    shown: list[dict] = []
    for row in sorted(rows, key=lambda row: (row["first"] - row["last"], -len(row["phrase"]), row["phrase"])):
        is_part = any(f" {row['phrase']} " in f" {longer['phrase']} " for longer in shown)
        if row["last"] > row["first"] and not is_part:
            shown.append(row)
    return shown[:SHOWN]
