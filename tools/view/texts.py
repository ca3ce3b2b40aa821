"""What texts show by themselves: repetition, characters that the prompt does not have, phrases that spread during a run."""

import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

import numpy as np

# A mark such as <|end|> is a word, and so is a character of Chinese or Japanese
WORD = re.compile(r"</?\|?\w+\|?>|[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]")
LONGEST, SHOWN = 4, 60  # words of a phrase; phrases
RARE = 0.02  # of the responses: rarer phrases do not count


def measures(text: str, prompt: str) -> dict:
    """Return `compressed`, the size relative to that of the text, and `strange`: script, if the prompt does not have it ->
    characters."""
    data = text.encode(errors="replace")
    scripts = Counter(map(_script, text))
    return {
        "compressed": len(zlib.compress(data)) / len(data) if data else None,
        "strange": {script: scripts[script] for script in {*scripts} - {None, *map(_script, prompt)}},
    }


def _grams(words: list[str], n: int, common: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return the sequences of n words whose parts are common: no other sequence is."""
    return {its for its in zip(*(words[i:] for i in range(n)), strict=False) if its[1:] in common and its[:-1] in common}


@lru_cache(maxsize=1 << 16)
def _script(character: str) -> str | None:
    """Return the script of a letter, or the kind of another character; None if any text may have it."""
    if (character.isascii() and character.isprintable()) or character in "\t\n\r":
        return None
    kind = unicodedata.category(character)
    named = {"\ufffd": "broken", "So": "symbol", "C": "control", "L": unicodedata.name(character, "unnamed").split()[0]}
    return named.get(character) or named.get(kind) or named.get(kind[0])


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
    """Return the phrases whose share of the responses rose most, with the mean scores of the last responses with and without
    them. first, last: (text, score) of responses early and late."""
    early, late = ([WORD.findall(text) for text, _ in part] for part in (first, last))
    total = sum(score for _, score in last)
    common = {()}
    rows = []
    for n in range(1, LONGEST + 1):
        before, paid = Counter(), defaultdict(list)  # phrase -> responses that have it; their scores
        for words in early:
            before.update(_grams(words, n, common))
        for words, (_, score) in zip(late, last, strict=True):
            for gram in _grams(words, n, common):
                paid[gram].append(score)
        common = {gram for gram, scores in paid.items() if len(scores) >= RARE * len(last)}
        for gram in common:
            share, own, others = before[gram] / max(len(first), 1), paid[gram], len(last) - len(paid[gram])
            row = {"phrase": " ".join(gram), "first": share, "last": len(own) / len(last), "with": fmean(own)}
            rows.append(row | {"rise": row["last"] - share, "without": (total - sum(own)) / others if others else None})
    shown: list[dict] = []
    for row in sorted(rows, key=lambda row: (-row["rise"], -len(row["phrase"]), row["phrase"])):
        is_part = any(f" {row['phrase']} " in f" {longer['phrase']} " for longer in shown)
        if row["rise"] > 0 and len(shown) < SHOWN and not is_part:
            shown.append(row)
    return shown
