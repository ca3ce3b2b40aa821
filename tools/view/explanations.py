"""What metrics mean, in the words of the tables of docs/six-numbers.md and docs/metrics.md."""

import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMS = {"six-numbers.md": "healthy: {}. Look closer when {}", "metrics.md": "{1} ({0})"}  # of the cells after the name
ROW = re.compile(r"^\| `([^`|]+)` \| (.+?) \| (.+) \|$", re.M)


def of(names: Iterable[str]) -> dict[str, str]:
    """Return name -> what the pages say of it, without names of which they say nothing."""
    pages = {page: (DOCS / page).read_text() for page in FORMS if (DOCS / page).exists()}
    rows = [(_pattern(name), FORMS[page].format(*cells)) for page, text in pages.items() for name, *cells in ROW.findall(text)]
    found = {name: [re.sub(r"`|\[|\]\(.*?\)", "", text) for its, text in rows if its.fullmatch(name)] for name in names}
    return {name: "\n".join(reversed(texts)) for name, texts in found.items() if texts}


def _pattern(name: str) -> re.Pattern:
    """Return the expression of a name such as critic/score/<mean, max, min> or val-core/<data_source>/acc/mean@<n>."""
    words = re.split(r"<([^>]*)>", name)
    parts = [".+" if i % 2 and "," not in word else re.escape(word).replace(r",\ ", "|") for i, word in enumerate(words)]
    return re.compile("".join(f"(?:{part})" for part in parts))
