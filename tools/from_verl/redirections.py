"""Redirects what a shell script writes into files to nowhere, so that a shell that may not write files still runs it."""

import re

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


def sent_nowhere(script: str) -> str | None:
    """Return the script with its output to files sent to NOWHERE; None if it is not clear what is a redirection."""
    parts = []
    end = 0
    for token in TOKEN.finditer(script):
        new = _rewritten(token)
        if new is None:
            return None
        parts += [script[end : token.start()], new]
        end = token.end()
    return "".join([*parts, script[end:]])


def _rewritten(token: re.Match) -> str | None:
    if token["unclear"]:
        return None
    if token["one"]:
        return f" {token['number'] or ''}{token['one'][0]}&{NOWHERE} "
    if token["both"]:
        return f" >&{NOWHERE} 2>&{NOWHERE} "
    if token["command"] is not None:
        command = sent_nowhere(token["command"])
        return command and f"`{command}`"
    if not token["words"]:
        return token[0]
    commands = [match for match in SUBSTITUTION.finditer(token[0]) if match["command"]]
    new = token[0]
    for match in reversed(commands):
        command = sent_nowhere(match["command"][1:-1])
        if command is None:
            return None
        new = f"{new[: match.start('command')]}({command}){new[match.end('command') :]}"
    return new
