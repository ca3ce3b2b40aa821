"""What the flags of environments, tools and agents (rl/environments/args.py) name: the user's code by environment; checks."""

import shlex
import shutil
import sys
from pathlib import Path

from rl.data.args import CALCULATOR
from rl.errors import UserError
from user_processes.files import NAMED, check_code

ADAPTERS = Path(__file__).parents[2] / "examples" / "environments"


def programs(args) -> dict[str, tuple[str, bool]]:
    """Return the user's code to import, as file:names, and whether it is tools, by environment: "" serves all rows."""
    return {name: (_in_file(code), flag == "--tools") for name, code, flag in _code(args)}


def _code(args) -> list[tuple[str, str, str]]:
    """Return (name, the user's code as file:names, its flag) of each environment; the name is empty if it has none."""
    words = [(word, flag) for flag, value in (("--env", args.env), ("--tools", args.tools)) for word in _words(value)]
    named = [(NAMED.fullmatch(word), word, flag) for word, flag in words]
    return [(*(found.groups() if found else ("", word)), flag) for found, word, flag in named]


def brought(args, own_reward: str | None, name: str = "") -> frozenset[str]:
    """Return what rows may lack: an environment or agent may give the "prompt", and score without a "ground_truth", as does
    --reward with tools. own_reward: of RewardArgs; name: of the rows' environment."""
    _, are_tools = programs(args).get(name, ("", not args.has_agent))
    if not are_tools:
        return frozenset({"prompt", "ground_truth"})
    return frozenset({"ground_truth"} if args.tools and own_reward else ())


def environment_flag(args) -> tuple[str, str]:
    """Return the flag that names the environment, and its value, with the other flag after it if there are both."""
    first, *others = _given(args)
    return first[0], " ".join([first[1], *(f"{name} {value}" for name, value in others)])


def _given(args) -> list[tuple[str, str]]:
    of_all = {"--env": args.env, "--tools": args.tools, "--agent": args.agent, "--serve-policy": args.serve_policy}
    return [(name, " ".join(_words(value))) for name, value in of_all.items() if value]


def serve_address(args) -> tuple[str, int] | None:
    """Return host and port of --serve-policy, before the number of the engine is added. Raise UserError if there is no port."""
    if not args.serve_policy:
        return None
    host, _, port = args.serve_policy.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UserError(f"--serve-policy {args.serve_policy}: give a port, or an address and a port: 0.0.0.0:8000.")
    return host.strip("[]") or "127.0.0.1", int(port)


def check_flags(args, hang_timeout: float) -> None:
    """Raise UserError for a missing file or command, and for flags that do not work with several turns."""
    if args.from_tape and not Path(args.from_tape).is_dir():
        raise UserError(f"--from-tape {args.from_tape}: there is no such directory. Give the one of --record-env.")
    if not args.has_environment:
        return
    name, _ = environment_flag(args)
    names = [name for name, _, _ in _code(args)]
    if max(len(_given(args)), len(names)) > 1 and (args.has_agent or not all(names)):
        raise UserError(
            f"{' and '.join(name for name, _ in _given(args))}: a response has one environment. Leave one out; tools can be "
            "methods of an environment. Or name each, as name=file.py:Class: a column `environment` chooses by row."
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{name}: {twice!r} is the name of two environments. Give each a name of its own.")
    if args.agent:
        try:
            words = shlex.split(args.agent)
        except ValueError as error:
            raise UserError(f"--agent {args.agent}: it cannot be read as a command: {error}.") from None
        if not words or not shutil.which(words[0]):
            raise UserError(f"--agent {args.agent}: there is no program {words[0] if words else ''!r}. Give a command.")
    serve_address(args)
    for code, are_tools in programs(args).values():
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
    if 0 < hang_timeout <= args.env_timeout:
        raise UserError(f"--env-timeout {args.env_timeout:g} is not below --hang-timeout, which would end the run. Lower it.")


def _words(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),) if value else ()


def _in_file(code: str) -> str:
    """Return file.py:names for the flag's value, which may be the demo's, or name an adapter: reasoning-gym:chain_sum."""
    if code == CALCULATOR:
        return f"{ADAPTERS.parent / 'demo' / 'calculator_tool.py'}:Calculator"
    package, _, names = code.partition(":")
    file = ADAPTERS / f"from_{package.replace('-', '_')}.py"
    return f"{file}:{names}" if file.is_file() else code
