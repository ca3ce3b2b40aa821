"""The program of an environment's process: a user's environment, tools as functions, or a TRL class whose methods are tools.

All three have the same methods: `reset(row, seed)` returns messages to add to the prompt or, as in TRL, text to add to its last
message; `step(message)` returns the messages that answer the model's, a reward or None, and whether the episode is over.
The user's functions may be async.
"""

import asyncio
import functools
import inspect
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from rl.environments.observation import BadValue, as_text

OF_THE_MACHINE = OSError, MemoryError, ImportError  # not shown to the model: its call is not at fault
OF_A_PATH = FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError  # shown: a wrong path
OWN = ("reset", "get_reward", "close")  # methods of a TRL environment that are not tools


class Silent(Exception):
    """The user's agent took too long."""

    event = "timeout"


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def awaited(value: Any) -> Any:
    """Return the value, or the result of an awaitable."""
    return _loop().run_until_complete(value) if inspect.isawaitable(value) else value


def accepted(function: Callable, keywords: dict) -> dict:
    """Return the keywords that the function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return keywords if takes_all else {name: value for name, value in keywords.items() if name in parameters}


class OwnEnvironment:
    """An instance of the user's class with `step`."""

    def __init__(self, instance: Any):
        self.instance = instance

    def reset(self, row: dict, seed: int) -> list[dict] | str:
        if not hasattr(self.instance, "reset"):
            return []
        return as_added(awaited(self.instance.reset(row, seed)))

    def step(self, message: dict) -> tuple[list[dict], float | None, bool]:
        calls = message.pop("calls")
        good = [{"type": "function", "function": call} for call in calls if isinstance(call, dict)]
        malformed = [call for call in calls if isinstance(call, str)]
        message |= ({"tool_calls": good} if good else {}) | ({"malformed": malformed} if malformed else {})
        answer = awaited(self.instance.step(message))
        if not isinstance(answer, tuple | list) or len(answer) != 3:
            raise BadValue(f"step returned {answer!r:.100}, not (messages, reward or None, done)")
        messages = as_messages(answer[0])
        reward = as_reward(answer[1])
        done = bool(answer[2])
        if not messages and not done:
            raise BadValue("step returned no message, and is not done")
        return messages, reward, done

    def reward(self) -> None:
        """Return None: an episode that was cut has no further reward."""


class ToolEnvironment:
    """Functions that the model may call. The episode ends with the first turn that calls none."""

    def __init__(self, tools: dict[str, Callable], instance: Any = None):
        """instance: the TRL environment, if the tools are its methods."""
        self.tools, self.instance = tools, instance

    def reset(self, row: dict, seed: int) -> list[dict] | str:
        if not hasattr(self.instance, "reset"):
            return []
        return as_added(awaited(self.instance.reset(**accepted(self.instance.reset, row))))

    def step(self, message: dict) -> tuple[list[dict], float | None, bool]:
        if not message["calls"]:
            return [], self.reward(), True
        answers = [self._answer(call) for call in message["calls"]]
        at_work = [answer for answer in answers if inspect.isawaitable(answer)]  # async tools of a turn run at the same time
        done = iter(awaited(_all(at_work)) if at_work else ())
        return [next(done) if inspect.isawaitable(answer) else answer for answer in answers], None, False

    def reward(self) -> float | None:
        """Return the reward of the whole episode; None if it is not scored here."""
        if not hasattr(self.instance, "get_reward"):
            return None
        return as_reward(awaited(self.instance.get_reward()))

    def _answer(self, call: dict | str) -> dict | Awaitable[dict]:
        """Return the message that the model reads: the tool's result, or the error of the call or the tool."""
        if isinstance(call, str):
            return {"role": "tool", "content": f"error: {call}"}
        name = call["name"]
        if name not in self.tools:
            return {"role": "tool", "name": name, "content": f"error: there is no tool {name!r}: {', '.join(self.tools)}"}
        try:
            inspect.signature(self.tools[name]).bind(**call["arguments"])
        except TypeError as error:
            return {"role": "tool", "name": name, "content": f"error: {error}"}
        try:
            result = self.tools[name](**call["arguments"])
        except Exception as error:
            result = _failure(error)
        return _when_done(name, result) if inspect.isawaitable(result) else _answer_of(name, result)


async def _all(answers: list[Awaitable[dict]]) -> list[dict]:
    return await asyncio.gather(*answers)


async def _when_done(name: str, result: Awaitable) -> dict:
    try:
        result = await result
    except Exception as error:
        result = _failure(error)
    return _answer_of(name, result)


def _failure(error: Exception) -> str:
    """Return the text that the model reads if a tool raises. Raise an error that is not the call's fault."""
    if isinstance(error, OF_THE_MACHINE) and not isinstance(error, OF_A_PATH):
        raise error
    return f"error: {type(error).__name__}: {error}"


def _answer_of(name: str, result: Any) -> dict:
    return {"role": "tool", "name": name, "content": as_text(result)}


def as_messages(value: Any) -> list[dict]:
    """Return the messages that the user's code returned, with content as text. Raise BadValue if they are not messages."""
    if isinstance(value, str | dict) or not hasattr(value or [], "__iter__"):
        raise BadValue(f"{value!r:.100} is not a list of messages {{role, content}}")
    messages = []
    for message in [] if value is None else value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadValue(f"{message!r:.100} is not a message {{role, content}}")
        content = [{"type": "image"}] if "images" in message else message["content"]  # as_text refuses images
        messages.append(message | {"content": as_text(content)})
    return messages


def as_added(value: Any) -> list[dict] | str:
    """Return what reset adds to the prompt: messages, or text of any other value, for the last message; nothing for None."""
    if value is None:
        return []
    items = value if isinstance(value, list | tuple) else [value]
    are_messages = any(isinstance(item, dict) and "role" in item for item in items)
    return as_messages(value) if are_messages or not items else as_text(value)


def as_reward(value: Any) -> float | None:
    """Return the reward that the user's code returned. Raise BadValue if it is neither None nor a finite number of fp32."""
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, bool | int | float) or not abs(value) <= 3e38:  # also true for NaN
        raise BadValue(f"the reward is {value!r:.100}, neither None nor a finite number of fp32")
    return float(value)


class Programs:
    """The user's functions or class, imported once. It makes each episode's program and the schemas of the tools."""

    def __init__(self, things: list[Any], are_tools: bool):
        """things: functions, or one class. Raise TypeError for a class without step or public methods."""
        self.cls = None if are_tools else things[0]
        self.is_own = self.cls is not None and hasattr(self.cls, "step")
        if self.cls is None:
            self.functions = {function.__name__: function for function in things}
        elif self.is_own:
            self.functions = {function.__name__: function for function in getattr(self.cls, "tools", ())}
        else:
            self.functions = {name: method for name, method in inspect.getmembers(self.cls) if self._is_tool(name, method)}
        if not self.functions and not self.is_own:
            raise TypeError(f"{self.cls.__name__} has neither a method step nor public methods that could be tools")

    def _is_tool(self, name: str, method: Any) -> bool:
        """Return whether it is a public method that an instance binds, as in TRL: no static one."""
        if name.startswith("_") or name in OWN or not (inspect.isfunction(method) or inspect.ismethod(method)):
            return False
        return not isinstance(inspect.getattr_static(self.cls, name), staticmethod)

    @property
    def scores_at_end(self) -> bool:
        """Whether an episode that was cut still has a reward."""
        return not self.is_own and hasattr(self.cls, "get_reward")

    def schemas(self) -> list[dict]:
        """Return the schemas of the tools, in the form for chat templates."""
        from transformers.utils import get_json_schema

        schemas = [get_json_schema(function) for function in self.functions.values()]
        for schema in schemas:
            parameters = schema["function"].get("parameters", {})
            parameters.get("properties", {}).pop("self", None)
            if "required" in parameters:
                parameters["required"] = [name for name in parameters["required"] if name != "self"]
        return schemas

    def new(self) -> OwnEnvironment | ToolEnvironment:
        """Return an episode's program."""
        if self.cls is None:
            return ToolEnvironment(self.functions)
        instance = self.cls()
        if self.is_own:
            return OwnEnvironment(instance)
        return ToolEnvironment({name: getattr(instance, name) for name in self.functions}, instance)


def seed_random(seed: int) -> None:
    """Seed the random number generators: otherwise all forks of a process would draw the same numbers."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if sys.modules.get("torch"):
        sys.modules["torch"].manual_seed(seed % 2**63)
