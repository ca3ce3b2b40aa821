"""Programs with one planted fault: one place in our code that moves a tensor to a device is removed."""

import ast
import importlib
import inspect
import types
from collections.abc import Iterator

from helpers import ROOT


def places(file: str) -> list[tuple[str, int, str]]:
    """(function, line, text) of each `.to(<a device>)`, `.cpu()`, `device=<a device>` in the functions of a file, in order."""
    source = (ROOT / file).read_text()
    return [(name, node.lineno, ast.get_source_segment(source, node)) for name, node in _places(ast.parse(source))]


def mutate(file: str, number: int) -> None:
    """Changes the running program: without its `.to(...)` or `.cpu()`, or with the CPU as the device."""
    tree = ast.parse((ROOT / file).read_text())
    name, place = _places(tree)[number]
    _take_out(place)
    code = compile(ast.fix_missing_locations(tree), file, "exec")
    target, known = importlib.import_module(file.removesuffix(".py").replace("/", ".")), []
    for part in name.split("."):
        target = vars(target)[part]
        known.append(part)
        if not isinstance(target, type):
            break  # a function within this one is replaced with it
    _function(target).__code__ = next(c for c in _codes(code) if c.co_qualname == ".".join(known))


def _places(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return list(_within(tree, ""))


def _within(node: ast.AST, name: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _within(child, f"{name}.{child.name}".lstrip("."))
        else:
            if isinstance(child, ast.Call) and name and _is_place(child):
                yield name, child
            yield from _within(child, name)


def _is_place(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cpu":
        return True
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to" and call.args:
        return "device" in (to := ast.unparse(call.args[0])) or to == "'cpu'"
    return any(keyword.arg == "device" and not isinstance(keyword.value, ast.Constant) for keyword in call.keywords)


def _take_out(call: ast.Call) -> None:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cpu"):
        call.args = [call.func.value]
        call.func = ast.parse("lambda x, **_: x", mode="eval").body
        return
    for keyword in call.keywords:
        if keyword.arg == "device":
            keyword.value = ast.Constant("cpu")


def _function(target) -> types.FunctionType:
    for name in ("__func__", "fget", "func"):
        target = getattr(target, name, target)
    return inspect.unwrap(target)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)
