"""An answer with the words around it: units, what is counted, the words that lead to it, names, a calculation as its reason.

Each word has to be one of words.py, in a place where it cannot change the value. Anything else raises NotUnderstood.
"""

import contextlib
import re
from dataclasses import dataclass

from math_grader import words
from math_grader.text import CURRENCIES, LONGEST, NotUnderstood, normalized, tokens
from math_grader.tree import Parser

REASON = re.compile(r"(.*?)[,;.]?\s+(?:because|since|as)\s+((?!shown).*)", re.DOTALL)
REMARK = re.compile(r"(.*\w.*?)\s+\(([^()]*)\)", re.DOTALL)
CHOICE = re.compile(r"\(?\s*([A-Z])\s*(?:[).:]\s+([^\s=+*/^_<>,;:.-].*)|\))", re.DOTALL)  # (C) 7 and C)


@dataclass(frozen=True)
class Answer:
    tokens: tuple[str, ...]
    tree: tuple | None  # None if it is not understood
    units: frozenset[str] = frozenset()
    reason: tuple | None = None  # 9 * 2 = 18 in "18, because 9 * 2 = 18"
    choice: str | None = None  # C in "(C) 7"


def read(text: str, prose: bool = False, longest: int = LONGEST) -> Answer:
    """Return an answer, parsed. prose: as for text.normalized; and a bracket after a value may hold its calculation."""
    text = normalized(text, longest, prose)
    found = tuple(folded(token) for token in tokens(text))
    if not found:
        raise NotUnderstood("empty")
    for pattern in (REASON, REMARK) if prose else (REASON,):
        split = pattern.fullmatch(text)
        if split and re.search(r"\d", split[2]):
            return _parsed(found, split[1], split[2])
    return _parsed(found, text)


def _parsed(found: tuple[str, ...], text: str, reason: str | None = None) -> Answer:
    try:
        parser = Sentence(tokens(text))
        tree = parser.whole()
        why = Sentence(tokens(reason)).whole() if reason else None
    except NotUnderstood:
        return Answer(found, None, choice=_choice(text))
    return Answer(found, tree, frozenset(parser.units), why, _choice(text))


def _choice(text: str) -> str | None:
    """Return the letter of a choice with its value, such as C in "(C) 7"; None for anything else."""
    found = CHOICE.fullmatch(text)
    with contextlib.suppress(NotUnderstood):
        if found and (not found[2] or _is_value(found[2])):
            return found[1]
    return None


def _is_value(text: str) -> bool:
    """Return whether the text is the value of a choice, not another choice or a word. Raise NotUnderstood if it is neither."""
    return re.search(r"[0-9\\]", text) is not None and not _has_word(Sentence(tokens(text)).whole())


def _has_word(tree: tuple) -> bool:
    """Return whether a tree has a word or a capital letter."""
    return tree[0] == "words" or any(
        _has_word(part) if isinstance(part, tuple) else str(part).isupper() for part in tree if part
    )


def folded(token: str) -> str:
    """Return a word in lower case; a product of letters has case."""
    return token.lower() if token.isalpha() and (len(token) > 3 or token.lower() in words.SHORT) else token


class Sentence(Parser):
    """A parser of formulas and words. Brackets hold formulas only."""

    def whole(self) -> tuple:
        items = [self.relation()]
        joins = set()
        while self.next:
            joins.add(self.join())
            items.append(self.relation())
        if len(items) == 1:
            return self.without_degrees(items[0])
        return self.without_degrees(("or" if joins == {"or"} else "list", *items))

    def join(self) -> str:
        """Parse what is between two answers: a comma, "and", "or", or a comma and one of them."""
        joins = [self.take()] if self.next in (",", ";") else []
        if self.next.lower() in words.JOINS:
            joins = [self.take().lower()]
        if not joins:
            raise NotUnderstood(self.next)
        return joins[0]

    def relation(self) -> tuple:
        if self.depth:
            return super().relation()
        label = self.lead()
        if self.next == r"\approx":
            self.take()
            tree = ("about", super().relation())
        else:
            tree = super().relation()
        self.count()
        return ("relation", ("=",), ("label", *label), tree) if label else tree

    def union(self) -> tuple:
        if self.depth or not self.next.isalpha() or folded(self.next) in words.NUMBERS:
            return super().union()
        if len(self.next) > 3 or self.next.lower() in words.SHORT:
            found = []
            while self.next.isalpha() and self.next.lower() not in words.JOINS:
                found.append(folded(self.take()))
            return ("words", *found)
        return super().union()

    def lead(self) -> list[str]:
        """Parse the words before a value. Return them if they name it: "length" in "length = 5"."""
        start = self.at
        found: list[str] = []
        while self.at_lead(found):
            found.append(self.take().lower())
        if not found:
            if self.next == "=":
                self.take()
            return []
        if not self.next:  # nothing but words
            self.at = start
            return []
        named = [word for word in found if word not in words.FILLERS]
        if self.next in ("=", ":"):
            self.take()
            return named
        if self.next == "," and set(found) <= words.THUS:
            self.take()
            return self.lead()
        if (
            set(found) <= words.ARTICLES
            or (found[-1] == "of" and self.peek() != "=")
            or self.next in ("+", "-", r"\pm", "^", "_", "/", "(")
            or not words.LEADS.issuperset(found)
        ):
            raise NotUnderstood(self.next)
        return []

    def at_lead(self, before: list[str]) -> bool:
        token = self.next
        if token in ("a", "A"):
            return len(self.peek()) > 1 and self.peek().isalpha()
        if not token.isalpha() or (len(token) == 1 and token.isascii()):
            return False
        is_counted = bool({"number", "total"} & {*before}) and words.unit(token) is not None  # the number of eggs = 5
        return token.lower() in words.LEADS or is_counted

    def count(self) -> None:
        """Parse the words after a value: what is counted, its unit, per what."""
        key: list[str] = []
        while self.next:
            lower = self.next.lower()
            if self.at_unit():
                key.append(self.unit())
            elif lower in words.POWERS and self.is_unit(self.peek()):
                self.take()
                key.append(f"{self.unit()}^{words.POWERS[lower]}")
            elif self.next in CURRENCIES:
                key.append(words.UNITS[self.take().removeprefix("\\")])
            elif (self.next == "/" or lower in words.PER) and self.is_unit(self.peek(), single=True):
                self.take()
                key.append("/" + self.unit())
            elif lower == "in" and self.peek().lower() in words.IN_ALL:
                self.at += 2
            elif lower == "in" and not self.peek().isalpha():
                self.take()
                key.append("inch")
            elif lower == "of" and key and words.unit(self.peek()):
                self.at += 2
            elif lower in words.QUIET:
                self.take()
            elif self.next == "(":
                self.remark(key)
            else:
                break
        if key:
            counted = {name for name in (*key, *(self.units & words.MONEY)) if not name.startswith("/")}
            if len(counted) > 1 and counted & {*words.MONEY, "m", "g", "l"}:
                raise NotUnderstood("$12m may be 12 million")
            self.units.add(" ".join(key))

    def remark(self, key: list[str]) -> None:
        """Parse (dollars) or (as shown)."""
        self.take("(")
        while self.next != ")":
            if self.is_unit(self.next):
                key.append(self.unit())
            elif self.take().lower() not in words.QUIET:
                raise NotUnderstood("a remark")
        self.take(")")

    def at_unit(self) -> bool:
        return self.is_unit(self.next)

    @staticmethod
    def is_unit(token: str, single: bool = False) -> bool:
        if token.startswith(r"\unit"):
            return True
        if len(token) == 1 and token.isascii():
            return single and token in words.LETTERS
        return token.isalpha() and words.unit(token) is not None

    def unit(self) -> str:
        """Parse a unit, perhaps squared or cubed."""
        name = words.unit(self.take().removeprefix(r"\unit").strip("{}")) or ""
        if self.next != "^":
            return name
        self.take()
        power = self.take()
        if power == "{":
            power = self.take()
            self.take("}")
        if power not in ("2", "3"):
            raise NotUnderstood(power)
        return f"{name}^{power}"

    def without_degrees(self, tree: tuple) -> tuple:
        """Return the tree without degree signs, except in functions such as sin, where they matter."""
        if tree[0] == "degree":
            self.units.add("degree")
            return self.without_degrees(tree[1])
        if tree[0] == "call":
            return tree
        return tuple(self.without_degrees(part) if isinstance(part, tuple) and part else part for part in tree)
