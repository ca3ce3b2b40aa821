r"""The content of a \boxed{...}, and what may stand next to it.

A box is the answer if nothing touches it but the ends of formulas, a relation such as "=", punctuation, units and words. With
anything else, it is part of a formula or of a choice: \frac{1}{\boxed{12}}, \boxed{12}x, (\boxed{1}, 2), \boxed{12} or 13.
"""

import re

from math_grader import words
from math_grader.text import BOX, NotUnderstood

BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
WORD = re.compile(r"[^\s$]+")
STYLE = r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox|operatorname|[Ll]arge|LARGE|[hH]uge|displaystyle|bf)(?![A-Za-z])\s*+"
SPACE = r"(?:\s|\\[,;:! ]|\\q?quad(?![A-Za-z]))"
CJK = "\u3040-\u9fff"
CJK_MARKS = "\u3001\u3002\uff0c\uff1a\uff1b"  # comma, full stop, colon, semicolon
# Words before a box, and words or signs after it, that make it another answer
OTHER_BEFORE = (
    r"(?i:not|or|minus|negative|half|twice|double|maybe|perhaps|probably|possibly|approximately|roughly|almost|nearly"
    r"|around|than)"
)
OTHER = (
    r"(?i:(?:hundred|thousand|[mbtr]*illion|dozen|lakh|crore|squared|cubed|minus|plus)s?\b|times\s+[-$\\0-9]"
    r"|(?:or|and)[\s}]+[-$\\0-9]|no\b|(?:is\s+)?(?:not|wrong|false|incorrect)\b|isn't\b|[万萬亿億千百十倍半折分])"
)
# Units that need no \text{}: \mu \mathrm{m}, \AA, {eV}; and a unit or a noun after a stroke: / \mathrm{s}, / can
UNIT = rf"\\mu(?![A-Za-z])\s*{STYLE}|\\AA(?![A-Za-z])|\s*\{{~?(?:[A-Za-z]{{2,4}}|[{words.LETTERS}])\}}"
PER = rf"/\s*(?:{STYLE}\{{[\s~]*[A-Za-z]|(?:\{{~?|\$\s*)?[A-Za-z]{{2}})"
# What may stand before a box, apart from style and the beginnings of formulas
LEFT = (
    r"^(?:\s*[-*+•>#|]+\s|\s*[0-9]+[.)]\s)?",  # nothing, or the mark of an item
    rf"(?<![\\A-Za-z])(?!{OTHER_BEFORE}\W*$)[^\W\d_]{{2,}}|[\u2019']s|\b[aAI](?=\s)|(?![约約負负])[{CJK}]",
    r"(?<![!<>~≈≠])(?<!\\not)(?<!\\not )=|[-=]>|[=&]\s*\+|<[/\w|]+>|[→⇒∴&]",
    r"\\(?:[Rr]ightarrow|Longrightarrow|implies|iff|therefore|equiv|simeq|approx|geq?|leq?|newline|\\)(?![A-Za-z])",
    rf"[“\"—👉{words.MARKS}{CJK_MARKS}]|(?<!\\);|(?<![0-9\\])[.,]|(?<!\\)[.,](?=\s)",
    r"(?<![0-9\\])(?<![0-9]\s):|(?<=[0-9]):(?=\s)",  # Step 2: \boxed{7}, but not 2:\boxed{7}
    r"(?<![-+])(?<![-+]\s)\\\$",
    r"(?<=[A-Za-z])\)(?=\s)|(?<=[A-Za-z]\s)\(",  # a remark in prose
    r"\bor(?:\s+about)?(?=[\s$])",  # a formula, or its value in the box; see CHOICE
    r"\$\$\s+(?=\$\$)|\\in(?![A-Za-z])|(?<=[0-9)}])!=",
    rf"\\text\s*\{{(?![^{{}}]*\b{OTHER_BEFORE}\s*\}})[^{{}}]*[A-Za-z:=.,]\s*\}}",
)
BEFORE = re.compile(rf"(?:{'|'.join(LEFT)})(?:{SPACE}|{STYLE}|[${{`]|\\[(\[]|\*{{2,}}+|(?<![\w}})\]*])[*_](?!\*))*$")
# What may stand after it, apart from space, degrees and per cent
RIGHT = (
    rf"\Z|\n|(?:\$+(?![A-Za-z^_])|\\[)\]](?![\^_]))(?!{SPACE}*(?:\$|[.,]?[0-9]|(?:{STYLE}\{{\s*)?{OTHER}))",
    r"[.;](?![0-9])|[,:](?:\\?[,;! ])*(?!\s*(?:[-$0-9{]|\\(?!end|[\])])))|,\$+(?=[.\s]*(?:[A-Za-z]|$))",
    rf"[{CJK_MARKS}”\"]|</?\w+>|<\||/(?!\s*[\w\\({{$])|\\\\|&",
    rf"(?<=\s)(?!{OTHER})(?:(?:\[[0-9]+\]-)?[^\W\d_]{{2,}}|[{words.LETTERS}AI]\b)|(?!{OTHER})[{CJK}]",
    rf"(?:\\[dt]?frac\s*\{{|\[)?{STYLE}\{{[\s~]*\(?(?!{OTHER})[^\W\d_]|{PER}|{UNIT}",
    r"=|\\equiv(?![A-Za-z])",  # another form of it; see SECOND
    r"(?:[a-z]\^[0-9])+|~\\text(?![a-z])",  # of \boxed{-15}x^3 the coefficient is asked for
    rf"(?<=\s)[-\u2013\u2014]\s+(?!{OTHER})[A-Za-z]{{2}}|(?<=\s)\(\s*(?!{OTHER})[A-Za-z]{{2}}",
    r"\\(?:p?mod|end|tag|newline|square|blacksquare|qed|implies|because)(?![A-Za-z])",
)
AFTER = re.compile(
    rf"(?:{SPACE}|[}}`]|\{{\s*\}}|\\?%|°|\^\s*(?:\\circ|\{{\s*(?:\\circ|(?:\\prime\s*)+)\s*\}})|\\degree(?![A-Za-z]))*"
    rf"(?:[*_]{{1,3}}(?!\s*[0-9A-Za-z](?![A-Za-z]))[}}`\s]*)?(?:{'|'.join(RIGHT)})"
)
# 13 or \boxed{12}; \boxed{12} = 13; \boxed{ax + b = y} \text{ or } ...
CHOICE = re.compile(r"(?:^|\b(?:is|are|be|either|answers?)|:)\s*[$(\\]*-?[0-9][0-9.,/]*(?:[\s$,]|\\[)\]])*or\W*$")
SECOND = re.compile(rf"(?:{SPACE}|[$}}]|\\[)\]])*(?:=|\\equiv){SPACE}*(-?[0-9][0-9.,]*){SPACE}*(?:\$|\\[)\]]|\n|\Z|[A-Za-z])")
OR = re.compile(rf"{SPACE}*\\text\s*\{{\s*or\s*\}}")


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed or \fbox, which is in braces or one word. Boxes with only commas, "and" or "or"
    between them are one answer. Return None if there is no box, or if the last one is not closed. Raise NotUnderstood if the
    box is part of a larger formula."""
    parts: list[str] = []
    end = 0
    start = 0
    between = ""
    for mark in BOX.finditer(text):
        if mark.start() < end:
            continue  # it is inside another box
        gap = text[end : mark.start()].strip("$,; \t\r\n\f\v")
        if not parts or gap not in ("", "and", "or"):
            parts, start, between = [], mark.start(), ""
        between = gap if gap == "or" else between
        content, end = _braces(text, mark.end())
        if content is None:
            return None
        parts.append(content)
    if not parts or not all(part.strip() for part in parts):
        return None
    if not _is_alone(text, start, end, parts[-1].strip()):
        raise NotUnderstood("a box in a formula")
    return (" or " if between else ", ").join(dict.fromkeys(parts))


def _is_alone(text: str, start: int, end: int, content: str) -> bool:
    """Return whether what stands before `start` and after `end` leaves the box's content as it is."""
    line = text[text.rfind("\n", 0, start) + 1 : start]
    if not BEFORE.search(line[-200:]) or CHOICE.search(line[-200:]):
        return False
    second = SECOND.match(text, end)
    if second and content.isdecimal() and second[1].rstrip(".,") != content:
        return False
    if OR.match(text, end):  # an equation that is not solved for a name may be restated
        left, _, right = content.partition("=")
        return bool(re.search("[A-Za-z].*[-+].*[A-Za-z]", left[:200]) and re.search("[A-Za-z]", right))
    return bool(AFTER.match(text, end))


def _braces(text: str, start: int) -> tuple[str | None, int]:
    """Return the content of the braces that open at `start`, or the word there, and where it ends. The content is None if the
    braces do not close."""
    if text[start : start + 1] != "{":
        word = WORD.match(text, start)
        return (word[0].rstrip(".,;:"), word.end()) if word else (None, start)
    depth = 0
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return None, len(text)
