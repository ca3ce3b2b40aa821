"""A rank's environments and agents: their answers are read between two decoding steps, and nothing here waits for one.

If one hangs, dies, raises or returns a wrong value, that is an event of its own episode, of the kinds in rl/rewards/score.py.
They are played in another process, user_processes/worker.py.
"""

import os
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from rl.environments import named
from rl.environments.args import EnvironmentArgs
from rl.errors import UserError
from rl.printable import one_line
from user_processes.server import Server, as_json, without_secrets
from user_processes.tools import Tools

if TYPE_CHECKING:
    from rl.data.image_prompts import ImagePrep

LINGER = 5.0  # seconds after the run in which workers learn of its end
SECRET = "SERVE_POLICY_KEY"  # the environment variable with the secret of workers
SHORTEST_SECRET = 16  # characters


class Environments:
    """The episodes of a rank, by keys that the caller chooses."""

    def __init__(
        self,
        args: EnvironmentArgs,
        model: str,
        end_tokens: set[int],
        trust_remote_code: bool = False,
        reward: str = "",
        reward_weights: Sequence[float] = (),
        chat_template: str | None = None,
        system_prompt: str | None = None,
        keeps_schemas: bool = False,
        prep: "ImagePrep | None" = None,
    ):
        """model: the path of its tokenizer. reward: the functions over environments, if --reward names some, with their
        weights. chat_template: by default the tokenizer's own; system_prompt: that it begins with; keeps_schemas: whether the
        engine can keep to a JSON schema; prep: of a model that takes images. Raise UserError if the file cannot be used."""
        self.args = args
        self._settings = {
            "programs": named.programs(args),
            "reward": reward,
            "reward_weights": [*reward_weights],
            "agent": args.agent,
            "timeout": args.env_timeout,
            "model": model,
            "chat_template": chat_template,
            "system_prompt": system_prompt,
            "keeps_schemas": keeps_schemas,
            "images": prep and (prep.image_token, prep.cut),
            "trust_remote_code": trust_remote_code,
            "end_tokens": sorted(end_tokens),
            "form": args.tool_format,
            "tape": (args.record_env, args.from_tape) if args.has_tape else None,
        }
        self.place: Callable | None = None  # of an episode on the tape, by its key
        self._engine: int | None = None  # the number of the engine that agents are served from
        self._count = 0  # episodes so far
        self._numbers: dict[Hashable, int] = {}  # of the episodes under way
        self._keys: dict[int, Hashable] = {}
        self._start()

    def _start(self) -> None:
        """Start the process. Set, by the name of the environment, `tools` and whether it `scores_at_end`; and `note`, for the
        user."""
        environment = without_secrets(os.environ, os.environ.get("RL_PASS_ENV", "").split())
        flag = " ".join(named.environment_flag(self.args))
        self._server = Server("user_processes.worker", self._settings, environment, flag, "the environment")
        ready = self._server.ready
        self.tools = {name: Tools(**tools) for name, tools in ready["tools"].items()}
        self.scores_at_end = ready["scores_at_end"]
        self.note = ready["note"]
        if self._engine is not None:
            self.serve(self._engine)

    def check(self) -> None:
        """Raise UserError on a rank that generates if it lacks the secret of --serve-policy."""
        if self.args.serve_policy and len(os.environ.get(SECRET, "")) < SHORTEST_SECRET:
            raise UserError(
                f"--serve-policy: set {SECRET}, the secret of its workers, to {SHORTEST_SECRET} characters or more: "
                f"export {SECRET}=$(openssl rand -hex 16)"
            )

    def serve(self, engine: int) -> None:
        """Start the server that agents call, on the rank that leads this engine. Raise UserError if the port is not free."""
        self.check()
        self._engine = engine
        host, port = named.serve_address(self.args) or ("127.0.0.1", 0)
        secret = os.environ.get(SECRET, "") if self.args.serve_policy else ""
        order = {"do": "listen", "host": host, "port": port + engine if port else 0, "secret": secret}
        self.url = self._server.ask(order)["url"]
        if self.args.serve_policy:
            print(f"episodes for workers: {self.url}/episodes/next, with the key in {SECRET} (docs/agents.md)", flush=True)

    def close(self) -> None:
        """End all episodes. Workers learn that the run has ended."""
        if self.args.serve_policy and self._engine is not None:
            self._server.send(as_json({"do": "finish"}))
            time.sleep(LINGER)
        self._server.close()

    def name_of(self, row: dict) -> str:
        """Return the name of a row's environment; an empty string if there is one for all rows."""
        return "" if "" in self.tools else row["environment"]

    # -- episodes

    def begin(self, key: Hashable, row: dict, seed: int, own_seed: int, split: str = "train") -> None:
        """Start an episode, and ask it to reset. seed: for the user's reset; own_seed: for the process's random numbers; split:
        "train" or "val"."""
        self._count += 1
        self._numbers[key] = self._count
        self._keys[self._count] = key
        more = {"tape": self.place(key)} if self.place else {}
        self.ask(key, "reset", row=row, seed=seed, own_seed=own_seed, split=split, environment=self.name_of(row), **more)

    def ask(self, key: Hashable, what: str, **item: Any) -> None:
        """Ask an episode to "reset", to "step" after the model's turn, or for the reward at an early "end"."""
        self._server.send(as_json({"episode": self._numbers[key], "do": what} | item))

    def pass_on(self, parts: dict[str, list[int]]) -> None:
        """Send tokens that were sampled, by the name of the stream that wants them."""
        self._server.send(as_json({"do": "parts", "parts": parts}))

    def end(self, key: Hashable) -> None:
        """End an episode, unless it has ended."""
        if key in self._numbers:
            self.ask(key, "close")
            del self._keys[self._numbers.pop(key)]

    def poll(self, wait: float = 0.0) -> list[tuple[Hashable, dict]]:
        """Return (key, answer) for each answer since the last call; wait up to `wait` seconds for one. An answer with "event"
        and "message" ends the episode. If the process has ended, so have all episodes, and another one starts."""
        try:
            return [found for answer in self._server.receive(wait) if (found := self._of(answer))]
        except EOFError:
            self._server.close()
            lost = [*self._numbers]
            self._numbers, self._keys = {}, {}
            self._start()
            message = "the environment: the process in which it ran was ended"
            return [(key, {"event": "died", "message": message}) for key in lost]

    def _of(self, answer: dict) -> tuple[Hashable, dict] | None:
        """Return the key and the answer; None for an episode that was ended meanwhile. Raise UserError if a tape ends."""
        if "failed" in answer:
            raise UserError(answer["failed"])
        key = self._keys.get(answer.pop("episode"))
        if key is None:
            return None
        if "event" in answer:
            message = answer["message"] or f"no answer after {self.args.env_timeout:g} s (--env-timeout)"
            answer["message"] = one_line(f"the environment: {message}")
            self.end(key)
        return key, answer
