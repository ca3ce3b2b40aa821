r"""The comparison of answers: they agree if they have the same form, or are the same number and the answer is a literal.

The policy is rewarded for computing, so the grader computes nothing for it. An answer agrees with the ground truth if
 - both have the same form: the same operations on the same things. Sums, products and sets have no order; 0.5x, x/2 and
   \frac{1}{2}x are the same form; the sign of a fraction may be above the line, below it or before it; or
 - the answer is a literal that has the value of the ground truth, which is evaluated. Literals are numbers, fractions in lowest
   terms, multiples of pi, e, i and of roots without square factors, and sums of different literals, such as 2+\sqrt{3}.
So \frac{2}{4}, \sqrt{12}, 2+3, 2^3, \binom{4}{2} and (x+1)^2 are right only if the ground truth has that form.

Names count: x = 1, y = 2 is not x = 2, y = 1. The sides of a chain such as m+n = 20+5 = 25 have to be equal.
"""

import itertools
from fractions import Fraction

from math_grader.form import equal, form, is_literal, same_value, simplified_roots, values
from math_grader.text import NotUnderstood
from math_grader.tree import FUNCTIONS, MARKS

MANY = 32  # elements of a list, set or union
TURNED = {">": "<", r"\ge": r"\le"}
NAMING = {*FUNCTIONS, *MARKS, r"\angle", r"\triangle", "()"} - {r"\ln", r"\log", r"\exp"}  # sin x = 0.5, but not ln x = 2
COMPOUND = {"row", "matrix", "cells", "sets", "within"}


def agree(answer: tuple, truth: tuple, any_root: bool = False) -> bool:
    r"""Return whether the trees of two answers agree. Raise NotUnderstood if the answer contradicts itself, or names values
    that cannot be assigned. any_root: accept a root of a whole number with square factors, unless the root is whole."""
    ways = [answer, simplified_roots(answer)] if any_root else [answer]
    return any(_agree(_spread(way), _spread(truth)) for way in ways)


# ---------------------------------------------------------------------------------------------- one shape for each thing


def _spread(tree: tuple) -> tuple:
    """Return the tree with plus-minus as two answers, a set as a list of answers, and inequalities as intervals."""
    if tree[0] == "relation" and tree[1] == (r"\in",):
        inner = _spread(tree[3])
        if tree[3][0] in ("number", "negative", "quotient"):
            raise NotUnderstood("a number is no set")
        return ("within", tree[2], inner) if inner[0] in ("row", "sets") else _labelled(tree[2], inner)
    if tree[0] == "relation" and tree[1] == ("=",) and _is_row_of_names(tree[2]) and tree[3][0] == "row":
        return tree
    items = tree[1:] if tree[0] in ("list", "set", "or") else (tree,)
    answers = [_interval(way) for item in items for way in dict.fromkeys((_with_sign(item, False), _with_sign(item, True)))]
    if tree[0] in ("list", "or"):
        return (tree[0], *answers)
    return ("list", *answers) if len(answers) > 1 else answers[0]


def _labelled(label: tuple, inner: tuple) -> tuple:
    if inner[0] == "list":
        return ("list", *(("relation", ("=",), label, item) for item in inner[1:]))
    return ("relation", ("=",), label, inner)


def _with_sign(tree: tuple, minus: bool) -> tuple:
    """Return the tree with minus or plus for plus-minus."""
    if tree[0] == "either":
        inner = _with_sign(tree[1], minus)
        return ("negative", inner) if minus else inner
    return tuple(_with_sign(part, minus) if isinstance(part, tuple) and part else part for part in tree)


def _interval(tree: tuple) -> tuple:
    r"""Return 3 < x as ("within", x, (3, \infty)) and 0 \le x < 1 as ("within", x, [0, 1)); anything else unchanged."""
    if tree[0] != "relation":
        return tree
    signs, sides = tree[1], tree[2:]
    if set(signs) <= TURNED.keys():  # put the smallest on the left
        signs = tuple(TURNED[sign] for sign in reversed(signs))
        sides = sides[::-1]
    if not set(signs) <= {*TURNED.values()}:
        return tree
    infinity = ("name", r"\infty")
    if len(sides) == 2 and sides[0][0] == "name":
        signs, sides = ("<", *signs), (("negative", infinity), *sides)
    elif len(sides) == 2 and sides[1][0] == "name":
        signs, sides = (*signs, "<"), (*sides, infinity)
    if len(sides) != 3 or sides[1][0] != "name" or sides[1] == infinity:
        return tree
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return ("within", sides[1], ("row", brackets, sides[0], sides[2]))


# ------------------------------------------------------------------------------------------------------------ comparison


def _agree(answer: tuple, truth: tuple) -> bool:
    if truth[0] == "about":
        return _agree(answer[1] if answer[0] == "about" else answer, truth[1])
    if truth[0] in ("list", "or"):
        return _same_list(answer, truth)
    if truth[0] == "relation":
        return _same_relation(answer, truth)
    if answer[0] == "list":
        answer = _derived(answer)
    if answer[0] == "relation":
        answer = _stated(answer, truth)
    if answer[0] == "about":
        return truth[0] == "number" and truth[1].denominator > 1 and answer[1] == truth
    if answer[0] == "or":
        return _same_choice(answer, truth)
    if "within" in (answer[0], truth[0]):
        return _same_domain(answer, truth)
    if not {answer[0], truth[0]} & COMPOUND:
        return _same_quantity(answer, truth)
    if answer[0] != truth[0] or any(a[0] == "relation" != b[0] for a, b in zip(answer[1:], truth[1:], strict=False)):
        return False
    if truth[0] in ("matrix", "cells"):
        return _in_turn(answer[1:], truth[1:])
    has_order = truth[0] == "row" or truth[1] == r"\setminus"
    return answer[1] == truth[1] and (_in_turn if has_order else _paired)(answer[2:], truth[2:])


def _same_quantity(answer: tuple, truth: tuple) -> bool:
    """Compare two expressions. A per cent sign may be missing on either side, and 10% is 0.1; but 0.5% is not 0.5."""
    (answer, a), (truth, b) = _without_percent(answer), _without_percent(truth)
    if _same(answer, truth):
        return not a or b or not _is_below_one(truth)
    return a != b and _same(*((_hundredth(answer), truth) if a else (answer, _hundredth(truth))))


def _same(answer: tuple, truth: tuple) -> bool:
    return form(answer) == form(truth) or (is_literal(answer) and same_value(answer, truth))


def _without_percent(tree: tuple) -> tuple[tuple, bool]:
    if tree[0] == "negative" and tree[1][0] == "percent":
        return ("negative", tree[1][1]), True
    return (tree[1], True) if tree[0] == "percent" else (tree, False)


def _is_below_one(tree: tuple) -> bool:
    value = values((tree,))[0]
    return value is not None and 0 < abs(value) < 1


def _hundredth(tree: tuple) -> tuple:
    if tree[0] == "negative":
        return ("negative", _hundredth(tree[1]))
    return ("number", tree[1] / 100) if tree[0] == "number" else ("quotient", tree, ("number", Fraction(100)))


def _same_choice(answer: tuple, truth: tuple) -> bool:
    r"""Compare "\frac12 or 0.5" with one value: two spellings are no choice."""
    if truth[:2] == ("sets", r"\cup"):  # x < 1 or x > 2
        names = {part[1] for part in answer[1:] if part[0] == "within"}
        rows = [part[2] if part[0] == "within" else part for part in answer[1:]]
        return len(names) <= 1 and _agree(("sets", r"\cup", *rows), truth)
    if len(set(answer)) < len(answer) or len({item[2] for item in answer[1:] if item[0] == "relation"}) > 1:
        return False
    return all(_agree(item, truth) for item in answer[1:])


def _same_domain(answer: tuple, truth: tuple) -> bool:
    """Compare x > 3 with (3, infinity): the name may be missing on one side."""
    names = [tree[1] for tree in (answer, truth) if tree[0] == "within"]
    inner = [tree[2] if tree[0] == "within" else tree for tree in (answer, truth)]
    if len(names) == 2 and names[0] != names[1]:
        return False
    return inner[0][0] in ("row", "sets") and _agree(*inner)


def _same_list(answer: tuple, truth: tuple) -> bool:
    """Compare several values, in any order. Names of the values have to be the same on both sides; x = 1, x = 2 and x = 1, 2
    are 1, 2."""
    answer, truth = _assignments(answer), _assignments(truth)
    if answer[0] not in ("list", "or"):
        return False
    items, expected = answer[1:], truth[1:]
    named, wanted = _names(items), _names(expected)
    if len(wanted) <= 1:  # the values of one name
        if len(named) > 1 or (named != wanted and None not in named | wanted):
            raise NotUnderstood("values of different names")
        items, expected = [_value(item) for item in items], [_value(item) for item in expected]
    elif named != wanted:
        raise NotUnderstood("values without their names")
    return _paired(tuple(items), tuple(expected))


def _assignments(tree: tuple) -> tuple:
    """Return (x, y) = (1, 2) as x = 1, y = 2; anything else unchanged."""
    if tree[0] == "relation" and tree[1] == ("=",) and _is_row_of_names(tree[2]) and tree[3][0] == "row":
        names, its = tree[2][2:], tree[3][2:]
        if len(names) == len(its):
            return ("list", *(("relation", ("=",), *pair) for pair in zip(names, its, strict=True)))
    return tree


def _names(items: tuple) -> set:
    """Return the names of values like x = 1 and x_2 = 3, without their numbers; None for a value without a name."""
    found = {item[2] if _is_assignment(item) else None for item in items}
    bases = {name[1] if name and name[0] == "subscript" else name for name in found}
    if len(bases) == 1 or (len(bases) == 2 and None in bases and _is_assignment(items[0])):  # x_1 = 1, x_2 = 2; x = 1, 2
        return bases - ({None} if len(bases) == 2 else set())
    return found


def _is_assignment(tree: tuple) -> bool:
    return tree[0] == "relation" and set(tree[1]) == {"="} and _is_label(tree[2])


def _value(tree: tuple) -> tuple:
    return _stated(tree, None) if _is_assignment(tree) else tree


def _same_relation(answer: tuple, truth: tuple) -> bool:
    if answer[0] == "list" and _is_row_of_names(truth[2]):
        return _same_list(answer, _assignments(truth))
    named = truth[1] == ("=",) and _is_label(truth[2])
    if answer[0] == "list" and named:
        answer = _derived(answer)
    if answer[0] != "relation":
        return named and truth[2][0] != "row" and _agree(answer, truth[3])
    if named and set(answer[1]) == {"="} and _is_label(answer[2]):
        if form(answer[2]) != form(truth[2]):
            return _is_row_of_names(truth[2]) and _same_list(_assignments(answer), _assignments(truth))
        return _agree(_stated(answer, truth), truth[3])
    if answer[1] != truth[1] or len(answer) != len(truth):
        return False
    sides = answer[2:], truth[2:]
    return _paired(*sides) if set(truth[1]) <= {"=", r"\ne"} else _in_turn(*sides)


def _in_turn(answers: tuple, truths: tuple) -> bool:
    return len(answers) == len(truths) and all(_agree(a, b) for a, b in zip(answers, truths, strict=True))


def _paired(answers: tuple, truths: tuple) -> bool:
    """Return whether each item agrees with an item of its own on the other side."""
    if len(answers) != len(truths) or len(answers) > MANY:
        return answers == truths
    left = list(truths)
    for answer in answers:
        found = next((i for i, truth in enumerate(left) if _agree(answer, truth)), None)
        if found is None:
            return False
        del left[found]
    return True


# ------------------------------------------------------------------------------------------- what an equation states


def explains(reason: tuple, answer: tuple) -> bool:
    """Return whether a calculation such as 9*2 or 9*2 = 18 has the value of the answer."""
    return reason[0] != "number" and same_value(_stated(reason, None) if reason[0] == "relation" else reason, answer)


def _stated(tree: tuple, truth: tuple | None) -> tuple:
    r"""Return the value that x = 5, m+n = 20+5 = 25 or x = 2\sqrt{3} \approx 3.46 states. Raise NotUnderstood if a side is not
    equal to it, or the equation names no value."""
    signs, sides = tree[1], list(tree[2:])
    about = None
    if signs[-1] == r"\approx":
        about = sides.pop()
        signs = signs[:-1]
    if set(signs) - {"="}:
        raise NotUnderstood("a relation is no value")
    value = sides[-1]
    if len(sides) > 1 and _is_label(sides[0]):
        _check_label(sides[0], sides[1:])
        del sides[0]
    if len(sides) > 1:
        result, *others = values(sides[::-1], names=True)
        if result is None or any(other is None or not equal(result, other) for other in others):
            raise NotUnderstood("sides that are not equal")
    if about is None:
        return value
    if len(tree) == 4 and _is_label(tree[2]):  # x \approx 3.14
        return ("about", about)
    _check_rounding(value, about)
    return ("about", about) if truth is not None and truth == about else value


def _check_label(label: tuple, others: list[tuple]) -> None:
    """Raise NotUnderstood for an equation for a name instead of its value: x = 2x+3. Values in a row need an order of names."""
    inside = set().union(*map(_letters, others))
    if label[0] not in ("call", "label") and inside & _letters(label):
        raise NotUnderstood("an equation")
    if label[:2] == ("call", "()") and label[3][0] == "name" and inside and label[3][1] not in inside:
        raise NotUnderstood("a function of another name")
    if label[0] == "row" and others[-1][0] != "row":
        raise NotUnderstood("one value of several names")
    if label[0] == "row" and list(label[2:]) != sorted(label[2:], key=lambda name: (name[1].startswith("\\"), name[1])):
        raise NotUnderstood("names in another order")


def _check_rounding(value: tuple, about: tuple) -> None:
    r"""Raise NotUnderstood unless about is a rounding of the value, which is not a decimal: 2\sqrt{3} \approx 3.46."""
    exact, rounded = values((value, about))
    places = next((n for n in range(1, 13) if about[0] == "number" and (about[1] * 10**n).denominator == 1), None)
    if exact is None or rounded is None or places is None or about[1].denominator == 1 or value[0] == "number":
        raise NotUnderstood("no rounding")
    if abs(exact - rounded) * 2 * 10**places > 1:
        raise NotUnderstood("another value")


def _derived(tree: tuple) -> tuple:
    """Return the last of m = 20, n = 5, m+n = 25, which follows from the others. Raise NotUnderstood if it does not."""
    *given, last = tree[1:]
    if not all(_is_assignment(item) and item[2][0] == "name" and len(item) == 4 for item in given) or not _is_assignment(last):
        raise NotUnderstood("several values")
    known = {item[2]: item[3] for item in given}
    if len(known) < len(given) or {("name", letter) for letter in _letters(last[2])} != known.keys():
        raise NotUnderstood("several values")
    if not same_value(_replaced(last[2], known), last[-1]):
        raise NotUnderstood("values that do not follow")
    return last


def _replaced(tree: tuple, known: dict[tuple, tuple]) -> tuple:
    if tree in known:
        return known[tree]
    return tuple(_replaced(part, known) if isinstance(part, tuple) else part for part in tree)


def _letters(tree: tuple) -> set[str]:
    """Return the names in a tree."""
    if tree[0] == "name":
        return {tree[1]}
    return set().union(*(_letters(part) for part in tree if isinstance(part, tuple) and part), set())


def _is_label(tree: tuple) -> bool:
    r"""Return whether it names a value: y, a_1, AB, f(x), f(3), m\angle A, |z|, m+n, \frac{m}{n}, (x, y), the area. 2x, x^2 and
    x+1 do not: the value of x follows from that of these."""
    kind = tree[0]
    if kind in ("name", "label"):
        return True
    if kind in ("subscript", "prime"):
        return _is_label(tree[1])
    if kind == "call":
        return tree[1] in NAMING and bool(_letters(tree))
    if kind == "row":
        return _is_row_of_names(tree)
    if kind == "product":
        return _is_product_label(tree[1:])
    if kind in ("sum", "quotient"):
        return all(_is_label(part[1] if part[0] == "negative" and i else part) for i, part in enumerate(tree[1:]))
    return False


def _is_product_label(parts: tuple) -> bool:
    r"""Return whether letters in a row name a value: AB, xy, m\angle A. Other letters may be a word: "no"."""
    letters = [part[1] for part in parts if part[0] == "name"]
    if len(letters) < len(parts):
        return len(letters) <= 1 and all(part[0] == "call" and _is_label(part) for part in parts if part[0] != "name")
    word = "".join(letters)
    return word.isupper() or ("o" not in word and all(ord(b) - ord(a) == 1 for a, b in itertools.pairwise(word)))


def _is_row_of_names(tree: tuple) -> bool:
    return (
        tree[0] == "row" and tree[1] == "()" and len(set(tree[2:])) == len(tree[2:]) and all(x[0] == "name" for x in tree[2:])
    )
