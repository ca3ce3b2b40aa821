"""Agents that own their loop: their calls to an endpoint, in one of three protocols, are the turns of a response.

An agent is a command that is started for the response (--agent), or a worker elsewhere that has asked for an episode
(--serve-policy). Its calls are compared with the conversations so far: a call that extends one continues its tokens, any other
call begins a new history with a separate prompt. rl/generation/agent_episodes.py keeps the tokens. This runs in the process of
user_processes/worker.py.

Left out: encryption. Put a tunnel or a proxy in front of it if you do not control the network.
"""

import asyncio
import contextlib
import functools
import hmac
import importlib
import json
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from aiohttp import web

from user_processes import pictures
from user_processes.child import Children
from user_processes.command import Command, End
from user_processes.open_call import OpenCall
from user_processes.programs import as_reward
from user_processes.protocols import form
from user_processes.protocols.form import Answer, Call, Refused
from user_processes.turns import Turns

LARGEST = 1 << 26  # bytes of a request
START = 120.0  # seconds that a command may take in addition before its first call, to import its libraries
NO_ROOM = "the response's budget of tokens or turns is used up: --max-response-length, --max-turns"
NO_SCHEMA = (
    "a JSON schema of the answer needs a call without tools, and a run with --engine vllm, --top-k and --keep-sampling-mask, "
    "so that training knows which tokens were possible, but without --over-sample. Or ask for JSON in the prompt"
)
ENDED = "this episode has ended"
OVER = "the run has ended: there will be no more episodes"
PROTOCOLS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "anthropic"}


class Failed(Exception):
    """The agent cannot be scored."""

    event = "error"


@dataclass
class Conversation:
    """A sequence of calls, each of which extends the one before."""

    messages: list[dict]  # in the form of Call, including the model's last one
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

    async def order(self, do: str, host: str = "", port: int = 0, secret: str = "", parts: dict | None = None) -> dict:
        """Listen and return the "url"; refuse all requests because the run has ended; or pass parts of turns on. secret: of
        workers; parts: tokens by the name of their stream."""
        if do == "parts":
            for key in parts.keys() & self.sessions.keys():
                self.sessions[key].open_call.grow(parts[key])
            return {}
        if do == "finish":
            self.is_over = True
            for session in self.sessions.values():
                session.refuse(Refused(410, OVER))
            return {}
        self.secret = secret or secrets.token_hex(16)
        app = web.Application(client_max_size=LARGEST, middlewares=[self._answer])
        app.router.add_get("/v1/models", self._models)
        for path in PROTOCOLS:
            app.router.add_post(path, self._call)
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
            return web.json_response(_protocol(request).failure(refused), status=refused.status)

    def _session(self, request: web.Request) -> "Session":
        if session := self.sessions.get(_key(request)):
            return session
        raise Refused(404, "this needs the api_key of an episode")

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": form.MODEL, "object": "model", "created": 0, "owned_by": "run"}
        return web.json_response({"object": "list", "data": [model]})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        protocol = _protocol(request)
        given = await _body(request)
        with form.reading():
            call = protocol.call(given, session.answered)
        if any("images" in message for message in call.messages) and not self.settings["images"]:
            raise Refused(400, pictures.TEXT_ALONE)
        if call.schema and (call.tools or not self.settings["keeps_schemas"]):
            raise Refused(400, NO_SCHEMA)
        pieces = session.pieces(call)
        if not call.streams:
            return web.json_response(protocol.body([answer async for kind, _, answer in pieces if kind == "end"]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async for event in protocol.events(call, pieces):
                await _send(request, response, event)
        except Refused as refused:
            if not response.prepared:
                raise
            await _send(request, response, protocol.failure(refused))
        return response

    async def _next(self, request: web.Request) -> web.Response:
        if _key(request) in self.sessions:
            raise Refused(404, "this needs the secret of workers")
        if not self.waiting:
            return web.Response(status=204)
        session = self.waiting.popleft()
        session.is_taken.set()
        known = {"api_key": session.key, "model": form.MODEL, "timeout": self.settings["timeout"]}
        return web.json_response(session.offer | known)

    async def _end(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.finish(await _body(request))
        return web.json_response({"ended": True})


def _key(request: web.Request) -> str:
    return request.headers.get("x-api-key") or request.headers.get("Authorization", "").partition(" ")[2].strip()


def _protocol(request: web.Request) -> ModuleType:
    return importlib.import_module(f"user_processes.protocols.{PROTOCOLS.get(request.path, 'chat')}")


async def _send(request: web.Request, response: web.StreamResponse, event: dict | str) -> None:
    """Send an event. If the agent has left, nobody gets it, and the turn is sampled to its end."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    data = event if isinstance(event, str) else json.dumps(event)
    with contextlib.suppress(ConnectionError):
        if not response.prepared:
            await response.prepare(request)
        await response.write(f"{name}data: {data}\n\n".encode())


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
        self._news: asyncio.Queue[OpenCall | End] = asyncio.Queue()
        self._at = 0  # the number of the open call's conversation
        self.open_call: OpenCall | None = None
        self.answered: list[tuple[list[dict], Answer]] = []  # each answer, and its conversation with it
        self._refusal: Refused | None = None  # of all further requests

    # -- the agent's requests

    async def pieces(self, call: Call) -> AsyncIterator[tuple[str, str, Answer]]:
        """Yield the pieces of the answers to a call. Calls at once are answered one after the other. Raise Refused."""
        for index in range(call.n):
            async with self._one_at_a_time:
                if self._refusal:
                    raise self._refusal
                self.open_call = OpenCall(call, index)
                self._news.put_nowait(self.open_call)
                async for piece in self.open_call.pieces():
                    yield piece

    def finish(self, body: Any) -> None:
        """End the episode, as a worker asks: {"reward": 1.0}, {} for the grader, or {"error": "why it cannot be scored"}. Raise
        Refused."""
        if self.agents.settings["agent"]:
            raise Refused(404, "an agent's command ends its episode by exiting")
        if self._refusal:
            raise self._refusal
        with form.reading():
            reward = as_reward(body.get("reward"))
            error = body.get("error")
            if body.keys() - {"reward", "error"} or (error is not None and (reward is not None or not isinstance(error, str))):
                raise ValueError("an end has a reward, or an error as text, and nothing else")
        self._news.put_nowait(End(reward, None if error is None else f"was ended by its worker: {error or 'no reason'}"))
        self.refuse(Refused(410, ENDED))

    def refuse(self, refusal: Refused) -> None:
        """Refuse the open call and all further requests."""
        self._refusal = refusal
        if self.open_call:
            self.open_call.end(refusal)

    # -- the rank's questions

    async def ask(self, item: dict) -> dict:
        return await getattr(self, item["do"])(item)

    async def reset(self, item: dict) -> dict:
        """Start the agent. Return the tokens of its first call."""
        self.agents.sessions[self.key] = self
        agents = self.agents
        limit = agents.settings["timeout"]
        self.offer = {"row": item["row"], "seed": item["own_seed"], "split": item["split"]}
        if command := agents.settings["agent"]:
            self._command = Command(command, agents.url, self.key, self.offer, agents.children, self._news.put_nowait)
            limit += START
        else:
            self.agents.waiting.append(self)
            await self.is_taken.wait()  # as long as it takes
        news = await self._next(limit)
        if isinstance(news, End):
            raise Failed(f"the agent {news.failure or 'ended'} before its first call")
        taken = self._take(news)
        return taken | {"prompt": taken["ids"]}

    async def step(self, item: dict) -> dict:
        """Give the agent the model's turn. Return the number of the history that its next call extends and the tokens that the
        call adds to it; or the agent's reward."""
        call = self.open_call
        conversation = self.conversations[self._at]
        answer, malformed, conversation.is_cut = call.answered(item["ids"])
        conversation.messages = [*call.call.messages, form.said(answer.content, answer.calls)]
        conversation.tokens += len(item["ids"])
        self.answered.append((conversation.messages, answer))
        call.end(answer)
        counts = {"calls": len(answer.calls), "malformed": malformed}
        news = await self._next(self.agents.settings["timeout"])
        if isinstance(news, OpenCall):
            return counts | self._take(news) | {"reward": None, "done": False}
        return counts | {"ids": [], "reward": _reward(news), "done": True}

    async def end(self, item: dict) -> dict:
        """Refuse all further calls. Return the agent's reward, if it nevertheless ends without a failure."""
        news = self.open_call
        while isinstance(news, OpenCall):
            news.end(Refused(400, NO_ROOM, "context_length_exceeded"))
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

    async def _next(self, seconds: float) -> OpenCall | End:
        async with asyncio.timeout(seconds):
            return await self._news.get()

    def _take(self, call: OpenCall) -> dict:
        """Return the number of the longest conversation that the call extends, or of a new one, and the tokens that it adds;
        its limit; and the name of its stream."""
        wanted = call.call
        added = wanted.messages
        extended = [i for i, conversation in enumerate(self.conversations) if _extends(wanted, conversation)]
        turns = self.agents.turns_of(json.dumps(wanted.tools))
        if extended:
            self._at = max(extended, key=lambda i: len(self.conversations[i].messages))
            conversation = self.conversations[self._at]
            added = added[len(conversation.messages) :]
            ids = turns.between(added, conversation.is_cut)
        else:
            self._at = len(self.conversations)
            ids = turns.prompt([], added)
            conversation = Conversation([], wanted.tools, 0)
            self.conversations.append(conversation)
        conversation.tokens += len(ids)
        call.begin(turns, Answer(len(self.answered), call.index, conversation.tokens))
        limits = {"most": wanted.most, "schema": wanted.schema, "stop": wanted.stop}
        stream = self.key if wanted.streams else None
        return {"history": self._at, "ids": ids, "stream": stream, **limits, **pictures.sent(added)}


def _extends(call: Call, conversation: Conversation) -> bool:
    known = len(conversation.messages)
    added = call.messages[known:]
    is_plain = bool(added) and all(message["role"] != "assistant" for message in added)
    return is_plain and call.tools == conversation.tools and call.messages[:known] == conversation.messages


def _reward(end: End) -> float | None:
    if end.failure:
        raise Failed(f"the agent {end.failure}")
    return as_reward(end.reward)
