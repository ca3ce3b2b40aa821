"""An environment as a reward function: it gets texts as the turns of a model. A text that stops it is then an event like any
other, and no model is needed."""

import functools
from collections.abc import Callable

from user_processes.calls import parse
from user_processes.programs import EpisodeProgram, Programs
from user_processes.worker import named

UNSCORED = "unscored"  # a number of the score: whether a grader has to give it


class Texts:
    """In place of Turns: the only token of a turn is its text."""

    end_tokens = ()

    def __init__(self, programs: Programs, form: str):
        """form: of calls."""
        schemas = programs.schemas() if programs.functions else []
        self.form, self.parameters = form, {its["function"]["name"]: its["function"].get("parameters", {}) for its in schemas}

    def message(self, ids: list[str]) -> dict:
        content, calls = parse(ids[0], self.form, self.parameters) if self.parameters else (ids[0], [])
        return {"role": "assistant", "content": content, "calls": calls}

    def between(self, messages: list[dict], is_cut: bool) -> list[str]:
        return []

    prompt = between


@functools.cache
def opened(code: str, are_tools: bool, form: str, reward: str) -> tuple[Programs, Texts, list[tuple[Callable, float]]]:
    """Return what an episode is made of. reward: functions in TRL's form, if there are any."""
    programs = Programs(named(code), are_tools)
    return programs, Texts(programs, form), [(function, 1.0) for function in named(reward)] if reward else []


def play(data_source, solution_str, ground_truth, extra_info):
    """Return the sum of an episode's rewards. extra_info: `program`, as `opened` takes it; `row`; `turns` of the model, and how
    many `times` they come; `seed` and `own_seed`, as in training."""
    program = EpisodeProgram(*opened(*extra_info["program"]))
    program.reset(extra_info)
    answers = []
    for text in extra_info["turns"] * extra_info["times"]:
        answers.append(program.step({"ids": [text]}))
        if answers[-1]["done"]:
            break
    else:
        answers.append(program.end({"ids": []}))
    rewards = [answer["reward"] for answer in answers if answer["reward"] is not None]
    return {"score": sum(rewards), UNSCORED: not rewards}
