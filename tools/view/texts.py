"""What texts show by themselves: repetition, characters that the prompt does not have, phrases that spread during a run."""

import itertools
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
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


def _grams(words: list[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(n)), strict=False)


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
    """Return the phrases whose share of the responses rose most. first, last: (text, score) of responses early and late."""
    words = [[WORD.findall(text) for text, _ in part] for part in (first, last)]
    common = {()}
    rows = []
    for n in range(1, LONGEST + 1):
        # No phrase is more frequent than its parts
        grams = ([{its for its in _grams(of, n) if its[1:] in common and its[:-1] in common} for of in part] for part in words)
        before, after = (Counter(itertools.chain.from_iterable(part)) for part in grams)
        common = {gram for gram, count in after.items() if count >= RARE * len(last)}
        shares = [(gram, before[gram] / max(len(first), 1), after[gram] / len(last)) for gram in common]
        rows += [{"phrase": " ".join(gram), "first": a, "last": b, "rise": b - a} for gram, a, b in shares if b > a]
    shown: list[dict] = []
    for row in sorted(rows, key=lambda row: (-row["rise"], -len(row["phrase"]), row["phrase"])):
        if len(shown) < SHOWN and not any(f" {row['phrase']} " in f" {longer['phrase']} " for longer in shown):
            shown.append(row)
    said = [f" {' '.join(of)} " for of in words[1]]
    for row in shown:
        scores: dict[bool, list[float]] = {True: [], False: []}
        for text, (_, score) in zip(said, last, strict=True):
            scores[f" {row['phrase']} " in text].append(score)
        row |= {"with": fmean(scores[True]), "without": fmean(scores[False]) if scores[False] else None}
    return shown
