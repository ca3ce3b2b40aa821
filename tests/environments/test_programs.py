"""A user's environment, tools as functions, and a TRL environment's class as it is, all as one program."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rl.environments.programs import BadValue, Programs, as_reward


def divide(a: int, b: int) -> float:
    """Divides.

    Args:
        a: The dividend.
        b: The divisor.
    """
    return a / b


def offline(page: str) -> str:
    """Reads a page.

    Args:
        page: Which.
    """
    raise ConnectionError("no network")


class OfTrl:
    """As TRL's documentation has it: public methods are tools, state is the object's."""

    def reset(self, **row) -> str | None:
        self.truth, self.answer = row["ground_truth"], None
        return f"It is {row['hint']}."

    def guess(self, word: str) -> str:
        """Guesses a word.

        Args:
            word: The word.
        """
        self.answer = word
        return "noted"

    def get_reward(self) -> float:
        return float(self.answer == self.truth)

    def _hidden(self):
        raise AssertionError


def said(*calls, content=""):
    return {"role": "assistant", "content": content, "calls": list(calls)}


def read(path: str) -> str:
    """Reads a file.

    Args:
        path: Its path.
    """
    return Path(path).read_text()


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def test_tools_answer_in_order_and_say_what_is_wrong():
    programs = Programs([divide, offline], are_tools=True)
    assert [schema["function"]["name"] for schema in programs.schemas()] == ["divide", "offline"]
    program = programs.new()
    assert program.reset({}, 0) == []
    calls = [call("divide", a=7, b=2), call("divide", a=1, b=0), call("divide", a=1), call("other"), "the call has no end"]
    messages, reward, done = program.step(said(*calls))
    contents = [message["content"] for message in messages]
    assert contents[0] == "3.5" and "ZeroDivisionError" in contents[1] and "missing a required argument: 'b'" in contents[2]
    assert "there is no tool 'other'" in contents[3] and contents[4] == "error: the call has no end"
    assert {message["role"] for message in messages} == {"tool"} and reward is None and not done
    assert program.step(said(content="3.5")) == ([], None, True)
    missing = Programs([read], are_tools=True).new().step(said(call("read", path="/no/such/file")))
    assert missing[0][0]["content"].startswith("error: FileNotFoundError")  # the model gave the path
    with pytest.raises(ConnectionError):  # the machine's failure is no answer to the model
        program.step(said(call("offline", page="x")))


def test_async_calls_of_a_turn_run_at_the_same_time():
    """The first can only end after the second; answers are in the order of the calls."""
    come = asyncio.Event()

    async def waits(page: str) -> str:
        """Waits.

        Args:
            page: A page.
        """
        await asyncio.wait_for(come.wait(), 30)
        return f"waited for {page}"

    async def comes(page: str) -> str:
        """Comes.

        Args:
            page: A page.
        """
        come.set()
        raise ValueError(f"no {page}")

    program = Programs([waits, comes, divide], are_tools=True).new()
    calls = [call("waits", page="x"), call("divide", a=1, b=2), call("comes", page="y")]
    contents = [message["content"] for message in program.step(said(*calls))[0]]
    assert contents == ["waited for x", "0.5", "error: ValueError: no y"]


def test_a_trl_environment_runs_unchanged():
    programs = Programs([OfTrl], are_tools=False)
    (schema,) = programs.schemas()
    assert schema["function"]["name"] == "guess" and list(schema["function"]["parameters"]["properties"]) == ["word"]
    assert programs.scores_at_end
    program, other = programs.new(), programs.new()
    row = {"ground_truth": "cat", "hint": "small", "prompt": []}
    assert program.reset(row, 0) == "It is small." == other.reset(row, 0)
    messages, reward, done = program.step(said(call("guess", word="cat")))
    assert messages == [{"role": "tool", "name": "guess", "content": "noted"}] and reward is None and not done
    assert program.step(said(content="done")) == ([], 1.0, True) and other.reward() == 0.0


def test_tools_are_the_bound_methods_as_in_trl():
    class WithHelpers(OfTrl):
        @staticmethod
        def describe(observation):
            return observation

        @classmethod
        def rules(cls) -> str:
            """Says the rules."""
            return cls.__name__

    programs = Programs([WithHelpers], are_tools=False)
    assert {schema["function"]["name"] for schema in programs.schemas()} == {*Programs([OfTrl], False).functions, "rules"}
    assert programs.new().step(said(call("rules")))[0][0]["content"] == "WithHelpers"


def test_an_environment_s_own_tools_are_shown_and_its_calls_handed_over():
    class Own:
        tools = (divide,)

        def step(self, message):
            self.message = message
            return [{"role": "tool", "content": "ok"}], np.float32(0.5), False

    programs = Programs([Own], are_tools=False)
    assert [schema["function"]["name"] for schema in programs.schemas()] == ["divide"] and not programs.scores_at_end
    program = programs.new()
    _, reward, done = program.step(said(call("divide", a=1, b=2), "the call has no end"))
    assert program.instance.message["tool_calls"] == [{"type": "function", "function": call("divide", a=1, b=2)}]
    assert program.instance.message["malformed"] == ["the call has no end"] and (reward, done) == (0.5, False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, 10**400, "1", [1]])
def test_a_reward_that_is_none_of_ours_is_refused(value):
    with pytest.raises(BadValue):
        as_reward(value)
    assert as_reward(None) is None and as_reward(True) == 1.0
