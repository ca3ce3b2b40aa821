"""The process in which a rank's episodes are played: `python -m rl.environments.worker`, started by pool.py.

The rank and this process send each other lines of JSON over one socket. First the rank sends settings, and this process answers
{"tools", "scores_at_end", "note"}, or {"failed": why}. Then there is one question at a time for each episode:

    rank:     {"episode": 7, "do": "reset", "replay", "step" or "end", ...}; or "close", which has no answer
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
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from rl.environments import descendants
from rl.environments.descendants import Children
from rl.environments.programs import EpisodeProgram, Programs
from rl.errors import UserError
from rl.rewards.worker import describe, how_it_ended
from rl.user_file import import_file, split_code

LARGEST = 1 << 28  # bytes of a line
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    rank = socket.socket(fileno=os.dup(0))  # which no child inherits
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # which is unbuffered
    os.environ.update(ONE_THREAD)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two files for each episode
    with rank.makefile() as first:  # the next line is sent after the answer
        settings = json.loads(first.readline())
    make = Warm
    if settings["tape"]:
        from rl.environments.taped import opened  # late: few runs have a tape

        make = functools.partial(opened, make_warm=Warm)
    try:
        warm = make(settings)
    except (Exception, SystemExit) as error:
        rank.sendall(as_line({"failed": describe(error)}))
        return
    rank.sendall(as_line(warm.ready))
    gc.collect()
    gc.freeze()  # keeps memory shared with the forks
    asyncio.run(serve(rank, warm))


def as_line(message: dict) -> bytes:
    return json.dumps(message).encode() + b"\n"


def failure(error: BaseException) -> dict:
    """Return the answer for an exception, which may name its event."""
    return {"event": getattr(error, "event", "error"), "message": f"{describe(error):.500}"}


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

            from rl.environments.turns import PROBE, Turns

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
    reader, writer = await asyncio.open_connection(sock=rank, limit=LARGEST)
    children = Children()
    if warm.programs:
        begin = functools.partial(Fork.begin, warm, children)
    else:
        from rl.environments.agents import Agents  # late: only agents need aiohttp

        agents = Agents(warm.settings, warm.turns_of, children)
        begin = agents.begin
    failed = functools.partial(_failed, warm.settings["timeout"])
    if warm.settings["tape"]:
        from rl.environments.taped import TapedEpisode

        begin = functools.partial(TapedEpisode.begin, begin, failed, warm)
    questions: dict[int, asyncio.Queue] = {}  # by episode
    tasks: dict[int, asyncio.Task] = {}
    while line := await reader.readline():
        item = json.loads(line)
        number = item.pop("episode", None)
        if number is None:
            if answer := await agents.order(**item):
                writer.write(as_line(answer))
        elif item["do"] == "close":
            questions.pop(number)
            tasks.pop(number).cancel()
        else:
            if item["do"] == "reset":
                questions[number] = asyncio.Queue()
                play = _play(number, questions[number], begin, writer, failed)
                tasks[number] = asyncio.create_task(play)
            questions[number].put_nowait(item)


async def _play(number: int, questions: asyncio.Queue, begin: Callable, writer: asyncio.StreamWriter, failed: Callable) -> None:
    """Play an episode, until it is closed or fails. begin: makes it, with methods `ask`, async, and `close`."""
    answer: dict = {}
    episode = None
    try:
        while "event" not in answer:
            item = await questions.get()
            started = time.monotonic()
            try:
                episode = episode or await begin()
                answer = await episode.ask(item)
            except Exception as error:
                answer = failed(error)
            known = {"episode": number, "asked": item["do"], "seconds": time.monotonic() - started}
            writer.write(as_line(known | answer))
    finally:
        if episode:
            episode.close()


def _failed(seconds: float, error: Exception) -> dict:
    """Return the answer for an episode that has failed. seconds: --env-timeout."""
    if isinstance(error, TimeoutError):
        return {"event": "timeout", "message": f"no answer after {seconds:g} s (--env-timeout)"}
    return failure(error)


class Died(Exception):
    """The episode's process has ended."""

    event = "died"


class Fork:
    """An episode's process, forked from this one."""

    def __init__(self, pid: int, seconds: float, ended: asyncio.Task[int], streams: tuple):
        """ended: watches the process; streams: the connection with it."""
        self._pid, self._seconds, self._ended = pid, seconds, ended
        self._reader, self._writer = streams
        ended.add_done_callback(lambda _: self._reader.feed_eof())  # a process that it left may hold the file
        ended.add_done_callback(lambda _: self._writer.close())

    @classmethod
    async def begin(cls, warm: Warm, children: Children) -> "Fork":
        """Fork a process. Raise Died if that fails."""
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            raise Died(f"its process could not be forked: {error}") from None
        if not pid:
            _answer_all(warm, theirs)
        theirs.close()
        ended = children.watch(pid)
        return cls(pid, warm.settings["timeout"], ended, await asyncio.open_connection(sock=ours, limit=LARGEST))

    async def ask(self, item: dict) -> dict:
        """Return the process's answer to a question. Raise TimeoutError, or Died."""
        self._writer.write(as_line(item))
        async with asyncio.timeout(self._seconds * max(1, len(item.get("turns", ())))):
            line = await self._reader.readline()
            if line.endswith(b"\n"):
                return json.loads(line)
            code = await asyncio.shield(self._ended)
        raise Died(f"its process {how_it_ended(code)}")

    def close(self) -> None:
        """End the process."""
        if not self._ended.done():
            os.kill(self._pid, signal.SIGKILL)  # it is not reaped: no other process can have its number


def _answer_all(warm: Warm, rank: socket.socket) -> None:
    """Answer an episode's questions in its process, until the connection is closed. Never return."""
    try:
        asyncio._set_running_loop(None)
        descendants.end_with_parent()
        descendants.adopt_orphans()
        os.setsid()
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the system ends this, not the rank
        program = None
        me = os.getpid()
        for line in rank.makefile():
            item = json.loads(line)
            program = program or warm.episode(item["environment"])  # the first question is a reset
            try:
                answer = as_line(getattr(program, item["do"])(item))
            except (Exception, SystemExit) as error:
                answer = as_line(failure(error))
            if os.getpid() != me:  # the user's code has forked
                break
            rank.sendall(answer)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the rank has ended
        try:
            main()
        finally:
            descendants.kill_children()
