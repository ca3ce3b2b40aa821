"""Reads verl's command: overrides as Hydra takes them, or a shell script that starts verl.

A script is read by bash itself, so that its variables, arithmetic and conditions mean what they mean there. Nothing in it is
run: the shell is a restricted one that finds no program, and its functions only note down how verl would have been started.
"""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import IO

from rl.errors import UserError
from rl.from_verl.redirections import NOWHERE, sent_nowhere

OVERRIDE = re.compile(r"(\+\+|\+|~)?(?P<key>[A-Za-z_][\w@/-]*(\.[\w@/-]+)*)(=(?P<value>.*))?", re.DOTALL)
STARTS_VERL = re.compile(r"^verl(\.|$)|^recipe\.|main_ppo|fully_async_main|one_step_off")
INNER = re.compile(r"(^|\s)python[\d.]*\s+(-\w+\s+)*(verl|recipe)[./]|-m\s+(verl|recipe)\.")  # a command within a word
# Every program is "not found" and noted down. The built-ins that could reach out of the script, or end it early, do nothing.
# Before each command bash waits for what runs in the background: programs are noted in the script's order, one at a time.
# A loop there that watches something for ever ends at its 100th sleep.
READER = r"""
trap 'builtin wait' DEBUG
command_not_found_handle() { printf '%s\0' "$@" $'\x1e' >&3; return 0; }
exec() { "$@"; }
sleep() { (( BASH_SUBSHELL == 0 || ++_sleeps < 100 )) || builtin exit; }
kill() { return 1; }
basename() { _name=${1%/}; _name=${_name##*/}; echo "${_name%"$2"}"; }
dirname() { case $1 in */*) echo "${1%/*}" ;; *) echo . ;; esac; }
for name in set source . trap ulimit umask enable hash cd pushd popd exit; do eval "$name() { :; }"; done
PATH=/nonexistent
readonly PATH
builtin set -f -T -r
eval "$VERL_SCRIPT"
builtin wait
"""
END_OF_PROGRAM = "\x1e\0"
REFUSED = "cannot redirect output"  # so says the restricted shell
SECONDS_TO_READ = 20
UNENDING = f"bash did not come to the end of the script within {SECONDS_TO_READ} s"


@dataclass
class Command:
    """One start of verl."""

    module: str = ""  # verl.trainer.main_ppo, ...; empty where only overrides are given
    config_name: str = ""  # Hydra's --config-name
    values: dict[str, object] = field(default_factory=dict)  # key as given -> value, the last one wins
    unread: list[str] = field(default_factory=list)  # words that are no override
    deleted: list[str] = field(default_factory=list)  # ~key
    notes: list[str] = field(default_factory=list)  # what reading it met


def read_words(words: list[str]) -> Command:
    """Takes the command's words as the shell hands them over: an optional `python3 -m module`, then overrides."""
    command, rest = Command(), list(words)
    for index, word in enumerate(words):
        if STARTS_VERL.search(word) and "=" not in word and (index == 0 or words[index - 1] == "-m" or word.endswith(".py")):
            command.module, rest = word, words[index + 1 :]
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
                _take(command, match["key"], parse_value(match["value"]))
        else:
            command.unread.append(word)
    return command


def _take(command: Command, key: str, value: object) -> None:
    before = command.values.pop(key, value)
    if before != value:
        command.notes.append(f"{key} is given as {before} and then as {value}: the last one counts.")
    command.values[key] = value


def read_script(text: str) -> Command:
    """Takes the text of a shell script, or of one command. Raises UserError if it starts no verl."""
    text = text.replace("\r\n", "\n")
    rewritten = sent_nowhere(text)
    programs, complaints = _programs(text if rewritten is None else rewritten)
    starts = _starts(programs)
    if not starts:
        raise UserError(
            "no start of verl is found in it: expected a command such as python3 -m verl.trainer.main_ppo key=value ... "
            "If a program of your own starts verl, hand its key=value words over instead."
            + (f" Bash says: {complaints[-1]}" if complaints else "")
        )
    command = read_words(starts[0])
    if not command.module and (inner := next((word for word in starts[0] if INNER.search(word)), None)):
        return read_script(inner)  # of docker exec ... bash -c '...'
    if refused := next((line for line in complaints if REFUSED in line), ""):
        command.notes.append(f"What stands before a redirection was not read ({refused}): check what depends on it.")
    if UNENDING in complaints:
        command.notes.append(f"{UNENDING}: what follows the loop that it is in was not read.")
    if len(starts) > 1:
        command.notes.append(f"The script starts verl {len(starts)} times; this is the first.")
    return command


def _starts(programs: list[list[str]]) -> list[list[str]]:
    """Those that start verl; its other tools take no key=value."""
    starts = [words for words in programs if any(STARTS_VERL.search(word) for word in words)]
    return [words for words in starts if any("=" in word for word in words)] or starts


def _programs(text: str) -> tuple[list[list[str]], list[str]]:
    """The words of every program that the script would start, in its order; and bash's complaints."""
    with tempfile.TemporaryFile() as noted, tempfile.TemporaryFile() as said:
        ended = _run_reader(text, noted, said)
        noted.seek(0)
        said.seek(0)
        programs = noted.read().decode(errors="replace").split(END_OF_PROGRAM)
        complaints = said.read().decode(errors="replace").strip().splitlines()
    if any("syntax error" in line or "unexpected EOF" in line for line in complaints):
        raise UserError(f"bash cannot read it: {complaints[0]}")
    return [program.split("\0")[:-1] for program in programs if program.strip("\0")], complaints + [UNENDING] * (not ended)


def _run_reader(text: str, noted: IO, said: IO) -> bool:
    """Has bash note the script's programs, and say what it complains of. Returns whether it came to the script's end."""
    try:
        shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-c", f"exec 3>&{noted.fileno()} {NOWHERE}<>/dev/null\n{READER}", "script"],
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
            os.killpg(shell.pid, signal.SIGKILL)  # also what it has left in the background
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
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _split(text: str) -> list[str]:
    """Splits a list's inside at the commas that stand in no quotes and no brackets."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        quote = "" if char == quote else quote or (char if char in "'\"" else "")
        depth += 0 if quote else (char in "[{") - (char in "]}")
        if char == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]
