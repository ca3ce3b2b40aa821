"""docs/generated/promises.md, out of the first paragraph of each test file.

    python docs/make.py

The other generated pages: `python -m rl.from_verl --table` writes verl-keys.md, `python benchmarks/table.py` benchmarks.md.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "generated" / "promises.md"
HEAD = """# What each test file checks

<!-- made by `python docs/make.py` out of the tests' docstrings; edit those -->
"""


def promise(file: Path) -> str:
    """The first paragraph of the file's docstring, on one line that fits a table."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", r"\|")


def page() -> str:
    lines = [HEAD]
    for folder in sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir()):
        files = sorted(folder.glob("test_*.py"))
        if files:
            lines += [f"## {folder.name}", "", "| test | what it checks |", "|---|---|"]
            lines += [f"| `{file.relative_to(ROOT)}` | {promise(file)} |" for file in files] + [""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
