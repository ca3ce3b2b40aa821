"""The flags of a judge, which is rl/rewards/judge.py."""

import json
import re
from dataclasses import dataclass
from typing import Annotated

from rl.errors import UserError
from rl.ranges import Content, MayChange, Range


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

    @property
    def judge_env(self) -> tuple[str, ...]:
        """Environment variables that the judge needs, as --reward-env names them."""
        return ("OPENAI_*", "SSL_CERT_*") if self.judge else ()

    def judge_spec(self, first: bool) -> str:
        """What rl.rewards.judge.begin takes, for a scoring process. first: of the run."""
        settings = {"rubric": self.judge, "url": self.judge_url, "model": self.judge_model, "retries": self.judge_retries}
        return json.dumps(settings | {"first": first})

    def check(self) -> None:
        """Raises UserError for a rubric or a URL that cannot be used."""
        if not self.judge:
            return
        from rl.rewards.judge import Rubric  # late: no other run needs it

        Rubric.read(self.judge)
        if not re.fullmatch("https?://[^@]+", self.judge_url):
            raise UserError("--judge-url: write it as http://HOST:PORT/v1, and export a key as OPENAI_API_KEY.")
