"""The tables of docs/generated/verl-keys.md, made from table.py and environment.py."""

from pathlib import Path

from rl.from_verl.environment import VARIABLES, Variable
from rl.from_verl.keys import NOT_HERE, NOT_NEEDED, Row
from rl.from_verl.table import TABLE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "generated" / "verl-keys.md"
BEGIN, END = "<!-- made by `python -m rl.from_verl --table` -->\n", "<!-- end of the made part -->\n"


def write() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The page with its made part made again."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + tables() + END + rest.split(END)[1]


def tables() -> str:
    out = []
    for section, rows in TABLE.items():
        out += [f"### {section}", "| verl | here |", "|---|---|"]
        out += [f"| {_names(row)} | {_here(row)} |" for row in rows] + [""]
    out += ["### Environment variables", "| variable | here |", "|---|---|"]
    out += [f"| {_variables(row)} | {row.verdict}: {row.why} |" for row in VARIABLES] + [""]
    return "\n".join(out)


def _names(row: Row) -> str:
    """Every name of every key; verl's default behind the first."""
    out = []
    for names in row.names:
        default = f" ({_value(row.defaults[names[0]])})" if names[0] in row.defaults else ""
        shown = [f"`{name.replace('actor_rollout_ref.', 'A.', 1)}`" for name in names]
        out.append(shown[0] + default + (f" or {', '.join(shown[1:])}" if shown[1:] else ""))
    return ", ".join(out)


def _variables(row: Variable) -> str:
    return ", ".join(f"`{name}`" for name in row.names.split())


def _value(value: object) -> str:
    return {None: "null"}.get(value, str(value)) if not isinstance(value, list) else f"[{', '.join(map(str, value))}]"


def _here(row: Row) -> str:
    if row.kind == NOT_NEEDED:
        return f"-: {row.note}"
    if row.kind == NOT_HERE:
        return f"not here: {row.note}"
    flags = ", ".join(f"`{flag}`" for flag in row.flags.split(", ") if flag)
    return flags + (": " if flags and row.note else "") + row.note
