"""Text from a model, from data or from a user's function on the console: escaped, so that a terminal can print it safely."""

import re

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # with Unicode's bidirectional controls


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Return the text with control characters escaped, as in \x1b: a terminal would obey them. keep: those to leave."""
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else escaped(found[0]), text)


def one_line(text: str) -> str:
    """Return the `printable` text, on one line."""
    return printable(re.sub(r"\r\n|[\n\r\t\v\f\x1c-\x1e\x85\u2028\u2029]", " ", text), keep="")


def in_markdown(text: str) -> str:
    """Return the text for a cell of a Markdown table: on one line, escaped for Markdown and for terminals."""
    text = re.sub(r"([\\`*_\[\]|~$<>&])", r"\\\1", text)
    text = re.sub(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", "<br>", text)
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: "\\" + escaped(match[0]), text)


def escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
