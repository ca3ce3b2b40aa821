"""The flags of rewards: the reward function, its limits, and what happens when it fails."""

from dataclasses import dataclass
from typing import Annotated

from rl.errors import UserError
from rl.parts import Part
from rl.ranges import Content, MayChange, Range

CODE = "code"  # --reward code, and the name of its grader


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
        if not self.own_reward:
            return False
        from rl.rewards.trl_functions import parameters_of, scores_environments  # late: few runs have functions of their own

        return any(map(scores_environments, parameters_of(self.reward)))

    @property
    def own_reward(self) -> str | None:
        """The flag that replaces the built-in verifiers, with its value; None if the verifiers score."""
        return f"--reward {self.reward}" if self.reward and self.reward != CODE else None

    def check(self, args) -> None:
        """Raise UserError for a --reward that names no file, or functions that cannot score together."""
        functions = []
        if self.own_reward:
            from user_processes.files import check_code, split_code

            check_code("--reward", self.reward, "function")
            functions = split_code(self.reward)[1].split(",")
        if self.reward_weights and len(self.reward_weights) != len(functions):
            raise UserError(
                f"--reward-weights has {len(self.reward_weights)} weights, and --reward names {len(functions)} functions."
            )
        if self.scores_environments:
            from rl.rewards.trl_functions import check_functions

            check_functions(self.reward, args.environment)
