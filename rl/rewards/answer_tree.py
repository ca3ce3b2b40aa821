r"""A parser of LaTeX answers into trees. It computes nothing: "2 \cdot 3" is a product of two numbers, not 6.

It understands numbers, mixed numbers, names, sums, products, quotients, powers, roots, functions, lists, tuples, intervals,
sets, unions, matrices, equations and inequalities. Anything else raises NotUnderstood; then only the comparison of spellings in
rl/rewards/answers.py counts. A node is a tuple: its kind, then its parts. The time is linear in the length of the text, which
the caller limits.
"""

import re
from fractions import Fraction

DEEPEST = 24  # levels of nested brackets, fractions and exponents
MOST_MARKS = 4  # exponents, subscripts and factorials after one operand, or consecutive divisions
TOKEN = re.compile(r"\\begin\{\w+\}|\\end\{\w+\}|\\[A-Za-z]+|\\.|\d+\.?\d*|\.\d+|[A-Za-z]+|\S", re.DOTALL)
NUMERAL = re.compile(r"\d+\.?\d*|\.\d+")
PAIRS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
CLOSING = {*PAIRS.values(), "}", "|"}
TIMES = {r"\cdot", r"\times", "*"}
RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\in"}
SPELLINGS = {r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne", r"\lvert": "|", r"\rvert": "|", r"\div": "/", r"\lbrace": r"\{"}
SPELLINGS |= {r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\leqslant": r"\le", r"\geqslant": r"\ge", r"\vert": "|"}


def _commands(names: str) -> set[str]:
    return {"\\" + name for name in names.split()}


FUNCTIONS = _commands("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp gcd det max min")
NAMES = _commands(
    "pi theta alpha beta gamma delta epsilon varepsilon lambda mu nu rho sigma tau phi varphi psi omega Delta Omega "
    "infty emptyset ell circ"
)
MARKS = _commands("overline vec hat bar mathbf mathbb mathcal overrightarrow bm widehat")  # above a name
STOPS = {",", ";", "+", "-", "/", "&", r"\\", r"\cup", r"\cap", r"\setminus", r"\pm", r"\mp", ""} | TIMES | RELATIONS | CLOSING
WORDS = {"and": ",", "or": ","}
LONGEST_PRODUCT = 3  # adjacent letters; more are a word


class NotUnderstood(ValueError):
    """A text that is not an answer in a notation that this parser knows."""


def parse(text: str) -> tuple:
    """Return the tree of an answer in the notation of rl/rewards/answers.canonical. Raise NotUnderstood for anything else."""
    return _Parser(text).whole()


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    for token in TOKEN.findall(text):
        token = SPELLINGS.get(token, token)
        if not (token.isalpha() and len(token) > 1):
            tokens.append(token)
        elif token.lower() in WORDS:
            tokens.append(WORDS[token.lower()])
        elif len(token) <= LONGEST_PRODUCT:
            tokens.extend(token)
        else:
            raise NotUnderstood(token)
    return tokens


class _Parser:
    def __init__(self, text: str):
        self.tokens = _tokens(text)
        self.at = 0
        self.depth = 0
        self.in_bars = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted: str | None = None) -> str:
        token = self.next
        if not token or (wanted is not None and token != wanted):
            raise NotUnderstood(f"{token or 'the end'} where {wanted or 'more'} should be")
        self.at += 1
        return token

    def whole(self) -> tuple:
        items = self.items()
        if self.next:
            raise NotUnderstood(self.next)
        return items[0] if len(items) == 1 else ("list", *items)

    def items(self) -> list[tuple]:
        """Parse parts with commas between them."""
        items = [self.relation()]
        while self.next in (",", ";"):
            self.take()
            if self.next not in (",", ";"):  # two in a row: "1, 2, and 3"
                items.append(self.relation())
        return items

    def relation(self) -> tuple:
        sides = [self.union()]
        signs = []
        while self.next in RELATIONS:
            signs.append(self.take())
            sides.append(self.union())
        return ("relation", tuple(signs), *sides) if signs else sides[0]

    def union(self) -> tuple:
        parts = [self.sum()]
        sign = self.next
        while self.next == sign and sign in (r"\cup", r"\cap", r"\setminus"):
            self.take()
            parts.append(self.sum())
        return ("sets", sign, *parts) if len(parts) > 1 else parts[0]

    def sum(self) -> tuple:
        terms = [self.signed()]
        while self.next in ("+", "-", r"\pm", r"\mp"):
            terms.append(self.signed())
        return ("sum", *terms) if len(terms) > 1 else terms[0]

    def signed(self) -> tuple:
        sign = self.take() if self.next in ("+", "-", r"\pm", r"\mp") else "+"
        term = self.term()
        if sign in (r"\pm", r"\mp"):
            return ("either", term)
        return ("negative", term) if sign == "-" else term

    def term(self) -> tuple:
        """Parse factors and divisors, from left to right."""
        value = self.factor()
        quotients = 0
        while True:
            if self.next in TIMES:
                self.take()
                value = _product(value, self.factor(signs=True))
            elif self.next == "/" and quotients < MOST_MARKS:
                self.take()
                quotients += 1
                value = ("quotient", value, self.factor(signs=True))
            elif self.at_stop():
                return value
            else:
                value = self.side_by_side(value)

    def at_stop(self) -> bool:
        """Return whether no further factor begins here."""
        if self.next == "|":
            return self.in_bars > 0
        return self.next in STOPS or self.next.startswith(r"\end")

    def side_by_side(self, left: tuple) -> tuple:
        """Parse a factor without a multiplication sign: the result is a mixed number or a product."""
        right = self.factor()
        if left[0] == "number" and right[0] == "number" and self.next == "/":  # 1 2/3
            self.take()
            right = ("quotient", right, self.factor())
        if left[0] == "number" and _is_plain_fraction(right):
            return _mixed(left[1], right)
        if right[0] == "number":
            raise NotUnderstood("two numbers side by side")
        return _product(left, right)

    def factor(self, signs: bool = False) -> tuple:
        if signs and self.next in ("+", "-"):
            return ("negative", self.factor()) if self.take() == "-" else self.factor()
        value = self.base()
        marks = 0
        while self.next in ("^", "_", "!", "'"):
            mark = self.take()
            marks += 1
            if marks > MOST_MARKS:
                raise NotUnderstood(mark)
            if mark == "^":
                value = ("power", value, self.argument())
            elif mark == "_":
                value = ("subscript", value, self.argument())
            else:
                value = ("factorial" if mark == "!" else "prime", value)
        return value

    def argument(self, digit: bool = False) -> tuple:
        r"""Parse the operand of \frac, \sqrt, ^ or _: a sum in braces, or a single operand. digit: take only a number's first
        digit, as in \frac12."""
        if self.next == "{":
            self.take()
            return self.sum_up_to("}")
        if self.next == "-":
            self.take()
            return ("negative", self.base())
        token = self.next
        if digit and len(token) > 1 and token.isdecimal():
            self.tokens[self.at] = token[1:]
            return ("number", Fraction(token[0]))
        return self.base()

    def sum_up_to(self, closing: str) -> tuple:
        value = self.sum()
        self.take(closing)
        return value

    def base(self) -> tuple:
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotUnderstood("too deep")
        value = self.thing(self.take())
        self.depth -= 1
        return value

    def thing(self, token: str) -> tuple:
        """Parse the operand that begins with the token, without its exponent and subscript."""
        if NUMERAL.fullmatch(token):
            return ("number", Fraction(token.rstrip(".")))
        if token.isalpha() or token in NAMES:
            return ("name", token)
        if token in (r"\frac", r"\binom", r"\dbinom", r"\tbinom"):
            kind = "quotient" if token == r"\frac" else "binomial"
            return (kind, self.argument(digit=True), self.argument(digit=True))
        if token == r"\sqrt":
            index: tuple = ("number", Fraction(2))
            if self.next == "[":
                self.take()
                index = self.sum_up_to("]")
            return ("root", index, self.argument())
        if token in FUNCTIONS:
            return self.function(token)
        if token in MARKS:
            return ("call", token, self.argument())
        if token == "{":
            return self.sum_up_to("}")
        if token == "|":
            self.in_bars += 1
            value = self.sum_up_to("|")
            self.in_bars -= 1
            return ("call", "|", value)
        if token in PAIRS:
            return self.bracket(token)
        if token.startswith(r"\begin"):
            return self.matrix(token[len(r"\begin{") : -1])
        raise NotUnderstood(token)

    def function(self, name: str) -> tuple:
        """Parse a function's exponent and subscript, then factors up to the next sign or function: sin^2 2x, log_2 x."""
        marks = []
        while self.next in ("^", "_"):
            marks.append((self.take(), self.argument()))
        value = self.factor(signs=True)
        while not self.at_stop() and self.next not in FUNCTIONS:
            value = self.side_by_side(value)
        return ("call", name, *marks, value)

    def bracket(self, opening: str) -> tuple:
        """Parse a bracket: (x+1) is the sum in it, (1,2) and [0,1) are rows, {1,2} is a set."""
        bars = self.in_bars
        self.in_bars = 0
        if opening == r"\{" and self.next == r"\}":
            self.take()
            return ("name", r"\emptyset")
        items = self.items()
        self.in_bars = bars
        closing = self.take()
        if opening == r"\{" and closing == r"\}":
            return ("set", *items)
        if len(items) > 1 and opening in "([" and closing in ")]":
            return ("row", opening + closing, *items)
        if closing != PAIRS[opening]:
            raise NotUnderstood(closing)
        if len(items) == 1 and opening in "([":
            return items[0]
        return ("call", opening, *items)

    def matrix(self, name: str) -> tuple:
        rows: list[list[tuple]] = [[]]
        if not name.endswith("matrix"):
            raise NotUnderstood(name)
        while not self.next.startswith(r"\end"):
            rows[-1].append(self.sum())
            if self.next == r"\\":
                self.take()
                if not self.next.startswith(r"\end"):
                    rows.append([])
            elif self.next == "&":
                self.take()
        self.take()
        tree = ("matrix", *(("cells", *row) for row in rows))
        return ("call", name, tree) if name in ("vmatrix", "Vmatrix") else tree


def _product(left: tuple, right: tuple) -> tuple:
    return ("product", *(left[1:] if left[0] == "product" else (left,)), right)


def _is_plain_fraction(tree: tuple) -> bool:
    return tree[0] == "quotient" and all(part[0] == "number" and part[1].denominator == 1 for part in tree[1:])


def _mixed(whole: Fraction, fraction: tuple) -> tuple:
    """Return 1 2/3 as one number. Raise NotUnderstood for 1 4/6 and 1 5/3, which are not mixed numbers."""
    above = fraction[1][1]
    below = fraction[2][1]
    if not 0 < above < below or whole.denominator != 1 or Fraction(above, below).denominator != below:
        raise NotUnderstood("not a mixed number")
    return ("number", whole + Fraction(above, below))
