"""The flags of rewards: the reward function and its limits, a judge (rl/rewards/judge.py), programs (rl/rewards/programs/)."""

import ast
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rl.errors import UserError
from rl.ranges import Content, MayChange, Range, check_code

CODE = "code"  # --reward code, and the name of its grader


@dataclass
class CodeArgs:
    """Programs that the model writes, which are run in a sandbox and tested."""

    code_score: Literal["fraction", "all"] = "fraction"
    """Score of a program. fraction: the fraction of tests passed; all: 1 if all tests pass, else 0."""
    code_tests: Annotated[int, Range(at_least=0)] = 10
    """Run at most this many of a row's tests, the first ones; 0 runs all."""
    code_timeout: MayChange[Annotated[float, Range(above=0, at_most=86_400)]] = 5.0
    """CPU seconds that a test may take, rounded up to a whole number; by the clock it may take twice as long. All tests of a
    response share --reward-timeout; tests not run by then count as failed."""
    code_memory_limit_gb: MayChange[Annotated[float, Range(at_least=0.0625, at_most=1_000_000)]] = 1.0
    """Memory of a tested program with all its processes, files and sockets, in GiB."""

    def limits(self, in_all: float) -> dict:
        """Return the limits that the grader of programs gets with each response. in_all: seconds for all its tests together."""
        own = {"seconds": self.code_timeout, "memory_gb": self.code_memory_limit_gb, "tests": self.code_tests}
        return own | {"all": self.code_score == "all", "in_all": in_all}


@dataclass
class JudgeArgs:
    """Scores by a language model."""

    judge: Annotated[str | None, Content("code")] = None
    """Let a language model score the responses by this rubric, a YAML or JSON file (docs/judges.md)."""
    judge_url: MayChange[str] = "http://localhost:8000/v1"
    """OpenAI-compatible endpoint of --judge. The key is read from the environment variable OPENAI_API_KEY."""
    judge_model: str | None = None
    """Model at that endpoint. Default: the only model there."""
    judge_retries: MayChange[Annotated[int, Range(at_least=0, at_most=100)]] = 3
    """Retries of a question after a failure of the endpoint, within --reward-timeout."""

    def check(self) -> None:
        """Raise UserError for a rubric or a URL that cannot be used."""
        if not self.judge:
            return
        from rl.rewards.judge import Rubric  # late: no other run needs it

        Rubric.read(self.judge)
        if not re.fullmatch("https?://[^@]+", self.judge_url):
            raise UserError("--judge-url: write it as http://HOST:PORT/v1, and export a key as OPENAI_API_KEY.")


@dataclass
class RewardArgs(JudgeArgs, CodeArgs):
    """The reward function, and what happens when it fails."""

    reward: Annotated[str | None, Content("code")] = None
    """Your own reward function, as path/to/file.py:function. It is called with (data_source, solution_str, ground_truth,
    extra_info) and returns a number, or a dict with "score" and further numbers, which become metrics. It may be async.
    Functions that name `environments` or `completions` are TRL's: they get those of --env, and several may be named.
    Or "code": responses are programs, which are tested in a sandbox."""
    reward_timeout: MayChange[Annotated[float, Range(above=0, at_most=86_400)]] = 10.0
    """Seconds that scoring a response may take; --on-reward-error says what happens after that."""
    reward_cpu_limit: MayChange[Annotated[float, Range(at_least=0, at_most=86_400)]] = 60.0
    """CPU seconds that scoring a response may take, over all threads of its process; 0 is no limit."""
    reward_workers: MayChange[Annotated[int, Range(at_least=1, at_most=1024)]] = 1
    """Scoring processes on each rank."""
    reward_concurrency: MayChange[Annotated[int, Range(at_least=1, at_most=65_536)]] = 64
    """Responses that an async reward function, or the judge, works on at once in each process."""
    reward_memory_limit_gb: MayChange[Annotated[float, Range(at_least=0, at_most=1_000_000)]] = 4.0
    """Address space of each scoring process, in GiB; 0 is no limit."""
    reward_env: MayChange[tuple[str, ...]] = ()
    """Environment variables to pass to the reward function and to environments, by name or pattern (MY_*). Without this,
    secrets (*TOKEN*, *KEY*, *SECRET*, AWS_*, HF_*, WANDB_*, ...) and those of the job (RANK, MASTER_*, ...) are removed."""
    on_reward_error: Literal["mask", "zero"] = "mask"
    """What to do with a response that could not be scored. mask: leave it out of the loss, the baseline and mean scores; zero:
    give it a score of 0. It is counted either way. In validation it counts as wrong: it gets 0, or the worst score of its
    source if that is below 0."""
    max_unscored_steps: MayChange[Annotated[int, Range(at_least=1)]] = 3
    """Steps in a row without a single score after which the run saves a checkpoint and ends, to be resumed once responses can
    be scored again. Such steps train nothing. In the first step after a start there must be a score."""
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
        if self.judge:
            return f"--judge {self.judge}"
        return f"--reward {self.reward}" if self.reward and self.reward != CODE else None

    @property
    def graders(self) -> str:
        """The flags of what scores responses, with their values."""
        own = [self.own_reward] if self.own_reward else []
        if getattr(self, "has_environment", False):
            own.append(" ".join(self.environment_flag))
        return " and ".join(own) or "the built-in verifiers"

    def worker_spec(self, first: bool) -> str:
        """Return what a scoring process loads (rl/rewards/worker.py): the user's function, or a judge's settings; empty for the
        built-in verifiers. first: whether it is the run's first process."""
        if self.judge:
            settings = {"rubric": self.judge, "url": self.judge_url, "model": self.judge_model, "retries": self.judge_retries}
            return json.dumps(settings | {"first": first})
        return self.reward if self.own_reward else ""

    @property
    def passed_env(self) -> tuple[str, ...]:
        """Environment variables, by name or pattern, that a scoring process gets although they may be secrets."""
        return (*self.reward_env, "OPENAI_*", "SSL_CERT_*") if self.judge else self.reward_env

    def check(self) -> None:
        """Raise UserError for a --reward that names no file, and for --reward with --judge."""
        if self.judge and self.reward:
            raise UserError("--reward and --judge: a response has one score. Call the judge in your function (docs/judges.md).")
        if self.reward and self.reward != CODE:
            check_code("--reward", self.reward, "function")
        if self.scores_environments:
            self._check_functions()

    def _check_functions(self) -> None:
        """Raise UserError unless all functions are in TRL's form, and there is an environment or tools."""
        functions = parameters_of(self.reward)
        if not all(map(_is_of_trl, functions)):
            raise UserError(f"--reward {self.reward}: each function must name environments or completions, or none of them.")
        if not (getattr(self, "env", None) or getattr(self, "tools", None)):
            raise UserError(
                f"--reward {self.reward}: a function of environments or completions, as TRL's, needs --env or --tools. Give "
                "one, or a function of (data_source, solution_str, ground_truth, extra_info)."
            )
        if not getattr(self, "env", None) and any("environments" in names for names in functions):
            raise UserError(f"--reward {self.reward}: a function of environments needs --env. Name their class with it.")
        if any("trainer_state" in names for names in functions):
            raise UserError(f"--reward {self.reward}: there is no trainer_state here. Leave the parameter out.")


def _is_of_trl(parameters: set[str]) -> bool:
    return bool(parameters & {"environments", "completions"}) and "solution_str" not in parameters


@functools.cache
def parameters_of(spec: str) -> list[set[str]]:
    """Return the names of the parameters of each function that path/to/file.py:names names and the file defines. The file is
    not imported."""
    path, _, names = spec.rpartition(":")
    try:
        nodes = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # reported where the file is imported
        return []
    functions = {node.name: node.args for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found = [functions[name] for name in names.split(",") if name in functions]
    return [{a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)} for args in found]
