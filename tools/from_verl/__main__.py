"""Prints our command for a verl command, and what it could not translate.

    python -m tools.from_verl 'python3 -m verl.trainer.main_ppo data.train_batch_size=1024 ...'
    python -m tools.from_verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 ...
    python -m tools.from_verl run_qwen.sh data.seed=1   # a script of yours, with what it is called with; nothing in it is run

The output is a shell script: the command, then a comment on every key that has no flag here, and on every variable that the
script exports. Without words the command is read from standard input. Variables of the script can be set before:
MODEL_PATH=... python -m ...
"""

import argparse
import shlex
import sys
from pathlib import Path

from rl.errors import UserError
from rl.printable import printable
from tools.from_verl import environment
from tools.from_verl.command import Command, read_script, read_words
from tools.from_verl.table import NOT_HERE, NOT_NEEDED


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.from_verl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help="verl's command, its key=value words, or a script with its own")
    try:
        print(report(read(parser.parse_args().words)))
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(1)


def read(words: list[str]) -> Command:
    if words and words[0] in ("bash", "sh") and words[1:]:
        words = words[1:]
    if words and _is_path(words[0]):
        try:
            return read_script(Path(words[0]).read_text(), words[1:])
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{words[0]}: it cannot be read ({error}).") from None
    if not words and not sys.stdin.isatty():
        words = [sys.stdin.read()]
    if not any(word.strip() for word in words):
        raise UserError("nothing to translate: give verl's command, its key=value words, or a script. --help shows examples.")
    return read_text(words[0]) if len(words) == 1 else read_words(words)


def _is_path(word: str) -> bool:
    """Return whether the word names a script, existing or not."""
    try:
        return Path(word).is_file() or (word.endswith(".sh") and not set(word) & set(" \n="))
    except (OSError, ValueError):  # a whole command is not a file name
        return False


def read_text(text: str) -> Command:
    """Return the command or script; overrides without a program are read as those of verl's main program."""
    if _is_overrides(text):
        text = "python3 -m verl " + text.replace("\\\n", " ").replace("\n", " ")
    command = read_script(text)
    command.module = "" if command.module == "verl" else command.module
    return command


def _is_overrides(text: str) -> bool:
    """Return whether the text only has key=value words; values may mention verl."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:  # a quote without its other half
        words = []
    only = bool(words) and all("=" in word or word.startswith("~") for word in words)
    return only or ("verl" not in text and "main_ppo" not in text)


def report(command: Command) -> str:
    """Return the command, then comments: keys that are not here, unknown or not needed, and words with another meaning."""
    try:
        from tools.from_verl.translate import translate  # loads the scripts, and with them torch
    except ModuleNotFoundError as error:
        raise UserError(
            f"the flags are read from the scripts, for which {error.name} is missing here: pip install -r requirements.txt."
        ) from None
    found = translate(command)
    lines = ["# INCOMPLETE", *(f"#   {gap}" for gap in found.gaps), ""] if found.gaps else []
    lines += [f"# FIRST: git apply examples/forks/{name}.diff" for name in found.forks]
    lines += [found.command(), ""]
    if found.refusal:
        lines += ["# REFUSED TODAY. The script ends at once with:", *(f"#   {line}" for line in found.refusal.splitlines()), ""]
    heads = {NOT_HERE: "not here", "unknown": "unknown: no key of verl's that this program knows", NOT_NEEDED: "not needed"}
    for kind, head in heads.items():
        rows = {
            f"{key}={command.values.get(key, '')}": why for key, (verdict, why) in found.verdicts.items() if verdict == kind
        }
        lines += [f"# {head} ({len(rows)})"] if rows else []
        lines += [f"#   {key}" + (f": {why}" if why else "") for key, why in rows.items()]
    translated = sum(verdict == "translated" for verdict, _ in found.verdicts.values())
    lines += [f"# {translated} of {len(found.verdicts)} keys are in the command above, as docs/from-verl.md says"]
    lines += [*environment.lines(command), *(f"# note: {note}" for note in found.notes)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
