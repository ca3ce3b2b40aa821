"""The docs: promised tests exist, and generated pages are up to date. What pages name and quote is checked by .ci/prose.py."""

import importlib.util
import re

import pytest
from helpers import ROOT

spec = importlib.util.spec_from_file_location("make", ROOT / "docs" / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


def test_the_tests_that_are_promised_exist():
    """A name is a file, with or without a star, or a test in it: tests/transport/test_ring.py::test_name."""
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "docs" / "promises.md").read_text())
    assert len(named) > 10
    for name in named:
        pattern, _, test = name.partition("::")
        files = list(ROOT.glob(pattern))
        assert files, name
        assert not test or any(f"def {test}(" in file.read_text() for file in files), name


@pytest.mark.parametrize("name", make.PAGES)
def test_a_page_out_of_the_code_is_up_to_date(name):
    made = make.PAGES[name]()
    assert (ROOT / "docs" / name).read_text() == made, "run python docs/make.py"
    assert not re.findall(r"^\| `[^`]+` \|\s*\|$", made, re.M), "a file has no docstring"


def test_every_paper_of_the_formulas_is_listed_with_flags_or_a_fork():
    page, source = (ROOT / "docs" / "generated" / "papers.md").read_text(), (ROOT / "losses.py").read_text()
    rows = re.findall(r"^\| .+ \| \[(\S+)\]\(https://arxiv\.org/abs/(\S+)\) \| (.+) \| `(.+)` \|$", page, re.M)
    elsewhere = {number for _, number, *_ in make.ELSEWHERE}
    assert {number for number, *_ in rows} - elsewhere <= {*re.findall(r"\b\d{4}\.\d{5}\b", source)} <= {row[0] for row in rows}
    assert len(rows) > 30 and all(number == linked for number, linked, *_ in rows)
    assert sum(place != "-" for *_, place, _ in rows) > 20, "equations and sections are read out of the docstrings"
    forks = [here for *_, here in rows if here.endswith(".diff")]
    assert forks and all((ROOT / "examples" / "forks" / fork).exists() for fork in forks)
