"""The flags of rewards: the reward function, its limits, and what happens when it fails."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rl.errors import UserError
from rl.parts import Part
from rl.ranges import Content, MayChange, Range, check_code
from rl.rewards.verifiers import CODE
from rl.user_file import split_code


@dataclass(frozen=True)
class RewardArgs(Part):
    """The reward function, and what happens when it fails."""

    _field = "reward"

    reward: Annotated[str | None, Content("code")] = None
    """Your own reward function, as path/to/file.py:function. It is called with (data_source, solution_str, ground_truth,
    extra_info) and returns a number, or a dict with "score" and further numbers, which become metrics. It may be async. If it
    names `prompt`, `step` (of the weights that sampled) or `split` ("train" or "val"), it also gets these. Several functions of
    the file, as file.py:f,g, are added up.
    Functions that name `environments` or `completions` are TRL's: they get those of --env.
    Or "code": responses are programs, which are tested in a sandbox."""
    reward_weights: tuple[Annotated[float, Range()], ...] = ()
    """The weight of each function of --reward in the sum; by default 1."""
    reward_timeout: MayChange[Annotated[float, Range(above=0, at_most=86_400)]] = 10.0
    """Seconds that scoring a response may take. One that takes longer is not trained, as one whose scoring fails."""
    reward_workers: MayChange[Annotated[int, Range(at_least=1, at_most=1024)]] = 1
    """Scoring processes on each rank. One works on one response at a time, or on 64 if the reward function is async."""
    outage_timeout: MayChange[Annotated[float, Range(at_least=0, at_most=1_000_000_000)]] = 1200.0
    """Seconds for which responses wait for a grader that can no longer score what it has scored: it is tried again until it
    works (at most two thirds of --hang-timeout). After that the run ends, to be resumed; 0 does not wait."""
    overlong_buffer_len: Annotated[int, Range(at_least=0)] = 0
    """DAPO: penalise, linearly, a response that ends within this many tokens of --max-response-length; 0 turns it off."""
    overlong_penalty_factor: Annotated[float, Range(at_least=0)] = 1.0
    """DAPO: the penalty of a response with --max-response-length tokens."""

    @property
    def scores_environments(self) -> bool:
        """Whether --reward names functions in TRL's form, which are called in the processes of the episodes."""
        is_file = bool(self.reward) and self.reward != CODE
        return is_file and any(_is_of_trl(names) for names in parameters_of(self.reward))

    @property
    def own_reward(self) -> str | None:
        """The flag that replaces the built-in verifiers, with its value; None if the verifiers score."""
        return f"--reward {self.reward}" if self.reward and self.reward != CODE else None

    def check(self, args) -> None:
        """Raise UserError for a --reward that names no file, or functions that cannot score together."""
        if self.reward and self.reward != CODE:
            check_code("--reward", self.reward, "function")
        functions = split_code(self.reward)[1].split(",") if self.own_reward else []
        if self.reward_weights and len(self.reward_weights) != len(functions):
            raise UserError(
                f"--reward-weights has {len(self.reward_weights)} weights, and --reward names {len(functions)} functions."
            )
        if self.scores_environments:
            self._check_functions(args.environment)

    def _check_functions(self, environment) -> None:
        """Raise UserError unless all functions are in TRL's form, and there is an environment or tools."""
        functions = parameters_of(self.reward)
        if not all(map(_is_of_trl, functions)):
            raise UserError(f"--reward {self.reward}: each function must name environments or completions, or none of them.")
        if not (environment.env or environment.tools):
            raise UserError(
                f"--reward {self.reward}: a function of environments or completions, as TRL's, needs --env or --tools. Give "
                "one, or a function of (data_source, solution_str, ground_truth, extra_info)."
            )
        if environment.tools and any("environments" in names for names in functions):
            raise UserError(f"--reward {self.reward}: a function of environments needs --env. Name their class with it.")
        if any("trainer_state" in names for names in functions):
            raise UserError(f"--reward {self.reward}: there is no trainer_state here. Leave the parameter out.")


def _is_of_trl(parameters: set[str]) -> bool:
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
