"""The docs: links resolve, the index lists every page, promised tests exist, and generated pages are up to date."""

import importlib.util
import re
from pathlib import Path

import pytest
from helpers import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
spec = importlib.util.spec_from_file_location("make", ROOT / "docs" / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == set(re.findall(r"\]\(([\w.-]+\.md)\)", index)) | {
        "README.md"
    }


def test_the_tests_that_are_promised_exist():
    """A name is a file, with or without a star, or a test in it: tests/transport/test_ring.py::test_name."""
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "docs" / "promises.md").read_text())
    assert len(named) > 10
    for name in named:
        pattern, _, test = name.partition("::")
        files = list(ROOT.glob(pattern))
        assert files, name
        assert not test or any(f"def {test}(" in file.read_text() for file in files), name


def test_the_benchmarks_that_are_named_exist():
    """benchmarks/LOG.md is history and may name benchmarks that were removed."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.txt")]
    for folder in ("docs", "rl", "tools", "tests", "benchmarks", "examples"):
        files += [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]
    for file in files:
        if file.name != "LOG.md" and "fixtures" not in file.parts:
            for named in re.findall(r"\bbenchmarks/[\w/]+\.py\b", file.read_text()):
                assert (ROOT / named).exists(), f"{file}: {named}"


@pytest.mark.parametrize("name", make.PAGES)
def test_a_page_out_of_the_code_is_up_to_date(name):
    assert (ROOT / "docs" / name).read_text() == make.PAGES[name](), "run python docs/make.py"


def test_every_paper_of_the_formulas_is_listed_with_flags_whose_formula_names_it():
    """Each number in losses.py has a row, and the function behind each row's flag has the number in its docstring."""
    page, source = (ROOT / "docs" / "generated" / "papers.md").read_text(), (ROOT / "losses.py").read_text()
    rows = re.findall(r"^\| (.+) \| \[(\S+)\]\(https://arxiv\.org/abs/(\S+)\) \| (.+) \| `(.+)` \|$", page, re.M)
    elsewhere = {what for what, *_ in make.ELSEWHERE}
    rows = [row for what, *row in rows if what not in elsewhere]
    assert len(rows) > 30 and {number for number, *_ in rows} == set(re.findall(r"\b\d{4}\.\d{5}\b", source))
    assert sum(place != "-" for _, _, place, _ in rows) > 20, "equations and sections are read out of the docstrings"
    of_others = {"--kl-loss-type k3r": "kl_penalty", "off_policy_mask.diff": "off_policy_tokens"}
    of_others |= {"adaptive_kl.diff": "adaptive_kl_coef", "--loss-agg-mode seq-mean-token-sum-norm": "denominator"}
    of_others |= {"top_entropy.diff": "high_entropy_tokens", "--lam 0.95": "lambda_return"}
    of_others |= {"--teacher-top-k 20": "top_k_reverse_kl", "--cliprange-value 0.5": "value_loss"}
    of_others |= {"--teacher self --teacher-prompt '{prompt} {answer}'": "reverse_kl_advantage"}
    of_others |= {"--rollout-rs batch_k2 --rollout-rs-threshold 0.02": "rollout_rejection_mask"}
    of_others |= {"--kl-loss-type k3": "k3", "entropy_target.diff": "adaptive_entropy_coef"}
    of_others |= {"--rollout-is token --rollout-is-threshold 0.5_5.0": "rollout_is_weights"}
    for number, linked_number, place, flags in rows:
        flag, _, word = flags.partition(" ")
        name = of_others.get(
            flags, word if flag in ("--loss-mode", "--adv-estimator") else flags.removeprefix("losses.").removesuffix(".diff")
        )
        assert not flags.endswith(".diff") or (ROOT / "examples" / "forks" / flags).exists()
        body = re.search(rf"^def {name}\(.*?^    \"\"\"(.*?)\"\"\"", source, re.M | re.S)
        text = body[1].replace("\n    ", " ") if body else ""
        assert number == linked_number and f"arXiv {number}" in text, flags
        assert place == "-" or f"arXiv {number}, {place}" in text, flags


@pytest.mark.parametrize("name", ["generated/promises.md", "generated/code-map.md"])
def test_every_file_on_such_a_page_has_a_docstring(name):
    assert not re.findall(r"^\| `[^`]+` \|\s*\|$", make.PAGES[name](), re.M)
