r"""The comparison of answers: they agree if they have the same form, or are the same number and the answer is a literal.

The policy is rewarded for computing, so the grader computes nothing for it. An answer agrees with the ground truth if
 - both have the same form: the same operations on the same things. Sums, products and sets have no order; 0.5x, x/2 and
   \frac{1}{2}x are the same form; the sign of a fraction may be above the line, below it or before it; or
 - the answer is a literal that has the value of the ground truth, which is evaluated. Literals are numbers, fractions in lowest
   terms, multiples of pi, e, i and of roots without square factors, and sums of different literals, such as 2+\sqrt{3}.
So \frac{2}{4}, \sqrt{12}, 2+3, 2^3, \binom{4}{2} and (x+1)^2 are right only if the ground truth has that form.
"""

from rl.rewards.answer_form import form, is_literal, same_value, simplified_roots
from rl.rewards.answer_tree import NotUnderstood, parse

MANY = 32  # elements of a list, set or union
TURNED = {">": "<", r"\ge": r"\le"}


def agree(answer: str, truth: str, any_root: bool = False) -> bool:
    r"""Return whether two answers in the notation of rl/rewards/answers.canonical agree; False if one cannot be parsed.
    any_root: accept a root of a whole number with square factors, unless the root is a whole number."""
    try:
        tree = parse(answer)
        ways = [tree, simplified_roots(tree)] if any_root else [tree]
        return any(_agree(_spread(way), _spread(parse(truth))) for way in ways)
    except NotUnderstood:
        return False


def _spread(tree: tuple) -> tuple:
    """Return the tree with plus-minus as two answers, a set as a list of answers, and inequalities as intervals."""
    if tree[0] == "relation" and tree[1] == (r"\in",):
        return _spread(tree[3])
    items = tree[1:] if tree[0] in ("list", "set") else (tree,)
    answers = [_interval(way) for item in items for way in dict.fromkeys((_with_sign(item, False), _with_sign(item, True)))]
    return ("list", *answers) if tree[0] == "list" or len(answers) > 1 else answers[0]


def _with_sign(tree: tuple, minus: bool) -> tuple:
    """Return the tree with minus or plus for plus-minus."""
    if tree[0] == "either":
        inner = _with_sign(tree[1], minus)
        return ("negative", inner) if minus else inner
    return tuple(_with_sign(part, minus) if isinstance(part, tuple) and part else part for part in tree)


def _interval(tree: tuple) -> tuple:
    r"""Return 3 < x as (3, \infty) and 0 \le x < 1 as [0, 1); anything else unchanged."""
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
    return ("row", brackets, sides[0], sides[2])


def _agree(answer: tuple, truth: tuple) -> bool:
    if truth[0] == "relation":
        return _same_relation(answer, truth)
    if answer[0] == "relation" and set(answer[1]) == {"="}:
        answer = answer[-1]  # x = 5, or the end of a chain
    if truth[0] == "list":
        return answer[0] == "list" and _paired(answer[1:], truth[1:])
    if answer[0] == "list" and truth[:2] == ("sets", r"\cup"):
        answer = ("sets", r"\cup", *answer[1:])  # x < 1 or x > 2
    if answer[0] == "list":  # a single answer in several spellings
        return all(_agree(item, truth) for item in answer[1:])
    if not {answer[0], truth[0]} & {"row", "matrix", "cells", "sets"}:
        return form(answer) == form(truth) or (is_literal(answer) and same_value(answer, truth))
    if answer[0] != truth[0]:
        return False
    if truth[0] in ("matrix", "cells"):
        return _in_turn(answer[1:], truth[1:])
    has_order = truth[0] == "row" or truth[1] == r"\setminus"
    return answer[1] == truth[1] and (_in_turn if has_order else _paired)(answer[2:], truth[2:])


def _same_relation(answer: tuple, truth: tuple) -> bool:
    named = truth[1] == ("=",) and _is_left_side(truth[2])
    if answer[0] != "relation":
        return named and _agree(answer, truth[3])
    if answer[1] != truth[1] or len(answer) != len(truth):
        return False
    if named and _is_left_side(answer[2]) and _agree(answer[3], truth[3]):
        return True
    sides = answer[2:], truth[2:]
    return _paired(*sides) if set(truth[1]) <= {"=", r"\ne"} else _in_turn(*sides)


def _is_left_side(tree: tuple) -> bool:
    """Return whether it is a left-hand side like y, a_1 or f(x), which an answer may omit or name differently."""
    if tree[0] == "subscript":
        return _is_left_side(tree[1])
    return tree[0] == "name" or (tree[0] == "product" and all(part[0] == "name" for part in tree[1:]) and len(tree) == 3)


def _in_turn(answers: tuple, truths: tuple) -> bool:
    return len(answers) == len(truths) and all(_agree(a, b) for a, b in zip(answers, truths, strict=True))


def _paired(answers: tuple, truths: tuple) -> bool:
    """Return whether each item agrees with an item of the other side, in any order; a repeated answer counts once."""
    if max(len(answers), len(truths)) > MANY:
        return answers == truths
    return all(any(_agree(a, b) for b in truths) for a in answers) and all(any(_agree(a, b) for a in answers) for b in truths)
