r"""A parser of answers into trees. It computes nothing: "2 \cdot 3" is a product of two numbers, not 6.

It understands numbers, mixed numbers, names, sums, products, quotients, powers, roots, functions, lists, tuples, intervals,
sets, unions, matrices, equations and inequalities. It uses every token, or raises NotUnderstood. A node is a tuple: its kind,
then its parts. The time is linear in the length of the text, which the caller limits. sentence.py parses the words
around a formula.
"""

from fractions import Fraction

from math_grader import words
from math_grader.text import CURRENCIES, NotUnderstood

DEEPEST = 24  # levels of nested brackets, fractions and exponents
MOST_MARKS = 4  # exponents, subscripts and factorials after one operand, or consecutive divisions
PAIRS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
CLOSING = {*PAIRS.values(), "}", "|"}
TIMES = {r"\cdot", r"\times", "*"}
RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx"}


def _commands(names: str) -> set[str]:
    return {"\\" + name for name in names.split()}


FUNCTIONS = _commands("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp gcd det max min")
NAMES = _commands(
    "pi theta alpha beta gamma delta epsilon varepsilon lambda mu nu rho sigma tau phi varphi psi omega Delta Omega "
    "infty emptyset ell circ"
)
FUNCTION_NAMES = set("fgFGPQ")  # f(x) is no product
MARKS = _commands("overline vec hat bar mathbf mathbb mathcal overrightarrow bm widehat")  # above a name
STOPS = {",", ";", "+", "-", "/", "&", r"\\", r"\cup", r"\cap", r"\setminus", r"\pm", r"\mp", ""} | TIMES | RELATIONS | CLOSING
LARGEST_EXPONENT = 400  # of ten, in a number
LONGEST_PRODUCT = 3  # adjacent letters; more are a word


def is_word(token: str) -> bool:
    """Return whether the token is no part of a formula: a known word of two letters or more, a unit, a currency."""
    if token in CURRENCIES or token.startswith(r"\unit"):
        return True
    return token.isalpha() and (len(token) > 1 or not token.isascii()) and words.is_known(token)


class Parser:
    def __init__(self, found: list[str]):
        self.tokens = found
        self.at = 0
        self.depth = 0
        self.in_bars = 0
        self.units: set[str] = set()

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted: str | None = None) -> str:
        token = self.next
        if not token or (wanted is not None and token != wanted):
            raise NotUnderstood(f"{token or 'the end'} where {wanted or 'more'} should be")
        self.at += 1
        return token

    def peek(self, ahead: int = 1) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def items(self) -> list[tuple]:
        """Parse parts with commas between them."""
        items = [self.relation()]
        while self.next in (",", ";"):
            self.take()
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
            elif self.next == "%":
                self.take()
                value = ("percent", value)
                self.units |= set() if self.depth else {"%"}
            elif self.at_degree():
                value = self.degree(value)
            elif self.next == "/" and quotients < MOST_MARKS and not is_word(self.peek()):
                self.take()
                quotients += 1
                value = ("quotient", value, self.factor(signs=True))
            elif self.at_stop():
                return _scientific(value)
            else:
                value = self.side_by_side(value)

    def at_stop(self) -> bool:
        """Return whether no further factor begins here."""
        if self.next == "|":
            return self.in_bars > 0
        if self.next in STOPS or self.next.startswith(r"\end") or is_word(self.next) or self.at_degree():
            return True
        return self.next == "(" and is_word(self.peek())  # 7 (units)

    def at_degree(self) -> bool:
        return self.next == "^" and r"\circ" in (self.peek(), self.peek(2)) and self.peek() in ("{", r"\circ")

    def degree(self, value: tuple) -> tuple:
        self.take("^")
        if self.next == "{":
            self.take()
            self.take(r"\circ")
            self.take("}")
        else:
            self.take(r"\circ")
        if self.next in ("C", "F") and not self.peek():
            self.units.add(self.take())
        return ("degree", value)

    def side_by_side(self, left: tuple) -> tuple:
        """Parse a factor without a multiplication sign: the result is a mixed number or a product."""
        is_argument = self.next == "("
        right = self.factor()
        is_function = (left[0] == "name" and left[1] in FUNCTION_NAMES) or right[0] in ("number", "negative")
        if left[0] in ("name", "subscript", "prime") and is_argument and is_function:
            return ("call", "()", left, right)  # f(3)
        if left[0] == "number" and right[0] == "number" and self.next == "/" and not is_argument:  # 1 2/3
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
        while self.next in ("^", "_", "!", "'") and not self.at_degree():
            mark = self.take()
            marks += 1
            if marks > MOST_MARKS or (mark == "!" and value[0] == "factorial"):  # n!! is no (n!)!
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
        if token[0] in "0123456789" or (token[0] == "." and len(token) > 1):
            return self.number(token)
        if token in CURRENCIES:
            return self.money(token)
        if token.isalpha() and token.isascii():
            return self.letters(token)
        if token in NAMES or token.startswith(r"\unit"):
            return ("name", token.removeprefix(r"\unit").strip("{}"))
        if token in (r"\angle", r"\triangle"):
            return ("call", token, _in_order(self.thing(self.take())))
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
            return ("call", token, _in_order(self.argument()))
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

    def number(self, token: str) -> tuple:
        if "." not in token or self.next not in (r"\overline", r"\dot", r"\bar"):
            return ("number", Fraction(token.replace(",", "").replace(" ", "").rstrip(".")))
        self.take()
        repeated = self.take()
        if repeated == "{":
            repeated = self.take()
            self.take("}")
        whole, _, fixed = token.partition(".")
        if not (whole + fixed + repeated).isdecimal() or len(repeated) > 100:
            raise NotUnderstood(repeated)
        value = Fraction(int(whole + fixed), 10 ** len(fixed))
        return ("number", value + Fraction(int(repeated), 10 ** len(fixed) * (10 ** len(repeated) - 1)))

    def money(self, currency: str) -> tuple:
        """Parse the number after a currency: $5, $-5."""
        self.units.add(words.UNITS[currency.removeprefix("\\")])
        is_negative = self.next == "-" and bool(self.take())
        value = self.thing(self.take())
        if value[0] != "number":
            raise NotUnderstood(currency)
        return ("negative", value) if is_negative else value

    def letters(self, token: str) -> tuple:
        if token.lower() in words.NUMBERS:
            return ("spelled", Fraction(words.NUMBERS.index(token.lower())))
        if len(token) > LONGEST_PRODUCT:
            raise NotUnderstood(token)
        if len(token) == 1 or token.isupper():  # BAC is a name, which has an order
            return ("name", token)
        return ("product", *(("name", letter) for letter in token))

    def function(self, name: str) -> tuple:
        """Parse a function's exponent and subscript, then a bracket, or factors up to the next sign or function: sin^2 2x."""
        marks = []
        while self.next in ("^", "_") and not self.at_degree():
            marks.append((self.take(), self.argument()))
        is_whole = self.next == "("  # \ln(2)x is no \ln(2x), and \ln(x)^2 no \ln(x^2)
        value = self.base() if is_whole else self.factor(signs=True)
        while not is_whole and not self.at_stop() and self.next not in FUNCTIONS:
            value = self.side_by_side(value)
        if self.at_degree():
            value = self.degree(value)
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
        self.take(rf"\end{{{name}}}")
        tree = ("matrix", *(("cells", *row) for row in rows))
        return ("call", name, tree) if name in ("vmatrix", "Vmatrix") else tree


def _in_order(tree: tuple) -> tuple:
    r"""Return letters as one name: \angle ABC is not \angle CAB."""
    is_product = tree[0] == "product" and all(part[0] == "name" for part in tree[1:])
    return ("name", "".join(part[1] for part in tree[1:])) if is_product else tree


def _product(left: tuple, right: tuple) -> tuple:
    return ("product", *(left[1:] if left[0] == "product" else (left,)), right)


def _scientific(tree: tuple) -> tuple:
    r"""Return 1.5 \times 10^3 as one number; any other tree unchanged."""
    if tree[0] != "product" or len(tree) != 3 or tree[1][0] != "number" or not 1 <= tree[1][1] < 10:
        return tree
    if tree[2][:2] != ("power", ("number", Fraction(10))):
        return tree
    exponent = tree[2][2]
    sign = -1 if exponent[0] == "negative" else 1
    exponent = exponent[1] if sign < 0 else exponent
    if exponent[0] != "number" or exponent[1].denominator > 1 or exponent[1] > LARGEST_EXPONENT:
        return tree
    return ("number", tree[1][1] * Fraction(10) ** (sign * int(exponent[1])))


def _is_plain_fraction(tree: tuple) -> bool:
    return tree[0] == "quotient" and all(part[0] == "number" and part[1].denominator == 1 for part in tree[1:])


def _mixed(whole: Fraction, fraction: tuple) -> tuple:
    """Return 1 2/3 as one number. Raise NotUnderstood for 1 4/6 and 1 5/3, which are not mixed numbers."""
    above = fraction[1][1]
    below = fraction[2][1]
    if not 0 < above < below or whole.denominator != 1 or Fraction(above, below).denominator != below:
        raise NotUnderstood("not a mixed number")
    return ("number", whole + Fraction(above, below))
