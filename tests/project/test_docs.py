"""The docs: promised tests exist, generated pages are up to date, the README has the script's loop, and the design a row for
each file and the numbers of a run. What pages name and quote is checked by .ci/prose.py."""

import importlib.util
import re

import pytest
import walk
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


def test_the_loop_in_the_readme_is_the_scripts():
    loop = re.search(r"^The loop of .*\n\n((?:    .*\n)+)", (ROOT / "README.md").read_text(), re.M)[1]
    script = (ROOT / "train_sync.py").read_text()
    assert loop.count("\n") > 5
    for line in loop.splitlines():
        assert line.partition("  #")[0].strip() in script


def test_the_readme_has_the_number_of_the_design():
    (lines,) = re.findall(r"functions, ([\d,]+) lines in", (ROOT / "docs" / "design.md").read_text())
    assert f"one step is {lines} lines" in (ROOT / "README.md").read_text()


def test_a_file_that_no_row_of_the_design_names_is_found(monkeypatch):
    title, rows = make.READING[0]
    monkeypatch.setattr(make, "READING", ((title, {**rows, "more": "rl/*/*.py rl/*.py"}), *make.READING[2:]))
    with pytest.raises(ValueError, match="no row for "):
        make.reading()


@pytest.mark.runs
def test_what_the_design_says_of_a_step_is_what_one_runs():
    """Within 3%; and a step runs the files of the table's first part, and no others."""
    called, loaded, functions = walk.walk()
    page = (ROOT / "docs" / "design.md").read_text()
    said = re.search(
        r"runs ([\d,]+) functions, ([\d,]+) lines in (\d+) files.*?load (\d+) files with ([\d,]+) lines", page, re.S
    )
    found = (functions, sum(called.values()), len(called), len(loaded), sum(loaded.values()))
    assert [int(number.replace(",", "")) for number in said.groups()] == pytest.approx(found, rel=0.03)
    first = next(iter(make.reading().values()))
    assert called.keys() == {str(file.relative_to(ROOT)) for files in first.values() for file in files}
