"""A line has one statement: `a, b = x, y` is for values of one form, and for values that one statement after the other would
change."""

import ast

import pytest
from helpers import ROOT

FILES = [*ROOT.glob("*.py"), *ROOT.glob("rl/**/*.py")]


def form(value: ast.expr) -> str:
    """Return what values of one form have in common: the kind of an expression, and what it is applied to."""
    match value:
        case ast.UnaryOp():
            return form(value.operand)
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


def packed(tree: ast.AST) -> list[str]:
    """Return the statements that assign values of several forms, although none of them needs a name's earlier value."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)):
            continue
        targets = {ast.unparse(target) for target in node.targets[0].elts}
        read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.Name | ast.Attribute)}
        is_nested = any(isinstance(target, ast.Tuple | ast.Subscript) for target in node.targets[0].elts)
        if not is_nested and not targets & read and len({form(value) for value in node.value.elts}) > 1:
            found.append(ast.unparse(node))
    return found


def test_unrelated_values_have_a_line_each():
    assert {file.name: lines for file in FILES if (lines := packed(ast.parse(file.read_text())))} == {}


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
def test_the_search_finds_them(statement, is_found):
    assert bool(packed(ast.parse(statement))) is is_found
