"""Agents that own their loop: their calls to an OpenAI-compatible endpoint are the turns of a response.

An agent is a command that is started for the response (--agent), or a worker elsewhere that has asked for an episode
(--serve-policy). It calls a server (rl/environments/endpoint.py), which passes its calls on to the episode's process. The
process compares their messages with the histories so far: a call that extends a history continues its tokens, any other call
begins a new history with a separate prompt. rl/generation/agent_episodes.py keeps the tokens.
"""

import contextlib
import json
import os
import queue
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rl.environments import chat
from rl.environments.calls import END_OF_THINKING
from rl.environments.programs import Silent, as_reward
from rl.environments.turns import Turns
from rl.rewards.descendants import how_it_ended

LONGEST_LINE = 1 << 20  # bytes of a line that an agent prints
LOST = "cannot reach it: the process that answers agents has ended"
LAST_WORDS = 1.0  # seconds to read the rest of its output after it ends: another process may hold the pipe open


class Failed(Exception):
    """The agent cannot be scored."""


@dataclass
class Conversation:
    """A sequence of calls, each of which extends the one before."""

    messages: list[dict]  # in the form of `as_messages`, including the model's last one
    tools: list[dict]
    tokens: int
    is_cut: bool = False  # whether the call's max_tokens cut the last turn


class Session:
    """An agent's episode: its calls, and the histories that they extend."""

    def __init__(self, settings: dict, turns_of: Callable[[list[dict]], Turns]):
        """settings: from rl/environments/pool.py; turns_of: makes the `Turns` for a call's tools."""
        self._settings, self._turns_of = settings, turns_of
        self._turns: dict[str, Turns] = {}
        self._news: queue.SimpleQueue[chat.Call | chat.End] = queue.SimpleQueue()
        self.histories: list[Conversation] = []
        self._at, self._count = 0, 0  # the number of the open call's history; calls answered so far
        self._open: chat.Call | None = None

    def reset(self, item: dict) -> dict:
        """Start the agent. Return the tokens of its first call."""
        limit = start(self._settings, item, self._news)
        try:
            call = self._news.get(timeout=limit)
        except queue.Empty:
            raise Silent(f"no call after {limit:g} s (--env-timeout)") from None
        if isinstance(call, chat.End):
            raise Failed(f"the agent {call.failure or 'ended'} before its first call")
        return {"prompt": self._take(call)[1], "most": call.most}

    def step(self, item: dict) -> dict:
        """Give the agent the model's turn. Return the number of the history that its next call extends and the tokens that the
        call adds to it; or the agent's reward."""
        call = self._open
        history = self.histories[self._at]
        message, malformed = _said(self._of(call.tools), item["ids"])
        history.is_cut = item["ids"][-1] not in self._of(call.tools).end_tokens
        answer = chat.completion(self._count, message, len(item["ids"]), history.tokens, history.is_cut)
        history.messages = [*call.messages, *chat.as_messages([answer["choices"][0]["message"]])]
        history.tokens += len(item["ids"])
        self._count += 1
        call.reply(answer)
        counts = {"calls": len(message["calls"]), "malformed": malformed}
        news = self._news.get()
        if isinstance(news, chat.Call):
            number, ids = self._take(news)
            return counts | {"history": number, "ids": ids, "most": news.most, "reward": None, "done": False}
        if news.failure:
            raise Failed(f"the agent {news.failure}")
        return counts | {"ids": [], "reward": as_reward(news.reward), "done": True}

    def end(self, item: dict) -> dict:
        """Refuse all further calls. Return the agent's reward, if it nevertheless ends without a failure."""
        news = self._open
        while isinstance(news, chat.Call):
            news.reply(chat.Refused(400, chat.NO_ROOM, "context_length_exceeded"))
            news = self._news.get()
        return {"reward": None if news.failure else as_reward(news.reward)}

    def _take(self, call: chat.Call) -> tuple[int, list[int]]:
        """Return the number of the longest history that the call extends, or of a new one, and the tokens that it adds."""
        extended = [i for i, history in enumerate(self.histories) if _extends(call, history)]
        turns = self._of(call.tools)
        self._open = call
        if extended:
            self._at = max(extended, key=lambda i: len(self.histories[i].messages))
            history = self.histories[self._at]
            ids = turns.between(call.messages[len(history.messages) :], history.is_cut)
        else:
            self._at = len(self.histories)
            ids = turns.conversation(call.messages)
            self.histories.append(Conversation([], call.tools, 0))
        self.histories[self._at].tokens += len(ids)
        return self._at, ids

    def _of(self, tools: list[dict]) -> Turns:
        key = json.dumps(tools)
        if key not in self._turns:
            self._turns[key] = self._turns_of(tools)
        return self._turns[key]


def _extends(call: chat.Call, history: Conversation) -> bool:
    known = len(history.messages)
    added = call.messages[known:]
    is_plain = bool(added) and all(message["role"] != "assistant" for message in added)
    return is_plain and call.tools == history.tools and call.messages[:known] == history.messages


def _said(turns: Turns, ids: list[int]) -> tuple[dict, int]:
    """Return a turn in the agent's form, with thought, text and calls separated, and the number of malformed calls. If no call
    is well formed, all of them stay in the text."""
    message = turns.message(ids)
    calls = [call for call in message["calls"] if isinstance(call, dict)]
    text = message["content"] if calls else turns.text(ids)
    thought, closed, content = text.rpartition(END_OF_THINKING)
    if not closed and (turns.begins_thinking or "<think>" in text):
        thought = text
        content = ""
    reasoning = thought.replace("<think>", "").strip()
    return {"content": content.strip(), "reasoning": reasoning, "calls": calls}, len(message["calls"]) - len(calls)


class Connection:
    """An episode's connection with the server (rl/environments/endpoint.py). It puts the agent's calls, and the end
    that a worker sends, into `news`."""

    def __init__(self, name: str, offer: dict | None, news: queue.SimpleQueue):
        """name: of the server's socket; offer: the episode for a worker, None for a command. Return once it has an agent."""
        self.news = news
        self._is_command = offer is None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"\0{name}")
        self._send(offer)
        lines = self._socket.makefile()
        first = lines.readline()
        if not first:
            raise Failed(LOST)
        begun = json.loads(first)
        self.variables = {"OPENAI_BASE_URL": begun["url"], "OPENAI_API_KEY": begun["key"], "OPENAI_MODEL": chat.MODEL}
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _send(self, message: dict | None) -> None:
        with contextlib.suppress(OSError):  # `_read` notices that the server has ended
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self, lines: Iterable[str]) -> None:
        """Read requests. The next one arrives after the answer to the one before."""
        with contextlib.suppress(OSError, ValueError):  # the server was killed, perhaps while it was writing
            for message in map(json.loads, lines):
                try:
                    news = self._parsed(message["request"], message["body"])
                except chat.Refused as refused:
                    self._send(chat.as_http(refused))
                    continue
                if isinstance(news, chat.End):
                    self._send(chat.as_http({"ended": True}))
                    self._socket.shutdown(socket.SHUT_RDWR)  # all further requests are refused
                self.news.put(news)
        self.news.put(chat.End(failure=LOST))

    def _parsed(self, request: str, text: str) -> chat.Call | chat.End:
        try:
            body = json.loads(text or "{}")
            if not isinstance(body, dict):
                raise TypeError("it is not a JSON object")
            if request != chat.FINISH:
                return chat.Call(body, self._send)
        except (ValueError, TypeError, RecursionError) as error:
            raise chat.Refused(400, f"the request cannot be read: {error}") from None
        if self._is_command:
            raise chat.Refused(404, "an agent's command ends its episode by exiting")
        return chat.as_end(body)


def start(settings: dict, item: dict, news: queue.SimpleQueue) -> float | None:
    """Start the command, or return once a worker has taken the episode. The agent's calls and its end are put into `news`.
    Return the time limit for a worker's first call, in seconds."""
    if not settings["agent"]:
        Connection(settings["gateway"], {"row": item["row"], "seed": item["own_seed"], "split": item["split"]}, news)
        return settings["timeout"]
    connection = Connection(settings["gateway"], None, news)
    variables = {"EPISODE_SEED": str(item["own_seed"]), "EPISODE_SPLIT": item["split"]}
    Agent(settings["agent"], item["row"], connection.variables | variables, news.put)
    return None


class Agent:
    """A user's command. Its stdin is the row as JSON. Its output goes to the console, except for a reward in the last line."""

    def __init__(self, command: str, row: dict, variables: dict[str, str], on_end: Callable[[chat.End], None]):
        """on_end: called with the end, in a thread. The reward is that of the last line, {"reward": 1.0}, or None."""
        environment = os.environ | variables
        for name in ("NO_PROXY", "no_proxy"):
            environment[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        root = str(Path(__file__).resolve().parent.parent.parent)  # was added for the episode's process
        environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").removeprefix(root).removeprefix(os.pathsep)
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(row).encode())
            file.seek(0)
            self._process = subprocess.Popen(shlex.split(command), stdin=file, stdout=subprocess.PIPE, env=environment)
        self._last = b""
        self._on_end = on_end
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _read(self) -> None:
        while line := self._process.stdout.readline(LONGEST_LINE):
            if line.strip():
                self._print()
                self._last = line

    def _print(self) -> None:
        sys.stderr.write(self._last.decode(errors="replace"))

    def _watch(self) -> None:
        code = self._process.wait()
        last = None
        self._reader.join(LAST_WORDS)
        with contextlib.suppress(ValueError, RecursionError):
            last = json.loads(self._last)
        has_reward = isinstance(last, dict) and "reward" in last
        if not has_reward:
            self._print()
        self._on_end(chat.End(last["reward"] if has_reward else None, how_it_ended(code) if code else None))
