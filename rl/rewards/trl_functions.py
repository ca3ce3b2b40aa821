"""Functions of --reward in TRL's form, over `environments` or `completions`, which are called in the episodes' processes."""

import ast
import functools
from pathlib import Path

from rl.errors import UserError
from user_processes.files import split_code


def check_functions(reward: str, environment) -> None:
    """Raise UserError unless all functions are in TRL's form, and there is an environment or tools."""
    functions = parameters_of(reward)
    if not all(map(scores_environments, functions)):
        raise UserError(f"--reward {reward}: each function must name environments or completions, or none of them.")
    if not (environment.env or environment.tools):
        raise UserError(
            f"--reward {reward}: a function of environments or completions, as TRL's, needs --env or --tools. Give "
            "one, or a function of (data_source, solution_str, ground_truth, extra_info)."
        )
    if environment.tools and any("environments" in names for names in functions):
        raise UserError(f"--reward {reward}: a function of environments needs --env. Name their class with it.")
    if any("trainer_state" in names for names in functions):
        raise UserError(f"--reward {reward}: there is no trainer_state here. Leave the parameter out.")


def scores_environments(parameters: set[str]) -> bool:
    """Return whether a function with these parameters is in TRL's form."""
    return bool(parameters & {"environments", "completions"}) and "solution_str" not in parameters


@functools.cache
def parameters_of(spec: str) -> list[set[str]]:
    """Return the names of the parameters of each function that path/to/file.py:names names and the file defines. The file is
    not imported."""
    path, names = split_code(spec)
    try:
        nodes = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # reported where the file is imported
        return []
    functions = {node.name: node.args for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found = [functions[name] for name in names.split(",") if name in functions]
    return [{a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)} for args in found]
