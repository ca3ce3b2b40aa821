"""Scripts of TRL as they are: classes without get_reward, and reward functions over environments, called in the episodes."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from families import end_tokens, tokenizer_of
from test_pool import answers, begin, ids_of

import train_sync
from rl import parts, ranges
from rl.errors import UserError
from user_processes.files import import_file
from user_processes.programs import BadValue, EpisodeProgram, Programs
from user_processes.turns import Turns

SCRIPT = '''
import json
import random
from pathlib import Path

import numpy as np


class Dice:
    """Rolls dice: reset and the rolls draw from `random`."""

    def __init__(self):
        self.sides = random.choice([6, 8])

    def reset(self, **kwargs) -> str:
        self.total = 0
        return f" Start: {random.random()} {np.random.rand()} {self.sides}"

    def roll(self, times: int, label: str | None = None) -> str:
        """
        Roll the dice.

        Args:
            times: How many.
            label: A label.

        Returns:
            The sum.
        """
        if times > 9:
            raise ValueError("Game over.")
        self.total += times
        return f"{times} {label} {random.random()}"


class Narrow(Dice):
    def reset(self, level):
        self.total = level


class Scored(Dice):
    def get_reward(self):
        return 100.0


class Own:
    """Of ours, with a step."""

    def reset(self, row, seed):
        self.rewards = row["rewards"]

    def step(self, message):
        reward = self.rewards.pop(0)
        return [{"role": "user", "content": "more"}], reward, not self.rewards


def total(environments, **kwargs):
    return [float(env.total) for env in environments]


async def bonus(prompts, completions, completion_ids, environments, level, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids) == len(level) == 1
    roles = [message["role"] for message in completions[0]]
    calls = [call["function"]["arguments"] for message in completions[0] for call in message.get("tool_calls", [])]
    said = [prompts[0], roles, calls, completions[0][-1]["content"], len(completion_ids[0]), level, sorted(kwargs)]
    if kwargs["ground_truth"][0]:
        Path(kwargs["ground_truth"][0]).write_text(json.dumps(said))
    return [0.5]


def other(environments, **kwargs):
    return [None for _ in environments]


def fixed(environments):
    return [7]


def of_two(environments, **kwargs):
    return [1.0, 2.0]


def of_completions(completions, level, **kwargs):
    return [float(len(c)) + l for c, l in zip(completions, level)]


def tool(times: int) -> str:
    """Rolls.

    Args:
        times: How many.
    """
    return str(times)


def both(data_source, solution_str, ground_truth, extra_info, completions=None):
    return 1.0


def of_state(environments, trainer_state, **kwargs):
    return [1.0]


def main():
    class Nested:
        pass


if __name__ == "__main__":
    main()
'''
CALL = '<tool_call>\n{"name": "roll", "arguments": {"times": 4, "label": "a"}}\n</tool_call>'


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def started(file) -> Callable[[str, str], Callable[[], EpisodeProgram]]:
    """Makes the episodes of an environment, or of the tool, of the file with reward functions of it."""
    module = import_file(str(file), "user_environment")

    def start(name: str, functions: str, weights: Sequence[float] = (1, 1, 1)) -> Callable[[], EpisodeProgram]:
        programs = Programs([getattr(module, name)], are_tools=name == "tool")
        turns = Turns(tokenizer_of("qwen2_5"), programs.schemas(), end_tokens("qwen2_5"))
        rewards = [(getattr(module, function), weight) for function, weight in zip(functions.split(","), weights, strict=False)]
        return partial(EpisodeProgram, programs, turns, rewards)

    return start


ROW = {"prompt": [{"role": "user", "content": "Roll."}], "level": 3, "ground_truth": "", "data_source": "x", "extra_info": {}}


def play(new: Callable[[], EpisodeProgram], *turns: str, row: dict = ROW, cut: str | None = None, own_seed: int = 1) -> dict:
    """The last answer of an episode. cut: the text of a turn that the budget cuts."""
    episode = new()
    answer = episode.reset({"row": json.loads(json.dumps(row)), "seed": 5, "own_seed": own_seed})
    said: list[int] = []
    for turn in turns:
        answer = episode.step({"ids": ids_of(turn)})
        said += ids_of(turn) + answer["ids"]
    return answer if cut is None else episode.end({"ids": said + ids_of(cut)})


@pytest.mark.parametrize(
    ("name", "functions", "said", "more", "reward"),
    [  # functions see the live environment, and their rewards are summed
        ("Dice", "total,bonus,other", [CALL, "done"], {}, 4.5),
        ("Dice", "total,bonus,other", [CALL + CALL, "done"], {}, 8.5),
        ("Dice", "total,bonus,other", [CALL], {"cut": "I wa"}, 4.5),
        ("Dice", "total,bonus,other", [], {"cut": "I wa"}, 0.5),
        ("Scored", "fixed", ["done"], {}, 107),  # a class may score as well
        ("Own", "fixed", ["a", "b"], {"row": ROW | {"rewards": [None, None]}}, 7),
        ("Own", "fixed", ["a", "b"], {"row": ROW | {"rewards": [0.5, None]}}, None),  # one of ours that has scored
        ("Own", "fixed", ["a", "b"], {"row": ROW | {"rewards": [None, 0.5]}}, 0.5),
        ("Narrow", "total", ["done"], {}, 3),  # reset gets the keywords that it names
        ("tool", "of_completions", [CALL.replace("roll", "tool").replace(', "label": "a"', ""), "4"], {}, 6),
    ],
)
def test_an_episode_s_reward(name, functions, said, more, reward, started):
    assert play(started(name, functions), *(f"{text}<|im_end|>" for text in said), **more)["reward"] == reward


def test_rewards_have_weights(started):
    new = started("Dice", "total,bonus,other", (2.0, 10.0, 1.0))
    assert play(new, f"{CALL}<|im_end|>", "done<|im_end|>")["reward"] == 2 * 4 + 10 * 0.5


def test_functions_get_what_trl_gives_them(started, tmp_path):
    new = started("Dice", "bonus")
    answer = play(new, f"Well. {CALL}<|im_end|>", cut="I wa", row=ROW | {"ground_truth": str(tmp_path / "got")})
    assert answer["reward"] == 0.5
    prompt, roles, calls, last, tokens, level, more = json.loads((tmp_path / "got").read_text())
    assert prompt[0]["content"].startswith("Roll. Start: 0.") and roles == ["assistant", "tool", "assistant"]
    assert calls == [{"times": 4, "label": "a"}] and last == "I wa" and level == [3]
    assert more == ["data_source", "extra_info", "ground_truth", "log_extra", "log_metric"]
    assert tokens > len(ids_of(f"Well. {CALL}<|im_end|>I wa")) + len(ids_of("<tool_response>"))


@pytest.mark.parametrize(("functions", "said"), [("other", "each returned None"), ("of_two", "not a list of one reward")])
def test_what_is_no_reward_is_an_event(functions, said, started):
    with pytest.raises(BadValue, match=said):
        play(started("Dice", functions), "done<|im_end|>")


def test_a_group_s_resets_draw_the_same_and_its_tools_do_not(started):
    """2048's board is drawn from `random`: all responses to a prompt begin with the same one."""
    new = started("Dice", "total")
    assert len({str(play(new, own_seed=number)) for number in range(3)}) == 1
    assert len({str(play(new, f"{CALL}<|im_end|>", own_seed=number)["ids"]) for number in range(3)}) == 3


@pytest.mark.slow
def test_a_reward_function_scores_in_the_process_of_its_episode(file, make_pool):
    spec = f"{file}:Dice"
    pool = make_pool(spec, reward=f"{file}:total,bonus")
    assert pool.scores_at_end[""] and "prompt" in begin(pool, "a", "", level=3)
    pool.ask("a", "step", ids=ids_of("done<|im_end|>"))
    assert answers(pool, ["a"])["a"]["reward"] == 0.5
    with pytest.raises(UserError, match="has no 'Nested' that could be called"):
        make_pool(spec.replace("Dice", "Nested"))
    file.write_text(f"from trl_that_is_missing import GRPOTrainer\n{SCRIPT}")
    with pytest.raises(UserError, match="imports trl_that_is_missing, which is not installed"):
        make_pool(spec)
    file.write_text(SCRIPT)


@pytest.mark.parametrize(
    ("function", "flags", "said"),
    [
        ("total", {"env": True}, None),
        ("total,bonus", {"env": True}, None),
        ("of_completions", {"tools": True}, None),
        ("both", {}, None),
        ("total", {}, "needs --env or --tools"),
        ("of_completions", {}, "needs --env or --tools"),
        ("total", {"agent": "python"}, "needs --env or --tools"),
        ("total", {"tools": True}, "a function of environments needs --env"),
        ("of_state", {"env": True}, "there is no trainer_state here"),
        ("total,both", {"env": True}, "each function must name environments"),
    ],
)
def test_the_flags_are_checked_before_anything_starts(function, flags, said, file):
    flags = {name: f"{file}:{'Dice' if name == 'env' else 'tool'}" if value is True else value for name, value in flags.items()}
    args = parts.make(train_sync.Args, reward=f"{file}:{function}", **flags)
    assert args.reward.scores_environments == (function != "both")
    if said:
        with pytest.raises(UserError, match=said):
            ranges.check(args)
    else:
        ranges.check(args)
