"""What answers in an episode: a user's environment, tools as functions, or a TRL class whose methods are tools.

All three have the same methods: `reset(row, seed)` returns messages to add to the prompt or, as in TRL, text to add to its last
message; `step(message)` returns the messages that answer the model's, a reward or None, and whether the episode is over.
The user's functions may be async. Left out: videos and sound.

--reward may name functions in TRL's form, whose signatures name `environments` or `completions`. TRL calls them with lists over
a batch. Here each is called in the response's own process when the response has ended, with lists of one. Left out: functions
that compare responses, and `trainer_state`.
"""

import asyncio
import dataclasses
import functools
import inspect
import json
import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from user_processes import pictures
from user_processes.child import BadValue

if TYPE_CHECKING:
    from user_processes.turns import Turns

OF_THE_MACHINE = OSError, MemoryError, ImportError  # not shown to the model: its call is not at fault
OF_A_PATH = FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError  # shown: a wrong path
OWN = ("reset", "get_reward", "close")  # methods of a TRL environment that are not tools
NEITHER = {"video", "video_url", "audio", "audio_url", "input_audio"}  # content parts that are neither text nor images
NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # for a function in TRL's form


class WrongCall(Exception):
    """The model's call is at fault."""


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


# ---------------------------------------------------------------------------------------- what the user's code returns


def as_content(value: Any, given: Any = ()) -> dict:
    """Return the content, and images, that the model reads, in the form of pictures.py: text as it is, parts of text and images
    joined, and any other value as JSON. given: the message's own list of images. Raise BadValue for other media."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value} if isinstance(value, str) else value]
    kinds = {part.get("type") if isinstance(part, dict) else None for part in parts}
    if found := [kind for kind in kinds if isinstance(kind, str) and kind in NEITHER]:
        raise BadValue(f"content of the type {found[0]!r}: only text and images are possible here")
    if parts and all(pictures.is_image(part) or (isinstance(part, dict) and part.get("type") == "text") for part in parts):
        return pictures.joined(parts, given)
    try:
        return pictures.joined([{"text": json.dumps(value, ensure_ascii=False, default=_plain)}], given)
    except (ValueError, TypeError, RecursionError) as error:  # a key is a tuple, or a list holds itself
        raise BadValue(f"{value!r:.100} cannot be written as JSON ({error}): return text") from None


def _plain(value: Any) -> Any:
    """Return a value that JSON has no form for as one that it has."""
    if pictures.is_image(value):
        raise BadValue("an image within a value: return it, or a list of parts, {'type': 'image', 'image': ...}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):  # pydantic's
        return value.model_dump()
    if hasattr(value, "tolist"):  # an array or a scalar of numpy, or a tensor
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else str(value)


def as_messages(value: Any) -> list[dict]:
    """Return the messages that the user's code returned, in the form of pictures.py. Raise BadValue if they are none."""
    if isinstance(value, str | dict) or not hasattr(value or [], "__iter__"):
        raise BadValue(f"{value!r:.100} is not a list of messages {{role, content}}")
    messages = []
    for message in [] if value is None else value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadValue(f"{message!r:.100} is not a message {{role, content}}")
        messages.append(message | as_content(message["content"], message.get("images") or ()))
    return messages


def as_added(value: Any) -> list[dict] | dict:
    """Return what reset adds to the prompt: messages, or content of any other value for the last message; nothing for None."""
    if value is None:
        return []
    items = value if isinstance(value, list | tuple) else [value]
    are_messages = any(isinstance(item, dict) and "role" in item for item in items)
    return as_messages(value) if are_messages or not items else as_content(value)


def of_trl(message: dict) -> dict:
    """Return the model's message {role, content, calls} as TRL and environments get it, without malformed calls."""
    calls = [{"type": "function", "function": call} for call in message["calls"] if isinstance(call, dict)]
    told = {"role": message["role"], "content": message["content"]}
    return told | ({"tool_calls": calls} if calls else {})


def as_reward(value: Any) -> float | None:
    """Return the reward that the user's code returned. Raise BadValue if it is neither None nor a finite number of fp32."""
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, bool | int | float) or not abs(value) <= 3e38:  # also true for NaN
        raise BadValue(f"the reward is {value!r:.100}, neither None nor a finite number of fp32")
    return float(value)


# ------------------------------------------------------------------------------------------------------- the programs


class OwnEnvironment:
    """An instance of the user's class with `step`."""

    def __init__(self, instance: Any):
        self.instance = instance

    def reset(self, row: dict, seed: int) -> list[dict] | dict:
        if not hasattr(self.instance, "reset"):
            return []
        return as_added(awaited(self.instance.reset(row, seed)))

    def step(self, message: dict) -> tuple[list[dict], float | None, bool]:
        malformed = [call for call in message["calls"] if isinstance(call, str)]
        answer = awaited(self.instance.step(of_trl(message) | ({"malformed": malformed} if malformed else {})))
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

    def reset(self, row: dict, seed: int) -> list[dict] | dict:
        if not hasattr(self.instance, "reset"):
            return []
        return as_added(awaited(self.instance.reset(**accepted(self.instance.reset, row))))

    def step(self, message: dict) -> tuple[list[dict], float | None, bool]:
        calls = message["calls"]
        if not calls:
            return [], self.reward(), True
        results = [self._called(call) for call in calls]
        at_work = [result for result in results if inspect.isawaitable(result)]
        done = iter(awaited(_all(at_work)) if at_work else ())  # async tools of a turn run at the same time
        results = [next(done) if inspect.isawaitable(result) else result for result in results]
        names = [{"name": call["name"]} if isinstance(call, dict) else {} for call in calls]
        return ([{"role": "tool"} | _told(result) | name for result, name in zip(results, names, strict=True)], None, False)

    def _called(self, call: dict | str) -> Any:
        """Return what a call returns, perhaps an awaitable; or its exception."""
        if isinstance(call, str):
            return WrongCall(call)
        name = call["name"]
        if name not in self.tools:
            return WrongCall(f"there is no tool {name!r}: {', '.join(self.tools)}")
        try:
            inspect.signature(self.tools[name]).bind(**call["arguments"])
        except TypeError as error:
            return WrongCall(str(error))
        try:
            return self.tools[name](**call["arguments"])
        except Exception as error:
            return error

    def reward(self) -> float | None:
        """Return the reward of the whole episode; None if it is not scored here."""
        if not hasattr(self.instance, "get_reward"):
            return None
        return as_reward(awaited(self.instance.get_reward()))


async def _all(awaitables: list) -> list:
    return await asyncio.gather(*awaitables, return_exceptions=True)


def _told(result: Any) -> dict:
    """Return what the model reads for a result or an exception. Raise an exception that is not the call's fault."""
    if isinstance(result, OF_THE_MACHINE) and not isinstance(result, OF_A_PATH):
        raise result
    if isinstance(result, WrongCall):
        return as_content(f"error: {result}")
    return as_content(f"error: {type(result).__name__}: {result}" if isinstance(result, Exception) else result)


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

    @property
    def has_state(self) -> bool:
        return hasattr(self.cls, "get_state") and hasattr(self.cls, "set_state")

    @property
    def restores(self) -> bool:
        """Whether an episode can continue without playing its turns again (tape.py)."""
        keeps = any(getattr(function, "keeps_state", False) for function in self.functions.values())
        return self.has_state if self.cls else not keeps

    def schemas(self) -> list[dict]:
        """Return the schemas of the tools, in the form for chat templates."""
        from transformers.utils import get_json_schema

        schemas = [getattr(tool, "json_schema", None) or get_json_schema(tool) for tool in self.functions.values()]
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


# -------------------------------------------------------------------------------------------------------- the episode


class EpisodeProgram:
    """The answers to the rank's questions in an episode's process."""

    def __init__(self, programs: Programs, turns: "Turns", rewards: list[tuple[Callable, float]]):
        """rewards: the user's functions in TRL's form, and their weights."""
        self._programs, self._turns, self._rewards = programs, turns, rewards
        self._has_scored = False  # whether a turn had a reward
        self._prompt: list[dict] | str = []  # in TRL's form, too
        self._completion: list[dict] = []  # the messages of the episode, in TRL's form
        self._ids: list[int] = []  # their tokens

    def reset(self, item: dict) -> dict:
        """Return the prompt's tokens, if the environment adds messages to it."""
        seed_random(item["seed"])  # the same in the group: its prompt is, too
        self._program = self._programs.new()
        added = self._program.reset(item["row"], item["seed"])
        self._seed = item["own_seed"]
        seed_random(self._seed)
        self._row = item["row"]
        self._prompt = self._row.get("prompt") or []
        if not added:
            return {}
        if not isinstance(self._prompt, list):
            raise BadValue("reset adds messages to a prompt that is plain text: give prompts as chat messages")
        ids = self._turns.prompt(self._prompt, added)
        self._prompt = [pictures.parts_of(message) for message in pictures.behind(self._prompt, added)]
        return {"prompt": ids} | pictures.sent([added] if isinstance(added, dict) else added)

    def step(self, item: dict) -> dict:
        """Return the tokens before the model's next turn, and the turn's reward."""
        self._seed += 1  # each turn has its own: it needs none before it
        seed_random(self._seed)
        message = self._turns.message(item["ids"])
        self._completion.append(of_trl(message))
        self._ids += item["ids"]
        messages, reward, done = self._program.step(message)
        self._completion += map(pictures.parts_of, messages)
        has_end = item["ids"][-1] in self._turns.end_tokens  # a stop string's last token is none
        ids = [] if done else self._turns.between(messages, is_cut=not has_end)
        self._ids += ids
        if done:
            reward = self._final(reward)
        self._has_scored = self._has_scored or reward is not None
        malformed = sum(isinstance(call, str) for call in message["calls"])
        counts = {"calls": len(message["calls"]) - malformed, "malformed": malformed}
        return {"ids": ids, "reward": reward, "done": done} | counts | ({} if done else pictures.sent(messages))

    def end(self, item: dict) -> dict:
        """Return the reward of an episode that was cut, perhaps within a turn."""
        if cut := item["ids"][len(self._ids) :]:
            self._completion.append({"role": "assistant", "content": self._turns.text(cut)})
        self._ids = item["ids"]
        return {"reward": self._final(self._program.reward())}

    def state(self, item: dict) -> dict:
        return {"state": awaited(self._program.instance.get_state())}

    def restore(self, item: dict) -> dict:
        """Continue after a number of turns, in the state that there was."""
        seed_random(item["seed"])
        self._program = self._programs.new()
        self._row = item["row"]
        self._seed = item["own_seed"] + item["after"]
        if self._programs.has_state:
            awaited(self._program.instance.set_state(item["state"]))
        return {}

    def _final(self, own: float | None) -> float | None:
        """Return the reward at the end: the weighted sum of the environment's own one and the functions'. A reward of None does
        not count. The functions do not score what an environment's step has scored. Raise BadValue if none of them counts."""
        is_scored = self._programs.is_own and (self._has_scored or own is not None)
        if is_scored or not self._rewards:
            return own
        columns = {name: [value] for name, value in self._row.items() if name not in NOT_COLUMNS}
        said = {"prompts": [self._prompt], "completions": [self._completion], "completion_ids": [self._ids]}
        ignored = dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)
        instance = self._program.instance
        batch = columns | said | ignored | ({} if instance is None else {"environments": [instance]})
        rewards = [(own, 1.0), *((_reward(function, batch), weight) for function, weight in self._rewards)]
        if not (counted := [weight * reward for reward, weight in rewards if reward is not None]):
            raise BadValue("no reward function has scored the response: each returned None")
        return sum(counted)


def _reward(function: Callable, batch: dict[str, list]) -> float | None:
    values = awaited(function(**accepted(function, batch)))
    try:
        (value,) = values
    except (TypeError, ValueError):
        name = getattr(function, "__name__", "the reward function")
        raise BadValue(f"{name} returned {values!r:.100}, not a list of one reward: it is called for one response") from None
    return as_reward(value)
