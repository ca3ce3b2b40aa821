"""The form of an answer, which depends on neither spelling nor order and involves no computation; and the value of an
answer."""

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Any

ATOMS = {"i", "e", r"\pi"}
DIGITS = 500  # of precision for values
MOST = 4000  # the largest exponent that is computed
LARGEST_RADICAND = 10**9
ONE = Fraction(1)


# ------------------------------------------------------------------------------------------------------------ form


def form(tree: tuple) -> tuple:
    """Return the tree's form: the same for answers that differ only in order, decimals or fractions, or the place of a sign.

    A product or quotient becomes ("term", sign, coefficient, factors, divisors). The coefficient is a Fraction if it is one
    number in lowest terms, otherwise the numbers above and below the line."""
    kind = tree[0]
    if kind == "sum":
        return _sum(term for part in tree[1:] for term in _terms(form(part)))
    if kind in ("number", "negative", "product", "quotient"):
        return _term(tree)
    if kind == "power":
        return _power(form(tree[1]), form(tree[2]))
    return (kind, *(form(part) if isinstance(part, tuple) else part for part in tree[1:]))


def _terms(made: tuple) -> tuple[tuple, ...]:
    """Return the terms of a form that may be a sum."""
    if made[0] == "sum":
        return made[1:]
    return (made if made[0] == "term" else ("term", 1, ONE, (made,), ()),)


def _sum(terms: Iterable[tuple]) -> tuple:
    return ("sum", *sorted(terms, key=repr))


def _unsigned(made: tuple) -> tuple[int, tuple]:
    """Return the sign, and the form without it. A sum and its negation become the same sum: 1-x is -(x-1)."""
    if made[0] != "sum":
        return 1, made
    other = _sum((kind, -sign, *rest) for kind, sign, *rest in made[1:])
    return (1, made) if repr(made) <= repr(other) else (-1, other)


def _power(base: tuple, exponent: tuple) -> tuple:
    number = _whole(exponent)
    if exponent[0] == "term" and isinstance(exponent[2], Fraction) and exponent[2].denominator > 2 and not exponent[3]:
        return _fractional_power(base, exponent)
    if base[0] != "sum" or number is None or exponent[1] < 0:
        return ("power", base, exponent)
    sign, base = _unsigned(base)
    made = ("power", base, exponent)
    return ("term", -1, ONE, (made,), ()) if sign < 0 and number % 2 else made


def _fractional_power(base: tuple, exponent: tuple) -> tuple:
    r"""Return 2^{2/3} as \sqrt[3]{4}; any other power unchanged. A square root is written as a root."""
    number, power = _whole(base), exponent[1] * exponent[2]
    if number is None or not 0 < power < 1 or not 1 < number < LARGEST_RADICAND or power.denominator > 40 or exponent[4]:
        return ("power", base, exponent)
    radicand = Fraction(number**power.numerator)
    return ("root", form(("number", Fraction(power.denominator))), form(("number", radicand)))


class _Factors:
    """The parts of a product or quotient, from its tree."""

    def __init__(self, tree: tuple):
        self.sign = 1
        self.signs = 0  # the number of minus signs
        self.numbers: tuple[list[Fraction], list[Fraction]] = ([], [])  # above and below the line
        self.others: tuple[list[tuple], list[tuple]] = ([], [])
        self._add(tree, 0, _quotients(tree) == 1)
        if self.signs > 1:  # -(-5) is not written as 5
            self.others[0].append(("signs", self.signs))

    def _add(self, tree: tuple, below: int, one_line: bool) -> None:
        kind = tree[0]
        if kind == "number":
            self.numbers[below].append(tree[1])
        elif kind == "negative":
            self.sign = -self.sign
            self.signs += 1
            self._add(tree[1], below, one_line)
        elif kind == "product":
            for part in tree[1:]:
                self._add(part, below, one_line)
        elif kind == "quotient" and one_line:
            self._add(tree[1], below, one_line)
            self._add(tree[2], 1 - below, one_line)
        elif kind == "quotient":  # one of several fractions that were not multiplied out
            self.others[below].append(("quotient", form(tree[1]), form(tree[2])))
        else:
            sign, made = _unsigned(form(tree))
            if made[0] == "term" and made[2] == ONE and len(made[3]) == 1 and not made[4]:
                sign = made[1]
                made = made[3][0]
            self.sign *= sign
            self.others[below].append(made)

    def coefficient(self) -> Fraction | tuple:
        above, below = self.numbers
        if len(above) > 1 or len(below) > 1:
            return (tuple(sorted(above)), tuple(sorted(below)))
        number = above[0] if above else ONE
        if not below:
            return number
        whole = number.denominator == below[0].denominator == 1
        if whole and below[0] > 0 and math.gcd(number.numerator, below[0].numerator) == 1:
            return number / below[0]
        return (tuple(above), tuple(below))


def _quotients(tree: tuple) -> int:
    """Return the number of quotients in a product or quotient, except those inside its sums, powers and functions."""
    if tree[0] not in ("negative", "product", "quotient"):
        return 0
    return (tree[0] == "quotient") + sum(map(_quotients, tree[1:]))


def _term(tree: tuple) -> tuple:
    factors = _Factors(tree)
    coefficient = factors.coefficient()
    above, below = (tuple(sorted(others, key=repr)) for others in factors.others)
    of_one_sum = len(above) == 1 and not below and above[0][0] == "sum"
    if of_one_sum and isinstance(coefficient, Fraction) and coefficient.numerator == 1:
        shared = _shared(above[0], factors.sign * coefficient)
        if shared:
            return shared
    if (factors.sign, coefficient, len(above), below) == (1, ONE, 1, ()) and not factors.numbers[0]:
        return above[0]
    return ("term", factors.sign, coefficient, above, below)


def _shared(total: tuple, factor: Fraction) -> tuple | None:
    """Return a sum divided by a number as a sum of fractions: (x+1)/2 is x/2 + 1/2; None if it is not in lowest terms."""
    coefficients = [term[2] for term in total[1:]]
    if factor.denominator == 1 or any(not isinstance(c, Fraction) or c.denominator > 1 for c in coefficients):
        return None
    if math.gcd(factor.denominator, *(c.numerator for c in coefficients)) > 1:
        return None
    sign = 1 if factor > 0 else -1
    return _sum(("term", sign * term[1], term[2] * abs(factor), *term[3:]) for term in total[1:])


# ----------------------------------------------------------------------------------------------------------- value


def is_literal(tree: tuple) -> bool:
    """Return whether an answer is written as a number that leaves nothing to compute."""
    terms = _terms(form(tree))
    keys = set()
    for _, _, coefficient, above, below in terms:
        factors = [_irrational(factor) for factor in above]
        if below or not isinstance(coefficient, Fraction) or None in factors:
            return False
        kinds = {"root" if exponent.denominator > 1 else base for base, exponent in factors}
        key = tuple(sorted(factors, key=repr))
        if key in keys or len(kinds) < len(factors):
            return False  # two terms of a kind, or two roots in a product, have to be combined
        if len(terms) > 1 and not coefficient:
            return False
        keys.add(key)
    return True


def _irrational(made: tuple) -> tuple | None:
    r"""Return (base, exponent) of pi, e, i, a power of pi or e, or a root that cannot be simplified; None for anything else."""
    if made[0] == "name" and made[1] in ATOMS:
        return made[1], ONE
    if made[0] == "power" and made[1] in (("name", r"\pi"), ("name", "e")):
        exponent = _whole(made[2])
        return None if exponent is None or exponent in (0, 1) else (made[1][1], Fraction(exponent))
    if made[0] == "root":
        index, radicand = _whole(made[1]), _whole(made[2])
        if index and radicand and index > 1 and radicand > 1 and _split_root(radicand, index) == (1, radicand, index):
            return radicand, Fraction(1, index)
    return None


def simplified_roots(tree: tuple) -> tuple:
    r"""Return the tree with \sqrt{12} as 2\sqrt{3}. A root that is a whole number is left as it is."""
    if tree[0] == "root" and all(part[0] == "number" and part[1].denominator == 1 for part in tree[1:]):
        index, radicand = (part[1].numerator for part in tree[1:])
        outside, inside, degree = _split_root(radicand, index) or (1, 1, 1)
        if outside > 1 and inside > 1:
            root = ("root", ("number", Fraction(degree)), ("number", Fraction(inside)))
            return ("product", ("number", Fraction(outside)), root)
    return tuple(simplified_roots(part) if isinstance(part, tuple) and part else part for part in tree)


def _whole(made: tuple) -> int | None:
    """Return the form as a whole number; None if it is something else."""
    if made[0] != "term" or made[3] or made[4] or not isinstance(made[2], Fraction) or made[2].denominator > 1:
        return None
    return made[1] * made[2].numerator


@lru_cache(1024)
def _split_root(radicand: int, index: int) -> tuple[int, int, int] | None:
    """Return the (a, b, k) with the smallest b and k so that the index-th root of the radicand is a times the k-th root of b;
    None if that is too hard."""
    if not 0 < radicand <= LARGEST_RADICAND or not 1 < index <= 40:
        return None
    powers: dict[int, int] = {}
    rest = radicand
    prime = 2
    while prime**2 <= rest:
        while rest % prime == 0:
            rest //= prime
            powers[prime] = powers.get(prime, 0) + 1
        prime += 1
    if rest > 1:
        powers[rest] = powers.get(rest, 0) + 1
    outside = math.prod(p ** (n // index) for p, n in powers.items())
    inside = {p: n % index for p, n in powers.items() if n % index}
    common = math.gcd(index, *inside.values())
    return outside, math.prod(p ** (n // common) for p, n in inside.items()), index // common


def same_value(tree: tuple, other: tuple, names: bool = False) -> bool:
    """Return whether both have the same value, to about DIGITS digits, which is more than any answer has. names: names have
    values, too, so that x(x+1) and x^2+x are equal."""
    a, b = values((tree, other), names)
    return a is not None and b is not None and equal(a, b)


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal, except for their last digits."""
    import mpmath

    with mpmath.workdps(DIGITS):
        return abs(a - b) <= max(1, abs(a), abs(b)) * mpmath.mpf(10) ** (20 - DIGITS)


def values(trees: Iterable[tuple], names: bool = False) -> list[Any]:
    """Return the values of trees: None for anything that is not a number, or too hard to compute."""
    import mpmath  # a dependency of torch; late: few answers are evaluated

    found = []
    with mpmath.workdps(DIGITS):
        for tree in trees:
            try:
                found.append(_value(tree, mpmath, names))
            except (ArithmeticError, ValueError):
                found.append(None)
    return found


def _value(tree: tuple, mp, names: bool):
    """Return the value of a tree. Raise ArithmeticError or ValueError if it is not a number, or too hard to compute."""
    kind, *parts = tree
    if kind in ("number", "spelled"):
        return mp.mpf(parts[0].numerator) / parts[0].denominator
    if kind == "name" and parts[0] in ATOMS:
        return {"i": mp.j, "e": +mp.e, r"\pi": +mp.pi}[parts[0]]
    if kind == "name" and names:
        return mp.sqrt(sum(map(ord, parts[0]))) / 7
    if kind == "percent":
        return _value(parts[0], mp, names) / 100
    if kind not in ("sum", "product", "quotient", "negative", "power", "root", "factorial", "binomial"):
        raise ValueError(f"a {kind} is no number")
    its = [_value(part, mp, names) for part in parts]
    if kind in ("sum", "product"):
        return (mp.fsum if kind == "sum" else mp.fprod)(its)
    if kind == "quotient":
        return its[0] / its[1]
    if kind == "negative":
        return -its[0]
    if kind == "power":
        _check(abs(its[1]) <= MOST)
        return its[0] ** its[1]
    if kind == "root":
        index, radicand = its
        _check(mp.isint(index) and 1 < index <= 40 and (index == 2 or (mp.im(radicand) == 0 and radicand >= 0)))
        return mp.root(radicand, int(index))
    _check(all(mp.isint(x) and 0 <= x <= 1000 for x in its))
    return mp.mpf((math.factorial if kind == "factorial" else math.comb)(*map(int, its)))


def _check(is_computed: bool) -> None:
    if not is_computed:
        raise ValueError("too hard")
