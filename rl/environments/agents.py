"""Agents that own their loop: their calls to an OpenAI-compatible endpoint are the turns of a response.

An agent is a command that is started for the response (--agent), or a worker elsewhere that has asked for an episode
(--serve-policy). Its calls are compared with the conversations so far: a call that extends one continues its tokens, any other
call begins a new history with a separate prompt. rl/generation/agent_episodes.py keeps the tokens. This runs in the process of
rl/environments/worker.py.

Left out: encryption. Put a tunnel or a proxy in front of it if you do not control the network.
"""

import asyncio
import contextlib
import functools
import hmac
import json
import os
import secrets
import shlex
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from rl.environments import chat, descendants
from rl.environments.calls import END_OF_THINKING
from rl.environments.chat import Refused
from rl.environments.descendants import Children
from rl.environments.programs import BadValue, as_reward
from rl.environments.turns import Turns
from rl.rewards.worker import how_it_ended

LARGEST = 1 << 26  # bytes of a request, and of a line that an agent prints
START = 120.0  # seconds that a command may take in addition before its first call, to import its libraries
LAST_WORDS = 1.0  # seconds to read the rest of its output after it ends: another process may hold the pipe open
NO_ROOM = "the response's budget of tokens or turns is used up: --max-response-length, --max-turns"
ENDED = "this episode has ended"
OVER = "the run has ended: there will be no more episodes"


class Failed(Exception):
    """The agent cannot be scored."""

    event = "error"


@dataclass(frozen=True)
class End:
    """The end of an agent. reward: None if a grader scores it; failure: why it cannot be scored."""

    reward: Any = None
    failure: str | None = None


@dataclass
class Conversation:
    """A sequence of calls, each of which extends the one before."""

    messages: list[dict]  # in the form of chat.Call, including the model's last one
    tools: list[dict]
    tokens: int
    is_cut: bool = False  # whether the last turn lacks its end token: max_tokens cut it, or a stop string ended it


class Agents:
    """The server that agents call, and their sessions."""

    def __init__(self, settings: dict, turns_of: Callable[[list[dict]], Turns], children: Children):
        """settings: from rl/environments/pool.py; turns_of: makes the `Turns` for a call's tools."""
        self.settings, self.children = settings, children
        self.turns_of = functools.lru_cache(256)(lambda tools: turns_of(json.loads(tools)))
        self.sessions: dict[str, Session] = {}  # by key, all under way
        self.waiting: deque[Session] = deque()  # for a worker
        self.secret = self.url = ""
        self.is_over = False

    async def begin(self) -> "Session":
        """Return a new episode's session."""
        return Session(self)

    async def order(self, do: str, host: str = "", port: int = 0, secret: str = "") -> dict:
        """Listen and return the "url", or refuse all requests because the run has ended. secret: of workers."""
        if do == "finish":
            self.is_over = True
            for session in self.sessions.values():
                session.refuse(Refused(410, OVER))
            return {}
        self.secret = secret or secrets.token_hex(16)
        app = web.Application(client_max_size=LARGEST, middlewares=[self._answer])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/episodes/next", self._next)
        app.router.add_post("/v1/episodes/end", self._end)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, host, port, backlog=1024, reuse_address=True)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            return {"failed": f"cannot listen at {host}:{port}: {error}. Give another port or address."}
        name = os.uname().nodename if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{runner.addresses[0][1]}/v1"
        return {"url": self.url}

    @web.middleware
    async def _answer(self, request: web.Request, handler: Callable) -> web.Response:
        """Check the key, before the body is read. Requests with a valid one are as trusted as this process."""
        try:
            key = _key(request)
            if key not in self.sessions and not hmac.compare_digest(key.encode(errors="replace"), self.secret.encode()):
                raise Refused(401, "no episode under way has this key: OPENAI_API_KEY", "invalid_api_key")
            if self.is_over:
                raise Refused(410, OVER)
            return await handler(request)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.status)

    def _session(self, request: web.Request) -> "Session":
        if session := self.sessions.get(_key(request)):
            return session
        raise Refused(404, "this needs the api_key of an episode")

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": chat.MODEL, "object": "model", "created": 0, "owned_by": "run"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.Response:
        session = self._session(request)
        call = chat.Call.of(await _body(request))
        answer = await session.call(call)
        if call.streams:
            return web.Response(text="".join(chat.chunks(answer, call.counts)), content_type="text/event-stream")
        return web.json_response(answer)

    async def _next(self, request: web.Request) -> web.Response:
        if _key(request) in self.sessions:
            raise Refused(404, "this needs the secret of workers")
        if not self.waiting:
            return web.Response(status=204)
        session = self.waiting.popleft()
        session.is_taken.set()
        known = {"api_key": session.key, "model": chat.MODEL, "timeout": self.settings["timeout"]}
        return web.json_response(session.offer | known)

    async def _end(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.finish(await _body(request))
        return web.json_response({"ended": True})


def _key(request: web.Request) -> str:
    return request.headers.get("Authorization", "").partition(" ")[2].strip()


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read() or "{}")
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request cannot be read: {error}") from None


class Session:
    """An agent's episode: its calls, and the conversations that they extend."""

    def __init__(self, agents: Agents):
        self.agents = agents
        self.key = secrets.token_hex(16)
        self.conversations: list[Conversation] = []
        self.offer: dict = {}  # the episode, for a worker
        self.is_taken = asyncio.Event()
        self._command: Command | None = None
        self._one_at_a_time = asyncio.Lock()
        self._news: asyncio.Queue[chat.Call | End] = asyncio.Queue()
        self._at, self._count = 0, 0  # the number of the open call's conversation; calls answered so far
        self._open: chat.Call | None = None
        self._answer: asyncio.Future[dict] | None = None  # to the open call
        self._refusal: Refused | None = None  # of all further requests

    # -- the agent's requests

    async def call(self, call: chat.Call) -> dict:
        """Return the answer to a call. Calls are answered one after the other. Raise Refused."""
        async with self._one_at_a_time:
            if self._refusal:
                raise self._refusal
            self._answer = asyncio.get_running_loop().create_future()
            self._news.put_nowait(call)
            return await self._answer

    def finish(self, body: Any) -> None:
        """End the episode, as a worker asks: {"reward": 1.0}, {} for the grader, or {"error": "why it cannot be scored"}. Raise
        Refused."""
        if self.agents.settings["agent"]:
            raise Refused(404, "an agent's command ends its episode by exiting")
        if self._refusal:
            raise self._refusal
        if not isinstance(body, dict) or body.keys() - {"reward", "error"}:
            raise Refused(400, "an end has reward or error, and nothing else")
        try:
            reward = as_reward(body.get("reward"))
        except BadValue as error:
            raise Refused(400, str(error)) from None
        error = body.get("error")
        if error is not None and (reward is not None or not isinstance(error, str)):
            raise Refused(400, "error: a text, and no reward next to it")
        self._news.put_nowait(End(reward, None if error is None else f"was ended by its worker: {error or 'no reason'}"))
        self.refuse(Refused(410, ENDED))

    def refuse(self, refusal: Refused) -> None:
        """Refuse the open call and all further requests."""
        self._refusal = refusal
        if self._answer and not self._answer.done():
            self._answer.set_exception(refusal)

    # -- the rank's questions

    async def ask(self, item: dict) -> dict:
        return await getattr(self, item["do"])(item)

    async def reset(self, item: dict) -> dict:
        """Start the agent. Return the tokens of its first call."""
        self.agents.sessions[self.key] = self
        limit = self.agents.settings["timeout"]
        self.offer = {"row": item["row"], "seed": item["own_seed"], "split": item["split"]}
        if self.agents.settings["agent"]:
            self._command = Command(self, self._news.put_nowait)
            limit += START
        else:
            self.agents.waiting.append(self)
            await self.is_taken.wait()  # as long as it takes
        news = await self._next(limit)
        if isinstance(news, End):
            raise Failed(f"the agent {news.failure or 'ended'} before its first call")
        return {"prompt": self._take(news)[1], "most": news.most}

    async def step(self, item: dict) -> dict:
        """Give the agent the model's turn. Return the number of the history that its next call extends and the tokens that the
        call adds to it; or the agent's reward."""
        call = self._open
        turns = self._turns(call)
        conversation = self.conversations[self._at]
        message, malformed = _said(turns, item["ids"])
        conversation.is_cut = item["ids"][-1] not in turns.end_tokens
        is_cut = conversation.is_cut and not item.get("ended")  # by a stop string
        answer = chat.completion(self._count, message, len(item["ids"]), conversation.tokens, is_cut)
        conversation.messages = [*call.messages, *chat.as_messages([answer["choices"][0]["message"]])]
        conversation.tokens += len(item["ids"])
        self._count += 1
        self._answer.set_result(answer)
        counts = {"calls": len(message["calls"]), "malformed": malformed}
        news = await self._next(self.agents.settings["timeout"])
        if isinstance(news, chat.Call):
            number, ids = self._take(news)
            return counts | {"history": number, "ids": ids, "most": news.most, "reward": None, "done": False}
        return counts | {"ids": [], "reward": _reward(news), "done": True}

    async def end(self, item: dict) -> dict:
        """Refuse all further calls. Return the agent's reward, if it nevertheless ends without a failure."""
        news = self._open
        while isinstance(news, chat.Call):
            self._answer.set_exception(Refused(400, NO_ROOM, "context_length_exceeded"))
            news = await self._next(self.agents.settings["timeout"])
        return {"reward": _reward(news)}

    def close(self) -> None:
        """End the agent and refuse its further requests."""
        self.agents.sessions.pop(self.key, None)
        self.refuse(self._refusal or Refused(410, ENDED))
        with contextlib.suppress(ValueError):
            self.agents.waiting.remove(self)
        if self._command:
            self._command.close()

    async def _next(self, seconds: float) -> chat.Call | End:
        async with asyncio.timeout(seconds):
            return await self._news.get()

    def _take(self, call: chat.Call) -> tuple[int, list[int]]:
        """Return the number of the longest conversation that the call extends, or of a new one, and the tokens that it adds."""
        extended = [i for i, conversation in enumerate(self.conversations) if _extends(call, conversation)]
        turns = self._turns(call)
        self._open = call
        if extended:
            self._at = max(extended, key=lambda i: len(self.conversations[i].messages))
            conversation = self.conversations[self._at]
            ids = turns.between(call.messages[len(conversation.messages) :], conversation.is_cut)
        else:
            self._at = len(self.conversations)
            ids = turns.conversation(call.messages)
            self.conversations.append(Conversation([], call.tools, 0))
        self.conversations[self._at].tokens += len(ids)
        return self._at, ids

    def _turns(self, call: chat.Call) -> Turns:
        return self.agents.turns_of(json.dumps(call.tools))


def _extends(call: chat.Call, conversation: Conversation) -> bool:
    known = len(conversation.messages)
    added = call.messages[known:]
    is_plain = bool(added) and all(message["role"] != "assistant" for message in added)
    return is_plain and call.tools == conversation.tools and call.messages[:known] == conversation.messages


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


def _reward(end: End) -> float | None:
    if end.failure:
        raise Failed(f"the agent {end.failure}")
    return as_reward(end.reward)


class Command:
    """A user's command. Its stdin is the row as JSON. Its output goes to the console, except for a reward in the last line."""

    def __init__(self, session: Session, on_end: Callable[[End], None]):
        """on_end: called with the end. The reward is that of the last line, {"reward": 1.0}, or None."""
        of, offer = session.agents, session.offer
        variables = {"OPENAI_BASE_URL": of.url, "OPENAI_API_KEY": session.key, "OPENAI_MODEL": chat.MODEL}
        environment = os.environ | variables | {"EPISODE_SEED": str(offer["seed"]), "EPISODE_SPLIT": offer["split"]}
        for name in ("NO_PROXY", "no_proxy"):
            environment[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        root = str(Path(__file__).resolve().parents[2])  # was added for this process
        environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").removeprefix(root).removeprefix(os.pathsep)
        with tempfile.TemporaryFile() as row:
            row.write(json.dumps(offer["row"]).encode())
            row.seek(0)
            own = {"start_new_session": True, "preexec_fn": descendants.adopt_orphans}
            pipes = {"stdin": row, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(shlex.split(of.settings["agent"]), env=environment, **pipes, **own)
        self._last = b""
        self._ended = of.children.watch(self._process.pid)
        self._ended.add_done_callback(lambda ended: setattr(self._process, "returncode", ended.result()))  # keeps it till then
        self._report_task = asyncio.create_task(self._report(on_end))

    async def _report(self, on_end: Callable[[End], None]) -> None:
        reading = asyncio.create_task(self._read())
        try:
            code = await asyncio.shield(self._ended)
            await asyncio.wait([reading], timeout=LAST_WORDS)
            last = None
            with contextlib.suppress(ValueError, RecursionError):
                last = json.loads(self._last)
            has_reward = isinstance(last, dict) and "reward" in last
            if not has_reward:
                self._print()
            on_end(End(last["reward"] if has_reward else None, how_it_ended(code) if code else None))
        finally:
            reading.cancel()

    async def _read(self) -> None:
        lines = asyncio.StreamReader(limit=LARGEST)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), self._process.stdout)
        async for line in lines:
            if line.strip():
                self._print()
                self._last = line

    def _print(self) -> None:
        os.write(2, self._last)

    def close(self) -> None:
        """End the command."""
        self._report_task.cancel()
        if not self._ended.done():
            os.kill(self._process.pid, signal.SIGKILL)  # it is not reaped: no other process can have its number
