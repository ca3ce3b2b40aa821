"""The process from which environments are forked: `python -m rl.environments.worker PARENT_PID`, started by
rl/environments/pool.py.

It imports the user's file and the tokenizer once, stays single-threaded, and forks a process for each episode, which reads
questions from a socket and answers in JSON lines. It reports the end of each episode's process and kills the processes that
this one left, in whatever session. A guard (rl/rewards/descendants.py) ends all of them with the rank.
"""

import ast
import contextlib
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rl.environments.programs import BadValue, Programs, Silent, seed_random
from rl.environments.reward_functions import Transcript, score
from rl.errors import UserError
from rl.rewards import descendants, prints
from rl.rewards.worker import describe, import_file, limit_cpu, limit_memory

if TYPE_CHECKING:
    from rl.environments.turns import Turns  # imports transformers, which is done without torch

LARGEST = 1 << 17  # bytes of a message between this process and the rank
OPEN_FILES = 256  # of an environment
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(parent: int) -> None:
    if not descendants.guard(parent):
        return
    control = socket.socket(fileno=descendants.take_pipes()[0])
    os.environ.update(ONE_THREAD)
    settings = json.loads(control.recv(LARGEST))
    try:
        warm = Warm(settings)
    except (Exception, SystemExit) as error:
        control.send(json.dumps({"failed": describe(error)}).encode())
        return
    ready = {"tools": vars(warm.turns.tools), "scores_at_end": warm.scores_at_end, "note": warm.note}
    control.send(json.dumps(ready).encode())
    gc.collect()
    gc.freeze()  # keeps memory shared with the forks
    Forks(control, warm).serve()


class Warm:
    """The state that all episodes share: the user's code, the tokenizer, the tokens between turns."""

    def __init__(self, settings: dict):
        """settings: from rl/environments/pool.py."""
        self.settings = settings
        programs = Programs(_named(settings["spec"]), settings["are_tools"]) if settings["spec"] else None
        rewards = _named(settings["reward"]) if settings["reward"] else []
        self.scores_at_end = bool(rewards) or programs is None or programs.scores_at_end
        with _without_torch():
            import numpy.random  # noqa: F401 (for all forks, which seed it)
            from transformers import AutoTokenizer

            from rl.environments.turns import PROBE, Turns

            tokenizer = AutoTokenizer.from_pretrained(settings["model"], trust_remote_code=settings["trust_remote_code"])
            turns_of = functools.partial(Turns, tokenizer, end_tokens=set(settings["end_tokens"]), form=settings["form"])
            self.turns = turns_of(programs.schemas() if programs else [])
        tools = self.turns.tools
        self.note = ""  # for the user
        self.new = functools.partial(EpisodeProgram, programs, self.turns, rewards)  # makes what answers in an episode
        if programs is None:
            from rl.environments import agents  # late: only agents need it

            self.new = functools.partial(agents.Session, settings, turns_of)
            try:
                tools = turns_of([PROBE]).tools
            except UserError as error:
                self.note = f"calls that have tools cannot be answered: {error}"
        if tools.form == "hermes" and not tools.is_native:
            self.note = "the chat template does not do all that tools need in this format, so prompts get a description of them"


def _named(spec: str) -> list[Callable]:
    """Return what path/to/file.py:names names, in the user's file. Raise UserError if it is not there."""
    path, _, names = spec.rpartition(":")
    try:
        module = _module(os.path.abspath(path))
    except ModuleNotFoundError as error:
        raise UserError(
            f"{path} imports {error.name}, which is not installed. Install it, or move the class and what it needs into a file "
            "that does not import it."
        ) from None
    for name in names.split(","):
        if not callable(getattr(module, name, None)):
            nested = "" if hasattr(module, name) else _where_nested(path, name)
            raise UserError(nested or f"{path} has no {name!r} that could be called")
    return [getattr(module, name) for name in names.split(",")]


@functools.cache
def _module(path: str) -> ModuleType:
    return import_file(path, "user_reward" if "user_environment" in sys.modules else "user_environment")


def _where_nested(path: str, name: str) -> str:
    """Return a sentence if the file defines the name within a function."""
    for function in ast.walk(ast.parse(Path(path).read_bytes())):
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if node is not function and getattr(node, "name", None) == name:
                return f"{path}:{node.lineno}: {name} is defined within {function.name}. Move it to the module's level"
    return ""


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


class Forks:
    """The parent of the episodes' processes."""

    def __init__(self, control: socket.socket, warm: Warm):
        self.control, self.warm = control, warm
        self._numbers: dict[int, int] = {}  # pid -> its episode's number
        self._before = _children()  # started by the import of the user's file
        descendants.adopt_orphans()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Obey orders until the rank closes its end."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        while True:
            ready = {file for file, _ in poller.poll()}
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 1 << 12)
                self._reap()
            if self.control.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """Fork or end an episode, as the rank orders. Return False if the rank has closed its end."""
        data, files, _, _ = socket.recv_fds(self.control, LARGEST, 1)
        if not data:
            return False
        message = json.loads(data)
        if "fork" in message:
            self._fork(message["fork"], files[0])
        for pid in [pid for pid, number in self._numbers.items() if number == message.get("kill")]:
            os.kill(pid, signal.SIGKILL)  # it is not reaped: no other process can have its number
        return True

    def _fork(self, number: int, file: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes: one episode's event
            os.close(file)
            self.control.send(json.dumps({"ended": number, "failed": f"its process could not be forked: {error}"}).encode())
            return
        if pid:
            os.close(file)
            self._numbers[pid] = number
            return
        try:
            descendants.end_with_parent()
            descendants.adopt_orphans()
            os.setsid()
            os.set_inheritable(file, False)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            prints.begin_episode()
            for own in (self.control.fileno(), self._woken, self._wake):
                os.close(own)
            self.control.detach()
            _limit(self.warm.settings)
            with contextlib.suppress(ConnectionError):  # the rank has ended the episode
                _answer_all(self.warm, socket.socket(fileno=file))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Report the processes that have ended, and kill those that they left, whose parent is now this process."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(ended.si_pid, signal.SIGKILL)
                _, status = os.waitpid(ended.si_pid, 0)
                if number := self._numbers.pop(ended.si_pid, None):
                    self.control.send(json.dumps({"ended": number, "code": os.waitstatus_to_exitcode(status)}).encode())
        for pid in _children() - self._before - self._numbers.keys():
            with contextlib.suppress(PermissionError):
                os.kill(pid, signal.SIGKILL)


def _children() -> set[int]:
    """Return the pids of this process's children; none if the system does not list them."""
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()


def _limit(settings: dict) -> None:
    limit_memory(settings["memory_gb"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer_all(warm: Warm, rank: socket.socket) -> None:
    """Play an episode: answer one question after another, until the rank closes its end."""
    program = warm.new()
    me = os.getpid()
    for line in rank.makefile("r"):
        item = json.loads(line)
        limit_cpu(warm.settings["cpu_seconds"])
        started = time.monotonic()
        try:
            reply = getattr(program, item["do"])(item)
        except (BadValue, Silent) as error:
            reply = {"event": error.event, "message": str(error)}
        except (Exception, SystemExit) as error:
            reply = {"event": "error", "message": f"{describe(error):.500}"}
        if os.getpid() != me:  # the user's code has forked
            return
        reply |= {"number": item["number"], "seconds": time.monotonic() - started}
        rank.sendall(json.dumps(reply).encode() + b"\n")


class EpisodeProgram:
    """The answers of a user's environment or tools."""

    def __init__(self, programs: Programs, turns: "Turns", rewards: list[Callable]):
        """rewards: the user's reward functions over environments."""
        self._programs, self.turns, self._rewards = programs, turns, rewards
        self._has_scored = False  # whether a turn had a reward

    def reset(self, item: dict) -> dict:
        """Return the prompt's tokens, if the environment adds messages to it."""
        seed_random(item["seed"])  # the same in the group: its prompt is, too
        self._program = self._programs.new()
        added = self._program.reset(item["row"], item["seed"])
        seed_random(item["own_seed"])
        self._transcript = Transcript(item["row"], added)
        prompt = item["row"].get("prompt") or []
        if not added:
            return {}
        if not isinstance(prompt, list):
            raise BadValue("reset adds messages to a prompt that is plain text: give prompts as chat messages")
        return {"prompt": self.turns.prompt(prompt, added)}

    def step(self, item: dict) -> dict:
        """Return the tokens before the model's next turn, and the turn's reward."""
        message = self.turns.message(item["ids"])
        self._transcript.say(message)
        self._transcript.ids += item["ids"]
        calls = [isinstance(call, dict) for call in message["calls"]]
        messages, reward, done = self._program.step(message)
        self._transcript.completion += messages
        ids = [] if done else self.turns.between(messages)
        self._transcript.ids += ids
        if done:
            reward = self._final(reward)
        self._has_scored = self._has_scored or reward is not None
        return {"ids": ids, "reward": reward, "done": done, "calls": sum(calls), "malformed": calls.count(False)}

    def end(self, item: dict) -> dict:
        """Return the reward of an episode that was cut, perhaps within a turn."""
        if cut := item["ids"][len(self._transcript.ids) :]:
            self._transcript.say({"content": self.turns.text(cut), "calls": []})
        self._transcript.ids = item["ids"]
        return {"reward": self._final(self._program.reward())}

    def _final(self, own: float | None) -> float | None:
        """Return the reward at the end. own: the environment's. The functions do not score what its step has scored."""
        is_scored = self._programs.is_own and (self._has_scored or own is not None)
        if is_scored or not self._rewards:
            return own
        return score(self._rewards, self._transcript, self._program.instance, own)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the rank has ended
        main(int(sys.argv[1]))
