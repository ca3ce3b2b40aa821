"""The linter of pages and statements (.ci/prose.py, .ci/pages.py) finds what it looks for."""

import ast

import pages
import prose
import pytest


def test_words_are_found():
    assert prose.WORDS.search("The run goes on.") and prose.WORDS.search("It has gone, beside others.")
    assert not prose.WORDS.search("He kindly besides mentions a kind word.")


@pytest.mark.parametrize(
    ("statement", "is_found"),
    [
        ("a, b = [], 0", True),
        ("a, b = c.d, e.f", True),
        ("self.a, self.b = a, len(b)", True),
        ("a, b = 0, 1", False),
        ("a, b = c.d, c.e", False),
        ("a, b = b, a + 1", False),
        ("a, b = f(1), f(2)", False),
    ],
)
def test_packed_statements_are_found(statement, is_found):
    assert bool([*prose.packed(ast.parse(statement))]) is is_found


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree with a README and two pages, of which one is far."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a [page](docs/near.md)")
    (tmp_path / "docs" / "near.md").write_text("here")
    (tmp_path / "docs" / "far.md").write_text("word " * 11)
    for module in (pages, prose):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", [tmp_path / "README.md", *(tmp_path / "docs").glob("*.md")])
    return tmp_path


def test_a_long_page_and_a_far_answer_are_found(tree, monkeypatch):
    monkeypatch.setattr(prose, "MOST_WORDS_OF", {"far.md": 10})
    monkeypatch.setattr(prose, "MOST_WORDS", 2)
    monkeypatch.setattr(prose, "FIRST_QUESTIONS", {"docs/near.md": "here", "docs/far.md": "there"})
    assert [line.partition(":")[0] for line in prose.lengths_of_pages()] == ["docs/far.md", "README.md and docs/*.md"]
    assert [*prose.far_answers()] == ["docs/far.md: more than two clicks from README.md", "docs/far.md: does not say 'there'"]


def test_broken_links_wrong_quotations_and_timed_tests_are_found(tree):
    (tree / "docs" / "README.md").write_text("[near](near.md), [gone](gone.md), [a heading](near.md#nowhere)")
    (tree / "docs" / "near.md").write_text('See "the moon is made of cheese today" and benchmarks/' + "gone.py.")
    (tree / "tests").mkdir()
    (tree / "tests" / "test_x.py").write_text("assert time.monotonic() - began < 3\nassert time.monotonic() < deadline\n")
    pages.PAGES.append(tree / "docs" / "README.md")
    assert [line.rpartition(": ")[2] for line in pages.broken_links()] == [
        "gone.md leads nowhere",
        "near.md#nowhere leads nowhere",
        "lists far.md, or lacks it",
        "lists gone.md, or lacks it",
    ]
    assert [*pages.absent_benchmarks()] == ["docs/near.md: there is no benchmarks/" + "gone.py"]
    (wrong,) = pages.wrong_quotations()
    assert "the moon is made of cheese today" in wrong
    (timed,) = prose.timed_tests()
    assert timed.startswith("tests/test_x.py:1:")


@pytest.mark.parametrize(
    ("clause", "message", "is_quoted"),
    [
        ("step 3 took 20 s", "step \0 took \0 s", True),
        ("took 20", "step \0 took \0 s, too long", True),
        ("step 3 needed 20 s", "step \0 took \0 s", False),
        ("what a writes into /runs does not show on b", "what \0", False),
        ("a node lost: step 3 took long enough", "step \0 took long", True),
    ],
)
def test_how_a_quotation_is_found(clause, message, is_quoted):
    assert (pages.is_part_of(clause, message) or pages.holds(clause, message)) == is_quoted
