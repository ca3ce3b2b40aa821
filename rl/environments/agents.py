"""An agent that owns its loop (--agent): a command a response, whose calls of an OpenAI-compatible endpoint are the turns.

The command runs in the process group of its episode's process, which serves its calls (rl/environments/chat.py) and compares
them, as messages, with what is known: a call that extends a history continues its tokens, any other begins a history with a
prompt of its own. rl/generation/agent_episodes.py keeps the tokens.
"""

import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rl.environments.calls import END_OF_THINKING
from rl.environments.chat import NO_ROOM, Call, Endpoint, Refused, as_messages, completion
from rl.environments.programs import as_reward
from rl.environments.turns import Turns
from rl.rewards.descendants import how_it_ended

LONGEST_LINE = 1 << 20  # bytes of what an agent prints
LAST_WORDS = 1.0  # seconds to read what it has printed: another process may hold its output open


class Failed(Exception):
    """The agent cannot be scored."""


@dataclass
class History:
    """Calls that extend each other."""

    messages: list[dict]  # as as_messages has them, the model's last one included
    tools: list[dict]
    tokens: int
    is_cut: bool = False  # the last turn, by the call's own limit


class Session:
    """What answers in an agent's episode: its process, its calls, and what they extend."""

    def __init__(self, command: str, turns_of: Callable[[list[dict]], Turns]):
        """turns_of: of the tools that a call names."""
        self.command, self._turns_of = command, turns_of
        self._turns: dict[str, Turns] = {}
        self._news: queue.SimpleQueue[Call | int] = queue.SimpleQueue()  # calls, and at the end the agent's exit code
        self.histories: list[History] = []
        self._at, self._count = 0, 0  # the history whose call is open; calls that were answered
        self._open: Call | None = None

    def reset(self, item: dict) -> dict:
        """Starts the agent. Answers with the tokens of its first call."""
        endpoint = Endpoint(self._news)
        variables = endpoint.variables | {"EPISODE_SEED": str(item["own_seed"])}
        self.agent = Agent(self.command, item["row"], variables, self._news.put)
        call = self._news.get()
        if not isinstance(call, Call):
            raise Failed(f"the agent {how_it_ended(call)} before its first call")
        return {"prompt": self._take(call)[1], "most": call.most}

    def step(self, item: dict) -> dict:
        """Gives the agent the model's turn. Answers with the history that its next call extends, by number, and the tokens that
        it adds to that; or with the agent's reward."""
        call, history = self._open, self.histories[self._at]
        message, malformed = _said(self._of(call.tools), item["ids"])
        history.is_cut = item["ids"][-1] not in self._of(call.tools).end_tokens
        answer = completion(self._count, message, len(item["ids"]), history.tokens, history.is_cut)
        history.messages = [*call.messages, *as_messages([answer["choices"][0]["message"]])]
        history.tokens += len(item["ids"])
        self._count += 1
        call.reply(answer)
        counts = {"calls": len(message["calls"]), "malformed": malformed}
        news = self._next(call)
        if isinstance(news, Call):
            number, ids = self._take(news)
            return counts | {"history": number, "ids": ids, "most": news.most, "reward": None, "done": False}
        if news:
            raise Failed(f"the agent {how_it_ended(news)}")
        return counts | {"ids": [], "reward": self.agent.reward(), "done": True}

    def end(self, item: dict) -> dict:
        """Refuses all further calls. Answers with the reward of an agent that ends well all the same."""
        news = self._open
        while isinstance(news, Call):
            news.reply(Refused(400, NO_ROOM, "context_length_exceeded"))
            news = self._news.get()
        return {"reward": None if news else self.agent.reward()}

    def _next(self, last: Call) -> Call | int:
        """The next call, or the agent's exit code. A client that repeats a call whose answer it has not read gets it again."""
        while isinstance(news := self._news.get(), Call):
            if last.was_read or (news.messages, news.tools) != (last.messages, last.tools):
                break
            news.reply(last.answer)
            last = news
        return news

    def _take(self, call: Call) -> tuple[int, list[int]]:
        """The longest history that a call extends, and the tokens that it adds; a new one where there is none."""
        extended = [i for i, history in enumerate(self.histories) if _extends(call, history)]
        turns, self._open = self._of(call.tools), call
        if extended:
            self._at = max(extended, key=lambda i: len(self.histories[i].messages))
            history = self.histories[self._at]
            ids = turns.between(call.messages[len(history.messages) :], history.is_cut)
        else:
            self._at, ids = len(self.histories), turns.conversation(call.messages)
            self.histories.append(History([], call.tools, 0))
        self.histories[self._at].tokens += len(ids)
        return self._at, ids

    def _of(self, tools: list[dict]) -> Turns:
        key = json.dumps(tools)
        if key not in self._turns:
            self._turns[key] = self._turns_of(tools)
        return self._turns[key]


def _extends(call: Call, history: History) -> bool:
    known = len(history.messages)
    added = call.messages[known:]
    is_plain = bool(added) and all(message["role"] != "assistant" for message in added)
    return is_plain and call.tools == history.tools and call.messages[:known] == history.messages


def _said(turns: Turns, ids: list[int]) -> tuple[dict, int]:
    """A turn as an agent gets it: the thought, the text and the calls apart. Where no call can be read, they are in the text.
    And how many cannot be read."""
    message = turns.message(ids)
    calls = [call for call in message["calls"] if isinstance(call, dict)]
    text = message["content"] if calls else turns.text(ids)
    thought, closed, content = text.rpartition(END_OF_THINKING)
    if not closed and (turns.begins_thinking or "<think>" in text):
        thought, content = text, ""
    reasoning = thought.replace("<think>", "").strip()
    return {"content": content.strip(), "reasoning": reasoning, "calls": calls}, len(message["calls"]) - len(calls)


class Agent:
    """A user's command. Its stdin is the row, as JSON. What it prints goes to the console, but for a reward at the end."""

    def __init__(self, command: str, row: dict, variables: dict[str, str], on_exit: Callable[[int], None]):
        """on_exit: is given the exit code, from a thread."""
        environment = os.environ | variables
        for name in ("NO_PROXY", "no_proxy"):
            environment[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        root = str(Path(__file__).resolve().parent.parent.parent)  # added for the episode's own process
        environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").removeprefix(root).removeprefix(os.pathsep)
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(row).encode())
            file.seek(0)
            self._process = subprocess.Popen(shlex.split(command), stdin=file, stdout=subprocess.PIPE, env=environment)
        self._last, self._on_exit = b"", on_exit
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def reward(self) -> float | None:
        """Of the last line that it has printed, {"reward": 1.0}; None without one. Raises BadValue if it is no number."""
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(last := json.loads(self._last), dict) and "reward" in last:
                return as_reward(last["reward"])
        if self._last:
            self._print(self._last)
        return None

    def _read(self) -> None:
        while line := self._process.stdout.readline(LONGEST_LINE):
            if self._last:
                self._print(self._last)
            self._last = line if line.strip() else self._last

    def _print(self, line: bytes) -> None:
        sys.stderr.write(line.decode(errors="replace"))

    def _watch(self) -> None:
        code = self._process.wait()
        self._reader.join(LAST_WORDS)
        self._on_exit(code)
