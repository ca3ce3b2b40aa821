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
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
MOST = {"*.py rl/**/*.py": 0, "tests/**/*.py": 0, "benchmarks/**/*.py docs/*.py": 0}  # comments and strings; may only fall
MOST_NAMES = 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain_english(page):
    found = [f"{number}: {line}" for number, line in enumerate(page.read_text().splitlines(), 1) if WORDS.search(line)]
    assert not found


def prose(file: Path) -> Iterator[str]:
    """Return the file's comments and strings, including docstrings and messages."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.string


@pytest.mark.parametrize(("folders", "most"), MOST.items())
def test_code_has_no_more_of_them(folders, most):
    files = [file for folder in folders.split() for file in ROOT.glob(folder) if file != Path(__file__)]
    found = sum(len(WORDS.findall(text)) for file in files for text in prose(file))
    assert found <= most, "there is a plain word for each: see DIALECT"


def test_names_of_tests_are_plain_english():
    names = []
    for file in ROOT.glob("tests/**/test_*.py"):
        names += re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    found = [name for name in names if WORDS.search(name.replace("_", " "))]
    assert len(found) <= MOST_NAMES, sorted(found)


def test_the_search_finds_them():
    assert WORDS.search("The run goes on.") and WORDS.search("It has gone, beside others.")
    assert not WORDS.search("He kindly besides mentions a kind word.")
