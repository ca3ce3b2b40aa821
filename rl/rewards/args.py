"""The flags of rewards: the reward function and its limits, a judge (rl/rewards/judge.py), programs (rl/rewards/programs/)."""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from rl.errors import UserError
from rl.ranges import Content, MayChange, Range, check_code

CODE = "code"  # --reward code, and the name of its grader


@dataclass
class CodeArgs:
    """Programs that the model writes, which are run in a sandbox and tested."""

    code_score: Literal["fraction", "all"] = "fraction"
    """Score of a program: the fraction of its tests that it passes, or 1 if it passes all of them and else 0."""
    code_tests: Annotated[int, Range(at_least=0)] = 10
    """Only the first tests of a row are run, this many at most; 0 runs all."""
    code_timeout: MayChange[Annotated[float, Range(above=0, at_most=86_400)]] = 5.0
    """CPU seconds that a test may take, rounded up to whole ones; it may last twice as long. All tests of a response together
    have --reward-timeout; tests that are not run by then have failed."""
    code_memory_limit_gb: MayChange[Annotated[float, Range(at_least=0.0625, at_most=1_000_000)]] = 1.0
    """Address space of each process of a tested program, in GiB."""

    def limits(self, in_all: float) -> dict:
        """What the grader of programs gets with each response. in_all: seconds that all its tests together may take."""
        own = {"seconds": self.code_timeout, "memory_gb": self.code_memory_limit_gb, "tests": self.code_tests}
        return own | {"all": self.code_score == "all", "in_all": in_all}


@dataclass
class JudgeArgs:
    """Scores by a language model."""

    judge: Annotated[str | None, Content("code")] = None
    """Have a language model score the responses by this rubric, a YAML or JSON file (docs/judges.md)."""
    judge_url: MayChange[str] = "http://localhost:8000/v1"
    """OpenAI-compatible endpoint of --judge. Its key is read from the environment's OPENAI_API_KEY."""
    judge_model: str | None = None
    """Model at that endpoint. Default: its only one."""
    judge_retries: MayChange[Annotated[int, Range(at_least=0, at_most=100)]] = 3
    """Times that a question is asked again after a failure of the endpoint, within --reward-timeout."""

    def check(self) -> None:
        """Raises UserError for a rubric or a URL that cannot be used."""
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
    format_score: Annotated[float, Range()] = 0.0
    """Score of a wrong answer in the right format, from the built-in gsm8k."""
    overlong_buffer_len: Annotated[int, Range(at_least=0)] = 0
    """DAPO: a response that ends within this many tokens of --max-response-length is penalised, linearly; 0 turns it off."""
    overlong_penalty_factor: Annotated[float, Range(at_least=0)] = 1.0
    """DAPO: the penalty of a response of --max-response-length."""

    @property
    def own_reward(self) -> str | None:
        """The flag that replaces the built-in verifiers, and its value; None if they score."""
        if self.judge:
            return f"--judge {self.judge}"
        return f"--reward {self.reward}" if self.reward and self.reward != CODE else None

    def worker_spec(self, first: bool) -> str:
        """What a scoring process imports (rl/rewards/worker.py): the user's function, or a judge with these settings; empty for
        the built-in verifiers. first: whether it is the run's first process."""
        if self.judge:
            settings = {"rubric": self.judge, "url": self.judge_url, "model": self.judge_model, "retries": self.judge_retries}
            return json.dumps(settings | {"first": first})
        return self.reward if self.own_reward else ""

    @property
    def passed_env(self) -> tuple[str, ...]:
        """Environment variables that a scoring process gets although they may be secrets, by name or pattern."""
        return (*self.reward_env, "OPENAI_*", "SSL_CERT_*") if self.judge else self.reward_env

    def check(self) -> None:
        """Raises UserError for a --reward that names no file."""
        if self.judge and self.reward:
            raise UserError("--reward and --judge: a response has one score. Call the judge in your function (docs/judges.md).")
        if self.reward and self.reward != CODE:
            check_code("--reward", self.reward, "function")
