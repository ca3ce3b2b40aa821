"""Secrets in text that is written down: a run's flags and its command line may hold keys, passwords and tokens.

`masked` replaces each with *** and a digest, so that a resumed run still notices that it has changed. It knows secrets by their
kind: the name before them (KEY=..., --api-key ..., "token": ..., ?token=...), their place (user:password@ in an address, a
variable of `env`), or their shape (sk-..., hf_..., ghp_...).
"""

import hashlib
import re
from typing import Any

MASK = "***"
DIGITS = 8  # of a digest: enough to notice a change, too few to find a secret by
MASKED = re.compile(rf"\*\*\*[0-9a-f]{{{DIGITS}}}")
WORDS = {"token", "secret", "secrets", "pass", "passwd", "password", "passphrase", "pwd", "credential", "credentials", "auth"}
WORDS |= {"authorization", "cookie", "jwt", "bearer", "pat", "sk", "ak", "dsn", "webhook", "signature", "sig", "pw", "sas"}
ENDS = ("apikey", "accesskey", "secretkey", "privatekey", "authkey", "token", "secret", "password", "passwd")
OF_DATA = {"prompt", "image", "images", "video", "videos", "audio", "reward", "messages", "response", "answer", "solution"}
OF_DATA |= {"question", "input", "output", "label", "text", "tools", "column", "data", "source", "primary", "foreign", "sort"}
OF_DATA |= {"group", "metric", "mask", "env", "public"}  # before "key": the name of a column, not a secret
SHAPES = re.compile(
    r"(?<![\w-])(?:(?:sk|rk|pk|gsk|nvapi|glpat|xox[abprs])-[\w-]{8,}|(?:sk|hf|gh[opsur]|github_pat|gsk|r8)_\w{8,}|A[KS]IA[0-9A-Z]{12,}"
    r"|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?"
    r"|(?:npm|pypi|xai|csk|tvly|pplx|lsv2|fw|dop|wandb|hvs|dapi|ya29|SG)[-_.]?(?=[\w.-]*\d)[\w.-]{20,})"
)
IN_ADDRESS = re.compile(r"(?<=://)[^\s/?#\"']+(?=@)")
# "Token abc123", but not "its end token is"
SCHEME = re.compile(
    r"\b(Bearer|Authorization: *[\w-]+|(?:Basic|Token)(?= +(?:[^\s\"',;]*\d|[^\s\"',;]{16}))) +(?!\*\*\*)([^\s\"',;]+)",
    re.IGNORECASE,
)
VALUE = r"""((?:"(?:[^"\\]|\\.)*"|'[^']*'|\\.|[^\s"'\\END])+)"""
VALUE_IN_ADDRESS = re.compile(VALUE.replace("END", "&"))
# --name value, and "name": value, ?name=value, name: value
NAME = re.compile(r"""(?<![\w-])(?:(-{1,2}[A-Za-z][\w.-]*)\s+(?!-)|(-{0,2}[A-Za-z_][\w.-]*)(?:\\?["'])?\]?\s*[=:]\s*)""")
VARIABLE = re.compile(r"(?<![^\s\"'])([A-Za-z_]\w*)(=)" + VALUE.replace("END", ""))
OF_USER = re.compile(r"(?<!\S)(-u|--user|--proxy-user)([ =]?)(?=\S*:)" + VALUE.replace("END", ""))
PLAIN = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false|none|null|auto|on|off|[^=]*/[^=]*|.{1,3}", re.IGNORECASE)


def masked(value: Any) -> Any:
    """Return the value, of JSON's types, with each secret in its texts replaced. What is masked stays as it is."""
    if isinstance(value, dict):
        return {name: _whole(item) if is_secret(str(name)) else masked(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        before = ["", *value]
        return type(value)(_whole(item) if is_option(name) else masked(item) for name, item in zip(before, value, strict=False))
    return _text(value) if isinstance(value, str) else value


def is_secret(name: str) -> bool:
    """Return whether a value of this name is a secret, such as OPENAI_API_KEY, apiKey or X-Auth-Token."""
    words = re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name.strip("-")).replace("-", "_").replace(".", "_").lower().split("_")
    if words[-1] in ("key", "keys"):
        return name.isupper() or not OF_DATA & {*words}
    return bool(WORDS & {*words}) or words[-1].endswith(ENDS)


def is_option(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("-") and "=" not in word and " " not in word and is_secret(word)


def _text(text: str) -> str:
    text = IN_ADDRESS.sub(lambda found: _mask(found[0]), text)
    text = SCHEME.sub(lambda found: f"{found[1]} {_mask(found[2])}", text)
    text = OF_USER.sub(lambda found: found[1] + found[2] + _mask(found[3]), text)
    begins = re.search(r"(?<![^\s\"'])(\S*/)?env\s|^\s*[A-Za-z_]\w*=|[\"'][A-Z_][A-Z\d_]*=", text)  # a command sets variables
    text = VARIABLE.sub(lambda found: _assigned(found, bool(begins)), text)
    text = _named(text)
    return SHAPES.sub(lambda found: _mask(found[0]), text)


def _assigned(found: re.Match, is_command: bool) -> str:
    name, sign, value = found.groups()
    hide = is_secret(name) or (is_command and not PLAIN.fullmatch(value))
    return name + sign + _mask(value) if hide else found[0]


def _named(text: str) -> str:
    """Return the text without the values that follow the name of a secret."""
    at = 0
    parts = []
    while found := NAME.search(text, at):
        parts.append(text[at : found.end()])
        at = found.end()
        value = is_secret(found[1] or found[2]) and VALUE_IN_ADDRESS.match(text, at)
        if value and value[0].lower() not in ("bearer", "basic", "token"):
            parts.append(_mask(value[0]))
            at = value.end()
    return "".join(parts) + text[at:]


def _whole(value: Any) -> Any:
    return _mask(value) if isinstance(value, str) else masked(value)


def _mask(secret: str) -> str:
    quote = secret[0] if secret[:1] in ("'", '"') and len(secret) > 1 else ""
    secret = secret.strip(quote) if quote else secret
    if not secret or MASKED.fullmatch(secret):
        return quote + secret + quote
    return f"{quote}{MASK}{hashlib.sha256(secret.encode(errors='replace')).hexdigest()[:DIGITS]}{quote}"
