"""An OpenEnv environment, which a server plays: a container, a Space, or a program that you started.

    pip install openenv
    for game in $(seq 64); do echo "{\\"data_source\\": \\"echo\\", \\"game\\": $game}"; done > games.jsonl
    torchrun --standalone --nproc-per-node 2 train_async.py --model Qwen/Qwen3-0.6B --env openenv:http://127.0.0.1:8001 \\
        --train-files games.jsonl --val-files games.jsonl --max-turns 8 --max-prompt-length 512 --max-response-length 1024

If an action has one field, and this is text, it is what the model says; otherwise the model has to write the action as JSON. It
reads an observation of one text as it is, and others as JSON. A column `reset` has more arguments for the server's reset. Each
episode has a session of its own: the server needs max_concurrent_envs of twice --max-num-seqs. Left out: the tools of servers
that speak MCP, which `--tools mcp:"command"` shows the model.
"""

import json
import urllib.request

from openenv.core.generic_client import GenericEnvClient

from rl.errors import UserError

NOT_SHOWN = ("done", "reward", "metadata")


class Episode:
    """A session with the server."""

    url, field = "", ""

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Begin it."""
        self.client = GenericEnvClient(base_url=self.url).sync()
        self.client.connect()
        return _told(self.client.reset(seed=seed % 2**31, **(row.get("reset") or {})).observation)

    def step(self, message: dict) -> tuple[list[dict], float | None, bool]:
        """Take the model's action."""
        said = message["content"]
        try:
            action = {self.field: said} if self.field else json.loads(said)
        except ValueError as error:
            return _told({"error": f"the action is not JSON: {error}"}), None, False
        result = self.client.step(action)
        return [] if result.done else _told(result.observation), result.reward, result.done


def _told(observation: dict) -> list[dict]:
    shown = {name: value for name, value in observation.items() if name not in NOT_SHOWN}
    values = [*shown.values()]
    return [{"role": "user", "content": values[0] if len(values) == 1 and isinstance(values[0], str) else shown}]


def from_name(url: str) -> list[type]:
    """Return the class of a server's episodes. Raise UserError if none answers there."""
    try:
        with urllib.request.urlopen(f"{url}/schema") as reply:
            fields = json.load(reply)["action"]["properties"]
    except (OSError, ValueError) as error:
        raise UserError(f"no OpenEnv server answers at {url}: {error}. Start it first.") from None
    fields = {name: of for name, of in fields.items() if name not in NOT_SHOWN}
    is_text = [of.get("type") for of in fields.values()] == ["string"]
    return [type("OpenEnv", (Episode,), {"url": url, "field": next(iter(fields)) if is_text else ""})]
