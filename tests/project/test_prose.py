"""The linter of pages and statements (.ci/prose.py) finds what it looks for."""

import ast
import importlib.util

import pytest
from helpers import ROOT

spec = importlib.util.spec_from_file_location("prose", ROOT / ".ci" / "prose.py")
prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prose)


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


def test_a_long_page_and_a_far_answer_are_found(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a [page](docs/near.md)")
    (tmp_path / "docs" / "near.md").write_text("here")
    (tmp_path / "docs" / "far.md").write_text("word " * 11)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "MOST_WORDS_OF", {"far.md": 10})
    monkeypatch.setattr(prose, "MOST_WORDS", 2)
    monkeypatch.setattr(prose, "FIRST_QUESTIONS", {"docs/near.md": "here", "docs/far.md": "there"})
    assert [line.partition(":")[0] for line in prose.lengths_of_pages()] == ["docs/far.md", "README.md and docs/*.md"]
    assert [*prose.far_answers()] == ["docs/far.md: more than two clicks from README.md", "docs/far.md: does not say 'there'"]
