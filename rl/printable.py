"""Text of a model, of data or of a user's function, made safe for a terminal."""

import re

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # with Unicode's that reverse text


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Return the text with control characters written out, as \x1b: a terminal would obey them. keep: those that stay."""
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else escaped(found[0]), text)


def one_line(text: str) -> str:
    """`printable`, on one line."""
    return printable(re.sub(r"\r\n|[\n\r\t\v\f\x1c-\x1e\x85\u2028\u2029]", " ", text), keep="")


def escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
