"""The messages that the docs quote exist in the code: each part of a quotation is found in one of its strings.

Quotations are: text in double quotes (four words or more); the first cells of tables headed "message" or "it says", and
in double quotes of others; lines of console output in code blocks and code spans that begin as a message does. In the code's
strings each {...} stands for anything, and so do the words that a page puts in its place.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from helpers import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
FOREIGN = {  # of vLLM, torch and its shared memory
    "No available memory for the cache blocks",
    "The hostname of the client socket cannot be retrieved",
}
BEGINNING = r"(?:error|warning|Ctrl-C|Stopped): |==== The |[a-z]+ \d+ (?:failed|stops): |--[a-z-]+: (?=[a-z]+ [a-z]+)"
ANY = "\0"  # stands for anything


def quotations(text: str) -> Iterator[str]:
    for block in re.findall(r"^```(?:text|console)?\n(.*?)^```|((?:^    [^\n]*\n)+)", text, re.M | re.S):
        for line in "".join(block).splitlines():
            if re.match(BEGINNING, line.strip()):
                yield line.strip()
    text = re.sub(r"^```.*?^```\n|^    [^\n]*\n", "", text, flags=re.M | re.S)
    for span in re.findall(r"`([^`\n]+)`", text):
        if re.match(BEGINNING, span):
            yield span
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = table.splitlines()
        if head.split("|")[1].strip() in ("message", "it says"):
            yield from (cell for row in rows if '"' not in (cell := row.split("|")[1].strip()))
    yield from (quoted for quoted in re.findall(r'"([^"\n]+)"', text) if len(quoted.split()) >= 4)


def clauses(quoted: str) -> list[str]:
    """Return the parts to look for: those of three words or more."""
    quoted = re.sub(r"^(error|warning): |`", "", quoted)
    parts = re.split(r"\.\.\.|…|; |\. |(?:^|[^a-z])\(--[a-z-]+\)", quoted)
    return [part.strip(" .;=") for part in parts if len(re.findall(r"[A-Za-z]{2,}", part)) >= 3]


@cache
def messages() -> list[str]:
    """Return all strings of the code, with ANY in place of computed parts."""
    found = set()
    for path in [*ROOT.glob("*.py"), *(ROOT / "rl").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else ANY for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return sorted(text for text in found if " " in text)


def letters(text: str) -> int:
    return len(re.findall(r"[^\s\0]", text))


def is_part_of(clause: str, message: str) -> bool:
    """Return whether the clause is part of the message with some text for each ANY. The message's own words must be most of
    it."""
    best = {place: 0 for place in range(len(message) + 1)}  # where the message is -> letters of its own so far
    for character in clause:
        following = {}
        for place, own in best.items():
            at = place
            while at < len(message) and message[at] == ANY:  # taken by it, or it has ended
                following[at] = max(following.get(at, 0), own)
                at += 1
            if at < len(message) and message[at] == character:
                following[at + 1] = max(following.get(at + 1, 0), own + (not character.isspace()))
        best = following
    return max(best.values(), default=0) > 0.6 * letters(clause)


def holds(clause: str, message: str) -> bool:
    """Whether a whole message of three words or more is in the clause, which says more: what other code has put around it."""
    own = message.replace(ANY, " ").split()
    return len(own) >= 3 and bool(re.search(".+".join(map(re.escape, message.strip().split(ANY))), clause))


@cache
def words_of(message: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z-]{3,}", message))


def is_said(clause: str) -> bool:
    shared = [message for message in messages() if len(words_of(message) & words_of(clause)) >= 2]  # the others cannot
    return any(is_part_of(clause, message) or holds(clause, message) for message in shared)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_quotes_is_what_the_code_says(page):
    for quoted in set(quotations(page.read_text())) - FOREIGN:
        for clause in clauses(quoted):
            assert is_said(clause), f"{page.name} quotes {quoted!r}: no code says {clause!r}"


def test_other_packages_messages_are_still_quoted():
    pages = "".join(page.read_text() for page in PAGES)
    assert all(text in pages for text in FOREIGN)


@pytest.mark.parametrize(
    ("clause", "message", "is_quoted"),
    [
        ("step 3 took 20 s", f"step {ANY} took {ANY} s", True),
        ("took 20", f"step {ANY} took {ANY} s, too long", True),
        ("step 3 needed 20 s", f"step {ANY} took {ANY} s", False),
        ("what a writes into /runs does not show on b", f"what {ANY}", False),
        ("a node lost: step 3 took long enough", f"step {ANY} took long", True),
    ],
)
def test_how_a_quotation_is_found(clause, message, is_quoted):
    assert (is_part_of(clause, message) or holds(clause, message)) == is_quoted
