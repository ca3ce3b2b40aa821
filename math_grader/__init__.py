r"""A grader of mathematical answers, which imports nothing of the rest of this project. In a notebook:

    from math_grader import boxed, same

    same(boxed(r"so it is $\boxed{\dfrac12}$."), "0.5")  # True; False if it is wrong, None if that cannot be decided

graders.py scores responses. box.py and answers.py find an answer, and answers.py compares it. text.py, words.py, tree.py and
sentence.py parse it, form.py and compare.py compare trees.
"""

from math_grader.answers import answer_line, hash_line, last_number, same
from math_grader.box import boxed
from math_grader.text import NotUnderstood

__all__ = ["NotUnderstood", "answer_line", "boxed", "hash_line", "last_number", "same"]
