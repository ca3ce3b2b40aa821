"""Pages out of docstrings: docs/generated/code-map.md (each file of rl/) and docs/generated/promises.md (each test file).

    python docs/make.py

The other generated pages: `python -m rl.from_verl --table` writes verl-keys.md, `python benchmarks/table.py` benchmarks.md.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "docs" / "generated"
NOTE = "<!-- made by `python docs/make.py` out of docstrings; edit those -->"


def first_paragraph(file: Path) -> str:
    """Of the file's docstring, on one line that fits a table."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", r"\|")


def section(title: str, head: str, files: Iterable[Path], folder: Path) -> list[str]:
    rows = [f"| `{file.relative_to(folder)}` | {first_paragraph(file)} |" for file in files]
    return [f"## {title}", "", f"| {head} | |", "|---|---|", *rows, ""]


def promises() -> str:
    """What each test file checks."""
    lines = ["# What each test file checks", "", NOTE, ""]
    for folder in sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir()):
        if files := sorted(folder.glob("test_*.py")):
            lines += section(folder.name, "test", files, ROOT)
    return "\n".join(lines)


def code_map() -> str:
    """What each file of rl/ does, folder by folder."""
    lines = ["# What each file does", "", NOTE, "", "Back to [design.md](../design.md), which has the ideas.", ""]
    scripts = [*sorted(ROOT.glob("train_*.py")), *sorted(path for path in ROOT.glob("*.py") if "train" not in path.name)]
    lines += section("Scripts", "file", scripts, ROOT)
    folders = sorted({file.parent for file in (ROOT / "rl").rglob("*.py")})
    for folder in folders:
        files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        text = first_paragraph(folder / "__init__.py")
        head, _, *rows = section(f"{folder.relative_to(ROOT)}/", "file", files, folder)
        lines += [head, "", *([text, ""] if text else []), *rows]
    return "\n".join(lines)


PAGES = {"promises.md": promises, "code-map.md": code_map}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (GENERATED / name).write_text(page())
