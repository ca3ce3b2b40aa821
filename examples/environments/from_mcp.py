"""The tools of an MCP server, which is a command that speaks over stdin and stdout. No package is needed here.

    torchrun --standalone --nproc-per-node 2 train_async.py --model Qwen/Qwen3-0.6B --tools mcp:"python my_server.py" \\
        --train-files gsm8k/train.parquet --val-files gsm8k/test.parquet --max-prompt-length 1024 --max-response-length 1024
    ... --tools mcp:"npx -y @modelcontextprotocol/server-everything"

The prompt shows the server's tools under their own names. Each episode has a server of its own, started by its first call, so
that no episode sees the state of another one; a Python server takes 1 to 3 s of CPU time to start, which counts in
`--env-timeout`. A server that ends costs its own response. Left out: servers at a URL (`npx mcp-remote URL` is a command),
resources, prompts, and what servers ask of clients.
"""

import functools
import itertools
import json
import shlex
import subprocess
from collections.abc import Callable

from rl.errors import UserError

VERSION = "2025-06-18"  # of the protocol; newer servers speak it as well
NO_METHOD = -32601


class Server:
    """A server's process."""

    def __init__(self, command: str):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
        self._process = subprocess.Popen(shlex.split(command), **pipes)
        self._numbers = itertools.count()
        me = {"name": "flat-rl", "version": "1"}
        self.ask("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": me})
        self._send({"method": "notifications/initialized"})

    def ask(self, method: str, params: dict) -> dict:
        """Return the result. Raise ConnectionError if the server ends, ValueError if it refuses."""
        number = next(self._numbers)
        self._send({"id": number, "method": method, "params": params})
        for line in self._process.stdout:
            message = json.loads(line)
            if "method" in message and "id" in message:  # a question of the server's
                known = {"result": {}} if message["method"] == "ping" else {"error": {"code": NO_METHOD, "message": "no"}}
                self._send({"id": message["id"]} | known)
            elif message.get("id") == number and "error" in message:
                raise ValueError(message["error"]["message"])
            elif message.get("id") == number:
                return message["result"]
        raise ConnectionError(f"the MCP server has ended, with code {self._process.wait()}")

    def tools(self) -> list[dict]:
        """Return the descriptions of its tools."""
        found, page = [], {}
        while page is not None:
            result = self.ask("tools/list", page)
            found += result["tools"]
            page = {"cursor": result["nextCursor"]} if result.get("nextCursor") else None
        return found

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _send(self, message: dict) -> None:
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0"} | message) + "\n")
        self._process.stdin.flush()


_server = functools.cache(Server)  # in an episode's own process: its server


def _tool(command: str, described: dict) -> Callable:
    def call(**arguments):
        result = _server(command).ask("tools/call", {"name": described["name"], "arguments": arguments})
        if not result.get("isError"):
            return result["content"]
        return "error: " + "".join(part.get("text", "") for part in result["content"])

    call.__name__ = described["name"]
    call.keeps_state = True  # that of the server
    function = {"name": described["name"], "description": described.get("description") or ""}
    call.json_schema = {"type": "function", "function": function | {"parameters": described["inputSchema"]}}
    return call


def from_name(command: str) -> list[Callable]:
    """Return the tools of the server that the command starts. Raise UserError if it cannot be started."""
    try:
        server = Server(command)
        described = server.tools()
    except (OSError, ValueError) as error:
        raise UserError(f"no MCP server answers to {command!r}: {error}. Try the command in a shell.") from None
    server.end()
    return [_tool(command, tool) for tool in described]
