"""The flags of environments, tools and agents."""

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rl.errors import UserError
from rl.parts import Part
from rl.ranges import Content, MayChange, Range, check_code
from rl.user_file import NAMED

DEMO = "demo-calculator"
ADAPTERS = Path(__file__).parents[2] / "examples" / "environments"


@dataclass(frozen=True)
class EnvironmentArgs(Part):
    """Environments, tools and agents: responses of several turns."""

    _field = "environment"

    env: Annotated[str | tuple[str, ...] | None, Content("code")] = None
    """Your own environment, as path/to/file.py:Class, one of a library, as reasoning-gym:chain_sum (examples/environments), or
    "demo-calculator". A response is then an episode: turns of the model with the environment's answers between them, which are
    not trained. Or several, as name=path/to/file.py:Class each: the column "environment" of the data has the name of each
    row's."""
    tools: Annotated[str | tuple[str, ...] | None, Content("code")] = None
    """Tools that the model may call, as path/to/file.py:function,function: typed functions with docstrings. Or those of an MCP
    server, as mcp:"command". Or several sets, as name=path/to/file.py:function,function each, as with --env and next to it."""
    agent: Annotated[str | None, Content("code")] = None
    """Your own agent, as a command: it is started for each response, gets the row as JSON on stdin, and calls the model with
    OPENAI_BASE_URL and OPENAI_API_KEY."""
    serve_policy: MayChange[str | None] = None
    """Port at which agents that run elsewhere get episodes: a worker asks for one, gets its row and a key, calls the model with
    the key, and ends the episode. Engine i serves at port + i. The secret is in SERVE_POLICY_KEY. A port alone is for programs
    on this machine, and 0.0.0.0:PORT for all of its networks."""
    max_turns: Annotated[int, Range(at_least=1)] = 8
    """Turns of the model in a response."""
    tool_format: Literal["auto", "hermes", "llama", "xml"] = "auto"
    """How the model writes a call: JSON within <tool_call>, only JSON, or <function=...> tags. auto: as its chat template
    does. hermes also serves templates that lack something: what they do not show is written into the messages."""
    env_timeout: MayChange[Annotated[float, Range(above=0, at_most=86_400)]] = 30.0
    """Seconds that an environment may take for a turn. If it takes longer, its response is not trained."""
    record_env: MayChange[str | None] = None
    """Directory that gets what environments, tools, agents, judges and graders answer. What is there already is not asked
    again: a resumed run continues without repeating what its tools have done."""
    from_tape: MayChange[str | None] = None
    """Directory that --record-env has filled: all answers come from there, and nothing is called. The run ends if one is
    missing."""

    @property
    def has_environment(self) -> bool:
        """Whether responses have several turns."""
        return bool(self.env or self.tools or self.has_agent)

    def brought(self, own_reward: str | None, name: str = "") -> frozenset[str]:
        """What rows may lack: an environment or agent may give the "prompt", and score without a "ground_truth", as does
        --reward with tools. own_reward: of RewardArgs; name: of the rows' environment."""
        _, are_tools = self.programs.get(name, ("", not self.has_agent))
        if not are_tools:
            return frozenset({"prompt", "ground_truth"})
        return frozenset({"ground_truth"} if self.tools and own_reward else ())

    @property
    def has_tape(self) -> bool:
        return bool(self.record_env or self.from_tape)

    @property
    def has_agent(self) -> bool:
        """Whether the turns are those of agents that own their loop."""
        return bool(self.agent or self.serve_policy)

    @property
    def serve_address(self) -> tuple[str, int] | None:
        """Host and port of --serve-policy, before the number of the engine is added. Raise UserError if there is no port."""
        if not self.serve_policy:
            return None
        host, _, port = self.serve_policy.rpartition(":")
        if not port.isdecimal() or not 0 < int(port) < 65_536:
            raise UserError(f"--serve-policy {self.serve_policy}: give a port, or an address and a port: 0.0.0.0:8000.")
        return host.strip("[]") or "127.0.0.1", int(port)

    @property
    def environment_flag(self) -> tuple[str, str]:
        """The flag that names the environment, and its value, with the other flag after it if there are both."""
        first, *others = self._given
        return first[0], " ".join([first[1], *(f"{name} {value}" for name, value in others)])

    @property
    def _given(self) -> list[tuple[str, str]]:
        of_all = {"--env": self.env, "--tools": self.tools, "--agent": self.agent, "--serve-policy": self.serve_policy}
        return [(name, " ".join(_words(value))) for name, value in of_all.items() if value]

    @property
    def _code(self) -> list[tuple[str, str, str]]:
        """(name, the user's code as file:names, its flag) of each environment; the name is empty if it has none."""
        words = [(word, flag) for flag, value in (("--env", self.env), ("--tools", self.tools)) for word in _words(value)]
        named = [(NAMED.fullmatch(word), word, flag) for word, flag in words]
        return [(*(found.groups() if found else ("", word)), flag) for found, word, flag in named]

    @property
    def programs(self) -> dict[str, tuple[str, bool]]:
        """The user's code to import, as file:names, and whether it is tools, by the environment's name: "" serves all rows."""
        return {name: (_in_file(code), flag == "--tools") for name, code, flag in self._code}

    @property
    def is_by_row(self) -> bool:
        """Whether the column "environment" of the data chooses a row's environment."""
        return any(self.programs)

    def name_of(self, row: dict) -> str:
        """The name of a row's environment."""
        return row["environment"] if self.is_by_row else ""

    def check(self, args) -> None:
        """Raise UserError for a missing file or command, and for flags that do not work with several turns."""
        if self.from_tape and not Path(self.from_tape).is_dir():
            raise UserError(f"--from-tape {self.from_tape}: there is no such directory. Give the one of --record-env.")
        if not self.has_environment:
            return
        name, _ = self.environment_flag
        names = [name for name, _, _ in self._code]
        if max(len(self._given), len(names)) > 1 and (self.has_agent or not all(names)):
            raise UserError(
                f"{' and '.join(name for name, _ in self._given)}: a response has one environment. Leave one out; tools can be "
                "methods of an environment. Or name each, as name=file.py:Class: a column `environment` chooses by row."
            )
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{name}: {twice!r} is the name of two environments. Give each a name of its own.")
        if self.agent:
            self._check_command()
        if self.serve_policy:
            _ = self.serve_address
        for code, are_tools in self.programs.values():
            flag = "--tools" if are_tools else "--env"
            if ".py:" not in code:
                adapters = sorted(file.stem.removeprefix("from_").replace("_", "-") for file in ADAPTERS.glob("from_*.py"))
                raise UserError(
                    f"{flag} {code}: write it as path/to/file.py:names, or as name:rest with the name of an adapter in "
                    f"examples/environments: {', '.join(adapters)}."
                )
            check_code(flag, code, "function,function" if are_tools else "Class")
        if sys.platform != "linux":
            raise UserError(f"{name}: environments only run on Linux.")
        if 0 < args.hang_timeout <= self.env_timeout:
            raise UserError(
                f"--env-timeout {self.env_timeout:g} is not below --hang-timeout, which would end the run. Lower it."
            )

    def _check_command(self) -> None:
        try:
            words = shlex.split(self.agent)
        except ValueError as error:
            raise UserError(f"--agent {self.agent}: it cannot be read as a command: {error}.") from None
        if not words or not shutil.which(words[0]):
            raise UserError(f"--agent {self.agent}: there is no program {words[0] if words else ''!r}. Give a command.")


def _words(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),) if value else ()


def _in_file(code: str) -> str:
    """Return file.py:names for the flag's value, which may be the demo's, or name an adapter: reasoning-gym:chain_sum."""
    if code == DEMO:
        return f"{Path(__file__).parent / 'calculator.py'}:Calculator"
    package, _, names = code.partition(":")
    file = ADAPTERS / f"from_{package.replace('-', '_')}.py"
    return f"{file}:{names}" if file.is_file() else code
