"""An agent's command (--agent), started for each response."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from user_processes.child import Children, adopt_orphans, how_it_ended
from user_processes.protocols import form

LARGEST = 1 << 26  # bytes of a line that it prints
LAST_WORDS = 1.0  # seconds to read the rest of its output after it ends: another process may hold the pipe open


@dataclass(frozen=True)
class End:
    """The end of an agent. reward: None if a grader scores it; failure: why it cannot be scored."""

    reward: Any = None
    failure: str | None = None


class Command:
    """A user's command. Its stdin is the row as JSON. Its output goes to the console, except for a reward in the last line."""

    def __init__(self, command: str, url: str, key: str, offer: dict, children: Children, on_end: Callable[[End], None]):
        """url, key: of the endpoint; offer: the episode, with its row; on_end: called with the end. The reward is that of the
        last line, {"reward": 1.0}, or None."""
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": form.MODEL}
        variables |= {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
        variables |= {"ANTHROPIC_MODEL": form.MODEL, "OPENAI_DEFAULT_MODEL": form.MODEL}
        environment = os.environ | variables | {"EPISODE_SEED": str(offer["seed"]), "EPISODE_SPLIT": offer["split"]}
        for name in ("NO_PROXY", "no_proxy"):
            environment[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        root = str(Path(__file__).resolve().parents[1])  # was added for this process
        environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").removeprefix(root).removeprefix(os.pathsep)
        with tempfile.TemporaryFile() as row:
            row.write(json.dumps(offer["row"]).encode())
            row.seek(0)
            own = {"start_new_session": True, "preexec_fn": adopt_orphans}
            pipes = {"stdin": row, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(shlex.split(command), env=environment, **pipes, **own)
        self._last = b""
        self._ended = children.watch(self._process.pid)
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
