#!/usr/bin/env python3
"""The linter of what a person reads: pages stay short, in plain English, and near the README; a line of code has one statement.

    python .ci/prose.py          # exit code 1 and a line for each fault; words in comments are only mentioned

It needs no package. What pages name, link to and quote is in pages.py; which file may ask for a device's kind is in devices.py.
Left out: tables and diffs of pages, which tests/project checks.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import devices
import pages

ROOT = Path(__file__).resolve().parents[1]
DIALECT = (  # words that a native speaker would not write here, each with the plain word for it
    r"told",  # reported, warned, said
    r"(?:goes|go|going|went) on",  # resumes, continues
    r"stands in",  # is defined in, is recorded in
    r"(?:has|have) gone",  # exited, is lost
    r"anew",  # again
    r"so many",  # this many, N
    r"beside",  # next to, compared with, in addition to
    r"kin",  # variants
    r"in silence",  # silently
    r"what comes in",  # the samples received
)
WORDS = re.compile(rf"\b(?:{'|'.join(DIALECT)})\b", re.I)
CODE = ("*.py", "rl/**/*.py", "tools/**/*.py", "tests/**/*.py", "benchmarks/**/*.py", "docs/*.py")
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time"}
MOST_WORDS = 20_000  # of README.md and docs/*.md without the pages below, which have a limit each
MOST_WORDS_OF = {
    "agents.md": 1_500,
    "trl-environments.md": 300,
    "environments.md": 250,
    "chat-templates.md": 300,
    "adapters.md": 1_000,
    "teachers.md": 1_100,
    "models.md": 1_000,
    "judges.md": 500,
    "code.md": 500,
    "from-verl.md": 900,
    "real-model.md": 1_150,
    "view.md": 400,
}
FIRST_QUESTIONS = {  # page -> the words with which it answers; each is at most two clicks from the README
    "docs/cuda.md": "pip install -r requirements-cuda.txt",  # How do I install it on my GPU ...
    "docs/ascend.md": "pip install -r requirements-npu.txt",  # ... or NPU?
    "README.md": "--train-files",  # How do I train my model on my data?
    "docs/choose.md": "## Which script",  # Which script, and how many generators?
    "docs/rewards.md": "--reward my_reward.py:score",  # How do I score responses myself?
    "docs/forking.md": "## A loss with a knob of its own",  # How do I change the loss?
    "docs/plan.md": "python plan.py",  # Will it fit, and how long will it take?
    "docs/six-numbers.md": "`critic/score/mean`",  # Which numbers should I watch?
    "docs/checkpoints.md": "--experiment-name",  # How do I resume?
    "docs/serving.md": "vllm serve",  # How do I serve the result?
    "docs/loggers.md": "--logger wandb",  # How do I log to W&B or TensorBoard?
    "docs/adapters.md": "--lora-rank",  # How do I train adapters?
    "docs/judges.md": "--reward examples/judge.py:judge",  # How does a language model score?
    "docs/not-here.md": "DPO",  # What is not supported?
}


def words_of_pages() -> Iterator[str]:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if found := WORDS.search(line):
                yield f"{page.relative_to(ROOT)}:{number}: {found[0]!r} has a plainer word (DIALECT in .ci/prose.py)"


def words_of_code() -> Iterator[str]:
    """Yield a line for each such word in comments and strings, including docstrings and messages."""
    for file in (file for pattern in CODE for file in ROOT.glob(pattern)):
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING) and (found := WORDS.search(token.string)):
                yield f"{file.relative_to(ROOT)}:{token.start[0]}: {found[0]!r} has a plainer word"


def lengths_of_pages() -> Iterator[str]:
    words = {page.name: len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")}
    for name, most in MOST_WORDS_OF.items():
        if (found := words.pop(name, 0)) > most:
            yield f"docs/{name}: {found:,} words, at most {most:,}"
    total = sum(words.values()) + len((ROOT / "README.md").read_text().split())
    if total > MOST_WORDS:
        yield f"README.md and docs/*.md: {total:,} words, at most {MOST_WORDS:,}"


def _linked(page: Path) -> set[Path]:
    """Return the pages that this page links to."""
    links = re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", page.read_text())
    return {(page.parent / link).resolve() for link in links if not link.startswith("http")}


def far_answers() -> Iterator[str]:
    near = {ROOT / "README.md"} | _linked(ROOT / "README.md")
    near |= {second for first in near if first.exists() for second in _linked(first)}
    for page, answer in FIRST_QUESTIONS.items():
        if ROOT / page not in near:
            yield f"{page}: more than two clicks from README.md"
        if answer not in (ROOT / page).read_text():
            yield f"{page}: does not say {answer!r}"


def _form(value: ast.expr) -> str:
    """Return what values of one form have in common: the kind of an expression, and what it is applied to."""
    match value:
        case ast.UnaryOp():
            return _form(value.operand)
        case ast.Constant():
            return type(value.value).__name__
        case ast.Attribute() | ast.Subscript():
            return f"{type(value).__name__} of {ast.unparse(value.value)}"
        case ast.Call():
            return f"call of {ast.unparse(value.func)}"
        case ast.BinOp():
            return type(value.op).__name__
        case ast.List() | ast.Dict() | ast.Set():
            return ast.unparse(value)
    return type(value).__name__


def packed(tree: ast.AST) -> Iterator[ast.Assign]:
    """Yield the statements that assign values of several forms, although none of them needs a name's earlier value."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)):
            continue
        targets = {ast.unparse(target) for target in node.targets[0].elts}
        read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.Name | ast.Attribute)}
        is_nested = any(isinstance(target, ast.Tuple | ast.Subscript) for target in node.targets[0].elts)
        if not is_nested and not targets & read and len({_form(value) for value in node.value.elts}) > 1:
            yield node


def packed_statements() -> Iterator[str]:
    for file in (*ROOT.glob("*.py"), *ROOT.glob("rl/**/*.py")):
        for node in packed(ast.parse(file.read_text())):
            yield f"{file.relative_to(ROOT)}:{node.lineno}: a line for each: {ast.unparse(node)}"


def timed_tests() -> Iterator[str]:
    """Yield a line for each assertion about how long something took. A busy machine has other times: benchmarks/ measures them.
    To wait until a deadline, and to fail because an event did not happen by then, is another matter."""
    for file in ROOT.glob("tests/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assert):
                differences = [
                    part for part in ast.walk(node.test) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)
                ]
                calls = [call.func for part in differences for call in ast.walk(part) if isinstance(call, ast.Call)]
                if any(ast.unparse(call) in {f"time.{clock}" for clock in CLOCKS} for call in calls):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}: a test is about how long something takes"


def main() -> int:
    for line in words_of_code():
        print(f"note: {line}")
    checks = (words_of_pages, lengths_of_pages, far_answers, packed_statements, timed_tests, pages.faults, devices.told_apart)
    faults = [fault for check in checks for fault in check()]
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
