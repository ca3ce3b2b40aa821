"""What pages name is there: links, files, versions, messages that they quote, and the rows of doctor.py's tables.

Quotations are: text in double quotes (four words or more); lines behind ">"; the first cells of tables headed "message" or
"it says"; lines of console output in code blocks and code spans that begin as a message does. In the code's strings each {...}
stands for anything, and so do the words that a page puts in its place. Started by .ci/prose.py; needs no package.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
CODE = [*ROOT.glob("*.py"), *(file for house in ("rl", "user_processes", "tools") for file in (ROOT / house).rglob("*.py"))]
FOREIGN = {  # of vLLM, torch and its shared memory
    "No available memory for the cache blocks",
    "The hostname of the client socket cannot be retrieved",
}
BEGINNING = r"(?:error|warning|Ctrl-C|Stopped): |==== The |[a-z]+ \d+ (?:failed|stops): |--[a-z-]+: (?=[a-z]+ [a-z]+)"
ANY = "\0"  # stands for anything
INSTALLS = ("requirements-npu.txt", "docs/ascend.md", "docs/ascend.zh.md")  # have the same commands
PYTHON = ("README.md", "requirements-npu.txt", ".ci/run", "docs/engines.md")  # say which Python is needed
# What stands for a variable in the name of a row of doctor.py
SCRIPT = r"train_(sync|one_step_off|async)\.py, [0-9]+ ranks?(, vllm)?"
ROW_VALUES = {"engine": "(embedded|vllm)", "after": "( after .+)?", "temperature": "(1.0|0.6)", "name": SCRIPT}
DOCTOR = ["doctor.py", *(f"tools/doctor/{name}.py" for name in ("packages", "measure", "scripts"))]
OF_ASCEND = {"CANN", "glibc", "allocator", "HCCL"}


def _shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ------------------------------------------------------------------------------------------------ links, files, versions


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links() -> Iterator[str]:
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if link.startswith(("http:", "https:")):
                continue
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                yield f"{_shown(page)}: {link} leads nowhere"
    index = (ROOT / "docs" / "README.md").read_text()
    listed = {"README.md", *re.findall(r"\]\(([\w.-]+\.md)\)", index)}
    for name in sorted({page.name for page in (ROOT / "docs").glob("*.md")} ^ listed):
        yield f"docs/README.md: lists {name}, or lacks it"


def absent_benchmarks() -> Iterator[str]:
    """benchmarks/LOG.md is history and may name benchmarks that were removed."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.txt")]
    for folder in ("docs", "rl", "user_processes", "tools", "tests", "benchmarks", "examples"):
        files += [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]
    for file in files:
        if file.name != "LOG.md" and "fixtures" not in file.parts:
            for named in re.findall(r"\bbenchmarks/[\w/]+\.py\b", file.read_text()):
                if not (ROOT / named).exists():
                    yield f"{_shown(file)}: there is no {named}"


def install_commands(page: str) -> list[str]:
    """Return the page's install commands, in order."""
    lines = [line.removeprefix("#").strip() for line in (ROOT / page).read_text().splitlines()]
    return [line for line in lines if re.match(r"(\w+=\S+ )*pip install ", line) and "-e ." not in line]


def wrong_versions() -> Iterator[str]:
    for page in INSTALLS[1:]:
        if install_commands(page) != install_commands(INSTALLS[0]):
            yield f"{page}: other install commands than in {INSTALLS[0]}"
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    for name in PYTHON:
        if not {*re.findall(r"[Pp]ython (3\.\d+)", (ROOT / name).read_text())} <= {oldest}:
            yield f"{name}: begins at another Python than {oldest}"
    engines = (ROOT / "docs" / "engines.md").read_text()
    for name in ("requirements-cuda.txt", "requirements-npu.txt", "requirements-vllm-cpu.txt"):
        for package, version in re.findall(r"^([\w-]+)==(\S+)", (ROOT / name).read_text(), re.M):
            if (name != "requirements-vllm-cpu.txt" or package == "vllm-cpu") and f"{package} {version}" not in engines:
                yield f"docs/engines.md: does not name {package} {version}"
    ruff = re.search(r"^ruff==(\S+)", (ROOT / "requirements-dev.txt").read_text(), re.M)[1]
    if f"rev: v{ruff}\n" not in (ROOT / ".pre-commit-config.yaml").read_text():
        yield f".pre-commit-config.yaml: lints with another ruff than {ruff}"


# --------------------------------------------------------------------------------------------------------- quotations


def quotations(text: str) -> Iterator[str]:
    for block in re.findall(r"^```(?:text|console)?\n(.*?)^```|((?:^    [^\n]*\n)+)", text, re.M | re.S):
        for line in "".join(block).splitlines():
            if re.match(BEGINNING, line.strip()):
                yield line.strip()
    text = re.sub(r"^```.*?^```\n|^    [^\n]*\n", "", text, flags=re.M | re.S)
    for span in re.findall(r"`([^`\n]+)`", text):
        if re.match(BEGINNING, span):
            yield span
    yield from re.findall(r"^> (.*)$", text, re.M)
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
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else ANY for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return sorted(text for text in found if " " in text)


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
    return max(best.values(), default=0) > 0.6 * len(re.findall(r"[^\s\0]", clause))


def holds(clause: str, message: str) -> bool:
    """Whether a whole message of three words or more is in the clause, which says more: what other code has put around it."""
    own = message.replace(ANY, " ").split()
    return len(own) >= 3 and bool(re.search(".+".join(map(re.escape, message.strip().split(ANY))), clause))


@cache
def _words_of(message: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z-]{3,}", message))


def is_said(clause: str) -> bool:
    shared = [message for message in messages() if len(_words_of(message) & _words_of(clause)) >= 2]  # the others cannot
    return any(is_part_of(clause, message) or holds(clause, message) for message in shared)


def wrong_quotations() -> Iterator[str]:
    for page in PAGES:
        for quoted in sorted({*quotations(page.read_text())} - FOREIGN):
            for clause in clauses(quoted):
                if not is_said(clause):
                    yield f"{_shown(page)}: quotes {quoted!r}, but no code says {clause!r}"


# ------------------------------------------------------------------------------------------------------ rows of the doctor


def _pattern(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return re.escape(node.value)
    if isinstance(node, ast.Name):
        return ROW_VALUES[node.id]
    return "".join(_pattern(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values)


def _calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) in names:
            yield node


def _statuses(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {"OK", "SLOW", "WRONG", "SKIPPED"}


def doctor_rows() -> dict[str, set[str]]:
    """Return the pattern of a row's name -> its possible states."""
    found: dict[str, set[str]] = {}
    for source in DOCTOR:
        tree = ast.parse((ROOT / source).read_text())
        prefix = ROW_VALUES["engine"] + ", " if source.endswith("measure.py") else ""
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "report"]:
            parameters = [argument.arg for argument in function.args.args if argument.arg != "self"]
            for call in _calls(function, "Finding", "report"):
                if not call.args:
                    continue
                check, status = call.args[:2]
                names = [check]
                if isinstance(check, ast.Name) and check.id in parameters and check.id not in ROW_VALUES:
                    names = [other.args[parameters.index(check.id)] for other in _calls(tree, function.name)]
                for name in names:
                    found.setdefault(prefix + _pattern(name), set()).update(_statuses(status) or _statuses(function))
    return found


def documented_rows(page: str) -> Iterator[tuple[str, str]]:
    """(row's name, status) of the table behind the doctor's heading. `train_*.py, N ranks` is a row for each script."""
    text = (ROOT / "docs" / page).read_text()
    table = re.search(r"^\| *(?:check|\u68c0\u67e5\u9879) *\|.*\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M)[1]
    for line in table.splitlines():
        cell = line.split("|")[1]
        for name in re.findall(r"`([^`]+)`", cell):
            for script in ("sync", "one_step_off", "async") if "train_*.py" in name else [""]:
                yield (
                    name.replace("train_*.py, N ranks", f"train_{script}.py, 2 ranks"),
                    "SLOW" if "(slow)" in cell else "WRONG",
                )


def wrong_doctor_rows() -> Iterator[str]:
    rows = doctor_rows()
    for page in ("ascend.md", "ascend.zh.md", "cuda.md"):
        named = [*documented_rows(page)]
        for name, status in named:
            if not any(status in can for row, can in rows.items() if re.fullmatch(row, name)):
                yield f"docs/{page}: doctor.py has no row {name!r} that is {status}"
        for row, can_be in rows.items():
            is_told = any(re.fullmatch(row, name) for name, status in named if status == "WRONG")
            if "WRONG" in can_be and not is_told and not (page == "cuda.md" and row in OF_ASCEND):
                yield f"docs/{page}: says nothing about doctor.py's row {row!r}"


def faults() -> list[str]:
    checks = (broken_links, absent_benchmarks, wrong_versions, wrong_quotations, wrong_doctor_rows)
    return [fault for check in checks for fault in check()]
