"""Words of this project's old dialect, which a native speaker would not write, do not come back."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

DIALECT = (  # each with the plain word for it
    r"told",  # reported, warned, said
    r"(?:goes|go|going|went) on",  # resumes, continues
    r"stands in",  # is defined in, is recorded in
    r"(?:has|have) gone",  # exited, is lost
    r"anew",  # again
    r"so many",  # this many, N
    r"beside",  # next to, compared with, in addition to
    r"kin",  # variants
    r"in silence",  # silently
    r"what comes in",  # the samples received
)
WORDS = re.compile(rf"\b(?:{'|'.join(DIALECT)})\b", re.I)
MADE = {"promises.md", "benchmarks.md", "from-verl.md"}  # their sentences are the code's, the results' and the tests'
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
PAGES = [page for page in PAGES if page.name not in {*MADE, "CHANGELOG.md"}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain_english(page):
    found = [f"{number}: {line}" for number, line in enumerate(page.read_text().splitlines(), 1) if WORDS.search(line)]
    assert not found


def prose(file: Path) -> Iterator[str]:
    """Its comments and its strings, docstrings and messages among them."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.string


def test_the_code_has_none_of_them():
    files = [*ROOT.glob("*.py"), *(ROOT / "rl").rglob("*.py")]
    found = {str(file.relative_to(ROOT)): words for file in files if (words := WORDS.findall(" ".join(prose(file))))}
    assert not found, "there is a plain word for each: see DIALECT"


def test_the_search_finds_them():
    assert WORDS.search("The run goes on.") and WORDS.search("It has gone, beside others.")
    assert not WORDS.search("He kindly besides mentions a kind word.")
