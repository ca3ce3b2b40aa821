"""The process in which a rank's episodes are played: `python -m user_processes.worker`, started by rl/environments/pool.py.

The rank and this process send each other lines of JSON over one socket. First the rank sends settings, and this process answers
{"tools", "scores_at_end", "note"}, or {"failed": why}. Then there is one question at a time for each episode:

    rank:     {"episode": 7, "do": "reset", "step" or "end", ...}; or "close", which has no answer
    process:  {"episode": 7, "asked": "step", "seconds": 0.1, ...}; with "event" and "message" it is the episode's last one;
              with "failed" it ends the run

The user's file and the tokenizer are imported once, and a process is forked for each episode (Fork), which gets the same
questions. Episodes of agents are tasks of this process instead (agents.py). When the rank closes its end, or ends, this process
kills all that it has started, and exits. All environments of a run are imported here: a "reset" names its own.
"""

import asyncio
import contextlib
import functools
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from rl.errors import UserError
from user_processes import child
from user_processes.child import Child, Children
from user_processes.files import import_file, split_code
from user_processes.programs import EpisodeProgram, Programs

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(rank: socket.socket, settings: dict) -> None:
    os.environ.update(ONE_THREAD)
    make = Warm
    if settings["tape"]:
        from user_processes.tape import opened  # late: few runs have a tape

        make = functools.partial(opened, make_warm=Warm)
    try:
        warm = make(settings)
    except (Exception, SystemExit) as error:
        rank.sendall(child.as_line({"failed": child.describe(error)}))
        return
    rank.sendall(child.as_line(warm.ready))
    gc.collect()
    gc.freeze()  # keeps memory shared with the forks
    asyncio.run(serve(rank, warm))


class Warm:
    """The state that all episodes share: the user's code, the tokenizer, the tokens between turns."""

    def __init__(self, settings: dict):
        """settings: from rl/environments/pool.py."""
        self.settings = settings
        self.programs = {name: Programs(named(code), tools) for name, (code, tools) in settings["programs"].items()}
        functions = named(settings["reward"]) if settings["reward"] else []
        self.rewards = [*zip(functions, settings["reward_weights"] or [1.0] * len(functions), strict=True)]
        with _without_torch():
            import numpy.random  # noqa: F401 (for all forks, which seed it)
            from transformers import AutoTokenizer

            if settings["images"]:
                import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl  # noqa: F401 (for all forks)

            from user_processes.turns import PROBE, Turns

            tokenizer = AutoTokenizer.from_pretrained(settings["model"], trust_remote_code=settings["trust_remote_code"])
            tokenizer.chat_template = settings["chat_template"] or tokenizer.chat_template
            more = {"form": settings["form"], "system": settings["system_prompt"], "images": settings["images"]}
            self.turns_of = functools.partial(Turns, tokenizer, end_tokens=set(settings["end_tokens"]), **more)
            schemas = {name: program.schemas() for name, program in self.programs.items()} or {"": []}
            self.turns: dict[str, Turns] = {name: self.turns_of(its) for name, its in schemas.items()}
        tools = [turns.tools for turns in self.turns.values()]
        note = ""
        if not self.programs:  # an agent brings its tools
            try:
                tools = [self.turns_of([PROBE]).tools]
            except UserError as error:
                note = f"calls that have tools cannot be answered: {error}"
        if any(its.form == "hermes" and not its.is_native for its in tools):
            note = "the chat template does not do all that tools need in this format, so prompts get a description of them"
        scores = {name: bool(self.rewards) or program.scores_at_end for name, program in self.programs.items()} or {"": True}
        shown = {name: vars(turns.tools) for name, turns in self.turns.items()}
        self.ready = {"tools": shown, "scores_at_end": scores, "note": note}

    def episode(self, name: str) -> EpisodeProgram:
        """Return what answers in an episode of the environment of this name."""
        return EpisodeProgram(self.programs[name], self.turns[name], self.rewards)


def named(spec: str) -> list[Callable]:
    """Return what path/to/file.py:names names, in the user's file, or what its function `from_name` makes of the names, as in
    examples/environments. Raise UserError if it is not there."""
    path, names = split_code(spec)
    try:
        module = _module(os.path.abspath(path))
    except ModuleNotFoundError as error:
        raise UserError(f"{path} imports {error.name}, which is not installed. Install it into this environment.") from error
    if hasattr(module, "from_name"):
        return module.from_name(names)
    for name in names.split(","):
        if not callable(getattr(module, name, None)):
            raise UserError(f"{path} has no {name!r} that could be called. Define it at the module's level, not in a function.")
    return [getattr(module, name) for name in names.split(",")]


@functools.cache
def _module(path: str) -> ModuleType:
    known = [name for name in sys.modules if name.startswith("user_environment")]
    return import_file(path, f"user_environment_{len(known)}" if known else "user_environment")


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Import transformers without torch, unless the user's file has imported torch. A fork then needs a quarter of the memory
    and a third of the time."""
    if "torch" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that there is no torch
    sys.modules["torch"] = None
    try:
        yield
    finally:
        del sys.modules["torch"]


# ---------------------------------------------------------------------------------------- the episodes, each in a task


async def serve(rank: socket.socket, warm: Warm) -> None:
    """Play the rank's episodes until it closes its end."""
    reader, writer = await asyncio.open_connection(sock=rank, limit=child.LARGEST)
    children = Children()
    if warm.programs:
        begin = functools.partial(Fork.of, warm, children)
    else:
        from user_processes.agents import Agents  # late: only agents need aiohttp

        agents = Agents(warm.settings, warm.turns_of, children)
        begin = agents.begin
    if warm.settings["tape"]:
        from user_processes.tape import TapedEpisode

        begin = functools.partial(TapedEpisode.begin, begin, warm)
    episodes: dict[int, Any] = {}  # by number: with methods `ask`, async, and `close`
    tasks: dict[int, asyncio.Task] = {}  # each answers a question

    async def answer(number: int, item: dict) -> None:
        started = time.monotonic()
        try:
            if number not in episodes:
                episodes[number] = await begin()
            said = await episodes[number].ask(item)
        except Exception as error:
            said = child.lost(error)
        if "event" in said:
            close(number)
        known = {"episode": number, "asked": item["do"], "seconds": time.monotonic() - started}
        writer.write(child.as_line(known | said))

    def close(number: int) -> None:
        if episode := episodes.pop(number, None):
            episode.close()

    while line := await reader.readline():
        item = json.loads(line)
        number = item.pop("episode", None)
        if number is None:
            if order := await agents.order(**item):
                writer.write(child.as_line(order))
        elif item["do"] == "close":
            tasks.pop(number).cancel()
            close(number)
        else:
            tasks[number] = asyncio.create_task(answer(number, item))


class Fork(Child):
    """An episode's process, forked from this one. Its answers are those of EpisodeProgram."""

    @classmethod
    async def of(cls, warm: Warm, children: Children) -> "Fork":
        fork = await cls.begin(children, lambda reset: warm.episode(reset["environment"]))
        fork.limit = warm.settings["timeout"]
        return fork

    async def ask(self, question: dict) -> dict:
        return await super().ask(child.as_line(question), self.limit)


if __name__ == "__main__":
    child.run(main)
