"""The docs describe only rows that the doctor prints, and say what to do about each row that can be WRONG."""

import ast
import re
from collections.abc import Iterator

import pytest
from helpers import ROOT

from tools.doctor.scripts import SCRIPTS

SOURCES = ["doctor.py", *(f"tools/doctor/{name}.py" for name in ("packages", "measure", "scripts"))]
PAGES = ["ascend.md", "ascend.zh.md", "cuda.md"]
SCRIPT = f"({'|'.join(map(re.escape, SCRIPTS))}), [0-9]+ ranks?(, vllm)?"
# What stands for a variable in the name of a row
VALUES = {"engine": "(embedded|vllm)", "after": "( after .+)?", "temperature": "(1.0|0.6)", "name": SCRIPT}
OF_ASCEND = {"CANN", "glibc", "allocator", "HCCL"}


def pattern(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return re.escape(node.value)
    if isinstance(node, ast.Name):
        return VALUES[node.id]
    return "".join(pattern(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values)


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) in names:
            yield node


def statuses(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {"OK", "SLOW", "WRONG", "SKIPPED"}


def rows() -> dict[str, set[str]]:
    """Return the pattern of a row's name -> its possible states."""
    found: dict[str, set[str]] = {}
    for source in SOURCES:
        tree = ast.parse((ROOT / source).read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            parameters = [argument.arg for argument in function.args.args if argument.arg != "self"]
            for call in calls(function, "Finding", "report"):
                if not call.args or function.name == "report":  # which makes a Finding of what it is given
                    continue
                check, status = call.args[:2]
                names = [check]
                if isinstance(check, ast.Name) and check.id in parameters and check.id not in VALUES:
                    place = parameters.index(check.id)
                    names = [other.args[place] for other in calls(tree, function.name)]
                can_be = statuses(status) or statuses(function)
                for name in names:
                    prefix = VALUES["engine"] + ", " if source.endswith("measure.py") else ""
                    found.setdefault(prefix + pattern(name), set()).update(can_be)
    return found


def documented(page: str) -> Iterator[tuple[str, str]]:
    """(row's name, status) of the table behind the doctor's heading. `train_*.py, N ranks` is a row for each script."""
    text = (ROOT / "docs" / page).read_text()
    table = re.search(r"^\| *(?:check|\u68c0\u67e5\u9879) *\|.*\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M)[1]
    for line in table.splitlines():
        cell = line.split("|")[1]
        names = re.findall(r"`([^`]+)`", cell)
        assert names and not re.sub(r"`[^`]+`|\(slow\)|[, ]", "", cell), f"{page}: {cell}"
        for name in names:
            for script in SCRIPTS if "train_*.py" in name else [""]:
                yield name.replace("train_*.py, N ranks", f"{script}, 2 ranks"), "SLOW" if "(slow)" in cell else "WRONG"


def test_the_rows_of_the_code_are_found():
    """A failing start is a row of the engine, not of its start."""
    found = rows()
    engine = VALUES["engine"]
    assert len(found) >= 20
    assert "WRONG" in found["packages"] and "WRONG" in found[engine + VALUES["after"]]
    assert "WRONG" in found[f"{engine}, publish"] and "WRONG" not in found[f"{engine}, start"] | found[f"{engine}, kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_documented_row_is_one_that_the_doctor_prints(page):
    for name, status in documented(page):
        can_be = [can for row, can in rows().items() if re.fullmatch(row, name)]
        assert can_be, f"docs/{page}: the doctor has no row {name!r}"
        assert any(status in can for can in can_be), f"docs/{page}: the row {name!r} is never {status}"


@pytest.mark.parametrize("page", PAGES)
def test_every_row_that_can_be_wrong_is_documented(page):
    names = [name for name, status in documented(page) if status == "WRONG"]
    for row, can_be in rows().items():
        if "WRONG" in can_be and not (page == "cuda.md" and row in OF_ASCEND):
            assert any(re.fullmatch(row, name) for name in names), f"docs/{page}: nothing about {row!r}"


def test_both_languages_have_the_same_rows():
    assert list(documented("ascend.md")) == list(documented("ascend.zh.md"))
