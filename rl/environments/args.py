"""The flags of environments, tools and agents."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.parts import Part
from rl.ranges import Content, MayChange, Range


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

    @property
    def has_tape(self) -> bool:
        return bool(self.record_env or self.from_tape)

    @property
    def has_agent(self) -> bool:
        """Whether the turns are those of agents that own their loop."""
        return bool(self.agent or self.serve_policy)

    def check(self, args) -> None:
        """Raise UserError for a missing file or command, and for flags that do not work with several turns."""
        if self.has_environment or self.from_tape:
            from rl.environments.named import check_flags  # late: few runs have an environment

            check_flags(self, args.hang_timeout)
