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
