"""Reads verl's command: overrides as Hydra takes them, or a shell script that starts verl.

A script is read by bash itself, so that its variables, arithmetic and conditions mean what they mean there. Nothing in it is
run: the shell is a restricted one that finds no program, and its functions only note down how verl would have been started.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from rl.errors import UserError
from tools.from_verl import programs

OVERRIDE = re.compile(r"(\+\+|\+|~)?(?P<key>[A-Za-z_][\w@/-]*(\.[\w@/-]+)*)(=(?P<value>.*))?", re.DOTALL)
ASSIGNMENT = re.compile(r"(?:-e|--env=)?([A-Za-z_]\w*)=(.*)", re.DOTALL)  # of `env`, `docker run -e` and their like
NETWORK = re.compile(r"/dev/(tcp|udp)/")  # bash itself connects to what follows
STARTS_VERL = re.compile(rf"^verl(\.|$)|(^|/)verl/|^recipe[./]|{programs.NAMES.pattern}")
INNER = re.compile(r"(^|\s)python[\d.]*\s+(-\w+\s+)*(verl|recipe)[./]|-m\s+(verl|recipe)\.")  # a command within a word
# Every program is "not found" and noted down, with the variables that the script exports. Built-in commands that could reach
# out of the script, or end it early, are disabled: `command kill` kills no more than `kill`. Functions replace some of them.
# Programs are noted in the script's order, one at a time: before each command bash waits for what runs in the background, and a
# program reads its input to the end (a coprocess's has none, hence the limit), so it is noted after the one that it reads from.
# A loop there that watches something for ever ends at its 100th sleep.
READER = r"""
trap 'builtin wait' DEBUG
_note() { printf '%s\0' "$@" $'\x1e' >&3; }
command_not_found_handle() {
  local IFS=$' \t\n' _name _exported=()
  while read -r -t 3 _name; do :; done
  for _name in $(compgen -e); do _exported+=("$_name=${!_name}"); done
  _note "$@" $'\x1d' "${_exported[@]}"
}
exec() { "$@"; }
sleep() { (( BASH_SUBSHELL == 0 || ++_sleeps < 100 )) || { : "${_over:?}"; } 2>&9; }
kill() { return 1; }
basename() { _name=${1%/}; _name=${_name##*/}; echo "${_name%"$2"}"; }
dirname() { case $1 in */*) echo "${1%/*}" ;; *) echo . ;; esac; }
set() { case $1 in -a | +a) builtin set "$1" ;; esac; }
for name in source .; do eval "$name() { _note source \"\$@\"; }"; done
for name in trap ulimit umask enable hash cd pushd popd exit; do eval "$name() { :; }"; done
export -n $(compgen -e)
PATH=/nonexistent HISTFILE=
builtin set -f -T
builtin enable -n kill exec suspend exit logout trap source . hash history fc bind ulimit umask cd pushd popd enable 2>&9
builtin set -r
readonly PATH HISTFILE
readonly -f _note command_not_found_handle
eval "$VERL_SCRIPT"
builtin wait
"""
# A shell that may not write files does not run a command whose output goes to one: such redirections are rewritten
NOWHERE = 9  # a descriptor that is open for reading and writing
SINGLE = r"\$'(?:\\.|[^'\\])*'|'[^']*'"
PARENS, DOUBLE, BRACES = r"\([^()\"'\\]*\)", r'"(?:\\.|\$(?![({])|[^"\\$`])*"', r"\{[^{}\"'\\]*\}"
for _ in range(4):  # they may be nested: "$(cd "$(dirname "${A[0]}")")"
    PARENS, DOUBLE, BRACES = (
        rf"\((?:\\.|{SINGLE}|{DOUBLE}|{PARENS}|[^()\"'\\])*\)",
        rf'"(?:\\.|\$(?:{PARENS}|{BRACES}|(?![({{]))|`[^`]*`|[^"\\$`])*"',
        rf"\{{(?:\\.|{DOUBLE}|{BRACES}|[^{{}}\"'\\])*\}}",
    )
WORD = rf"(?:{SINGLE}|{DOUBLE}|\$(?:{PARENS}|{BRACES})|`[^`\n]*`|\\.|[^\s;&|()<>\"'`\\])+"
TARGET = rf"[ \t]*(?:>{PARENS}|{WORD})(?![^\s;&|()<>`])"
TOKEN = re.compile(
    rf"(?P<kept>\\.|{SINGLE}|(?<![^\s;&|()`])#[^\n]*|[<>]\(|<<<|[<>]&[\d$-]"  # a text, a comment, what opens no file
    r"|<<-?[ ]*(?P<quote>[\"']?)(?P<end>\w+)(?P=quote)[ ]*\n(?:[^\n]*\n)*?\t*(?P=end)(?![^\n]))"  # and a here-document
    rf"|(?P<words>{DOUBLE}|\$(?=\{{){BRACES}|\(\((?:{PARENS}|[^()])*\)\)|(?<!\S)\[\[\s(?:{SINGLE}|{DOUBLE}|\\.|[^\"'\\])*?\s\]\])"
    r"|`(?P<command>[^`]*)`"
    rf"|(?P<number>(?<![^\s;&|(`])(?<!\\.)\d+)?(?P<one>>>|>\||<>|>(?!&)){TARGET}"
    rf"|(?P<both>&>>?|>&){TARGET}"
    r"|(?P<unclear>[\"'`>]|<<|\(\(|(?<!\S)\[\[\s)",
    re.DOTALL,
)
SUBSTITUTION = re.compile(rf"\\.|\$(?!\(\()(?P<command>{PARENS})", re.DOTALL)
END_OF_PROGRAM, EXPORTS = "\x1e", "\x1d"
REFUSED = "cannot redirect output"  # so says the restricted shell
SECONDS_TO_READ = 20
RANKS = ("nnodes", "nproc-per-node")  # torchrun's
UNENDING = f"bash did not come to the end of the script within {SECONDS_TO_READ} s"


@dataclass
class Command:
    """One start of verl."""

    module: str = ""  # verl.trainer.main_ppo, ...; empty where only overrides are given
    ranks: dict[str, str] = field(default_factory=dict)  # torchrun's nnodes and nproc-per-node
    config_name: str = ""  # Hydra's --config-name
    values: dict[str, object] = field(default_factory=dict)  # key as given -> value, the last one wins
    unread: list[str] = field(default_factory=list)  # words that are not overrides
    deleted: list[str] = field(default_factory=list)  # ~key
    environment: dict[str, str] = field(default_factory=dict)  # variables that the script exports to verl
    unseen: list[str] = field(default_factory=list)  # files that set variables; they are not read
    text: str = ""  # of the script
    notes: list[str] = field(default_factory=list)  # what reading it met

    @property
    def program(self) -> str:
        return f"{self.module} {self.config_name}"


def read_words(words: list[str]) -> Command:
    """Read the command's words as the shell passes them: an optional `python3 -m module`, then overrides."""
    command = Command()
    place = _place_of_program(words)
    rest = words if place is None else words[place + 1 :]
    if place is not None:
        command.module = words[place]
        _read_launcher(command, words[:place])
    names = iter(rest)
    for word in names:
        if word.startswith("--config"):
            name, equals, value = word.partition("=")
            value = value if equals else next(names, "")
            if name == "--config-name":
                command.config_name = value
        elif (match := OVERRIDE.fullmatch(word)) and (match["value"] is not None or word.startswith("~")):
            if word.startswith("~"):
                command.deleted.append(match["key"])
            else:
                key, value = match["key"], parse_value(match["value"])
                if (before := command.values.pop(key, value)) != value:
                    command.notes.append(f"{key} is given as {before} and then as {value}: the last one counts.")
                command.values[key] = value
        else:
            command.unread.append(word)
    return command


def _place_of_program(words: Sequence[str]) -> int | None:
    """Return the index of the word that names the program: verl's, or else Python's, or else the first; None for overrides
    alone."""
    named = [
        index
        for index, word in enumerate(words)
        if "=" not in word and (index == 0 or words[index - 1] == "-m" or word.endswith(".py"))
    ]
    verls = [index for index in named if STARTS_VERL.search(words[index])]
    others = [index for index in named if index and not words[index].startswith("-")]
    alone = [0] if named[:1] == [0] and not words[0].startswith(("-", "~")) else []
    return next(iter([*verls[-1:], *others, *alone]), None)


def _read_launcher(command: Command, words: Sequence[str]) -> None:
    """Read the variables and the numbers of ranks that the words before verl's module set."""
    for word, following in zip(words, [*words, ""][1:], strict=False):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if (ranks := name.removeprefix("--").replace("_", "-")) in RANKS:
            command.ranks[ranks] = value
        if (assigned := ASSIGNMENT.fullmatch(word)) and not INNER.search(word):
            command.environment[assigned[1]] = assigned[2]
        elif name == "--runtime-env":
            command.unseen.append(value)
        elif name == "--runtime-env-json":
            with contextlib.suppress(ValueError, AttributeError):
                command.environment |= json.loads(value).get("env_vars", {})
        elif name == "--export":
            command.environment |= dict(item.split("=", 1) for item in value.split(",") if "=" in item)


def read_script(text: str, words: Sequence[str] = ()) -> Command:
    """Read the text of a shell script, or of one command. words: the script's arguments. Raise UserError if it does not start
    verl."""
    if "\0" in text:
        raise UserError("it is no text: it has a NUL byte. Give a shell script, or a command.")
    text = NETWORK.sub("/nowhere/", text.replace("\r\n", "\n"))
    rewritten = sent_nowhere(text)
    found, complaints = _programs(text if rewritten is None else rewritten, words)
    starts = _starts(found)
    if not starts:
        raise UserError(
            "it does not start verl: expected a command such as python3 -m verl.trainer.main_ppo key=value ... "
            "If your own program starts verl, give its key=value words instead."
            + (f" Bash says: {complaints[-1]}" if complaints else "")
        )
    start = starts[0]
    is_inside = " " in start.module  # as in docker exec ... bash -c 'python3 -m verl...'
    command = read_script(start.module) if is_inside else read_words(start.words)
    if is_inside:
        _read_launcher(command, start.words)
    command.text = text
    command.environment = start.exports | command.environment
    sourced = [program.words[1] for program in found[: found.index(start)] if program.is_source]
    command.unseen = [*sourced, *command.unseen]
    if refused := next((line for line in complaints if REFUSED in line), ""):
        command.notes.append(f"Commands before a redirection were not read ({refused}): check what depends on them.")
    if UNENDING in complaints:
        command.notes.append(f"{UNENDING}: commands after its loop were not read.")
    if len(starts) > 1:
        command.notes.append(f"The script starts verl {len(starts)} times; this is the first.")
    return command


def sent_nowhere(script: str) -> str | None:
    """Return the script with its output to files sent to NOWHERE; None if it is not clear what is a redirection."""
    try:
        return TOKEN.sub(_rewritten, script)
    except ValueError:
        return None


def _rewritten(token: re.Match) -> str:
    if token["unclear"]:
        raise ValueError("unclear")
    if token["one"]:
        return f" {token['number'] or ''}{token['one'][0]}&{NOWHERE} "
    if token["both"]:
        return f" >&{NOWHERE} 2>&{NOWHERE} "
    if token["command"] is not None:
        return f"`{TOKEN.sub(_rewritten, token['command'])}`"
    return SUBSTITUTION.sub(_substituted, token[0]) if token["words"] else token[0]


def _substituted(found: re.Match) -> str:
    return f"$({TOKEN.sub(_rewritten, found['command'][1:-1])})" if found["command"] else found[0]


class Program(NamedTuple):
    """A program that the script would start."""

    words: list[str]
    exports: dict[str, str]  # variables that the script has exported by then, or set before the words

    @property
    def is_source(self) -> bool:
        return self.words[0] == "source" and len(self.words) > 1

    @property
    def module(self) -> str:
        """What it starts, or else the word that is a command itself and starts verl."""
        place = _place_of_program(self.words)
        named = "" if place is None else self.words[place]
        return named if STARTS_VERL.search(named) else next(filter(INNER.search, self.words), named)


def _starts(found: list[Program]) -> list[Program]:
    """Return those that start a trainer of verl's; if there is none, those that start another program of verl's."""
    starts = [program for program in found if not program.is_source and STARTS_VERL.search(program.module)]
    trainers = [program for program in starts if programs.trainer(program.module)]
    return [program for program in trainers if any("=" in word for word in program.words)] or trainers or starts


def _programs(text: str, words: Sequence[str]) -> tuple[list[Program], list[str]]:
    """Return every program that the script would start, in order, and bash's error messages."""
    with tempfile.TemporaryFile() as noted, tempfile.TemporaryFile() as said:
        ended = _run_reader(text, words, noted, said)
        noted.seek(0)
        said.seek(0)
        records = noted.read().decode(errors="replace").split(f"{END_OF_PROGRAM}\0")[:-1]
        complaints = said.read().decode(errors="replace").strip().splitlines()
    if any("syntax error" in line or "unexpected EOF" in line for line in complaints):
        raise UserError(f"bash cannot read it: {complaints[0]}")
    return [_program(record) for record in records], complaints + [UNENDING] * (not ended)


def _program(record: str) -> Program:
    words, _, exports = record.partition(f"{EXPORTS}\0")
    pairs = [pair for pair in exports.split("\0")[:-1] if not pair.startswith("_")]  # these belong to the reader itself
    return Program(words.split("\0")[:-1], dict(pair.split("=", 1) for pair in pairs))


def _run_reader(text: str, words: Sequence[str], noted: IO, said: IO) -> bool:
    """Let bash record the script's programs and its own errors. Return whether it reached the script's end."""
    try:
        reader = f"exec 3>&{noted.fileno()} {NOWHERE}<>/dev/null\n{READER}"
        shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-c", reader, "script", *words],
            env=os.environ | {"VERL_SCRIPT": text, "BASH_ENV": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=(noted.fileno(),),
            start_new_session=True,
        )
    except FileNotFoundError:
        raise UserError("bash is needed to read a script; hand over the key=value words instead.") from None
    try:
        shell.wait(SECONDS_TO_READ)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # including processes left in the background
        shell.wait()


def parse_value(text: str) -> object:
    """A value in Hydra's notation: number, boolean, null, quoted text, [list], or text as it is."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.startswith("[") and text.endswith("]"):
        return [parse_value(part) for part in _split(text[1:-1])]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("null", "none"):
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _split(text: str) -> list[str]:
    """Split the inside of a list at commas outside of quotes and brackets."""
    parts = [""]
    depth = 0
    quote = ""
    for char in text:
        quote = "" if char == quote else quote or (char if char in "'\"" else "")
        depth += 0 if quote else (char in "[{") - (char in "]}")
        if char == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]
