r"""The content of a \boxed{...}, and what may stand next to it.

A box is the answer if nothing touches it but the ends of formulas, a relation such as "=", punctuation, units and words. With
anything else, it is part of a formula or of a choice: \frac{1}{\boxed{12}}, \boxed{12}x, (\boxed{1}, 2), \boxed{12} or 13.
"""

import re

from math_grader import words
from math_grader.text import BOX, NotUnderstood

BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
WORD = re.compile(r"[^\s$]+")
STYLE = r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox|[Ll]arge|LARGE|[hH]uge|displaystyle|bf|centering)(?![A-Za-z])\s*+"
SPACE = r"(?:\s|\\[,;:! ]|\\q?quad(?![A-Za-z]))"
CJK = "\u3040-\u9fff"
CJK_MARKS = "\u3001\u3002\uff0c\uff1a\uff1b"  # comma, full stop, colon, semicolon
OTHER_BEFORE = (  # words before a box that make it another answer
    r"(?i:not|or|minus|negative|half|twice|double|maybe|perhaps|probably|possibly|about|approximately|roughly|almost|nearly"
    r"|around|least|most|than)"
)
OTHER = (  # and words after it
    r"(?i:(?:hundred|thousand|[mbtr]*illion|dozen|lakh|crore|squared|cubed|minus|plus|times)s?\b|(?:or|and)[\s}]+[-$\\0-9]|no\b"
    r"|(?:is\s+)?(?:not|wrong|false|incorrect)\b|isn't\b|[万萬亿億千百十倍半折分])"
)
LEFT = (
    r"^(?:\s*[-*+•>#|]+\s|\s*[0-9]+[.)]\s)?",  # nothing, or the mark of an item
    rf"(?<![\\A-Za-z])(?!{OTHER_BEFORE}\W*$)[^\W\d_]{{2,}}|[\u2019']s|\b[aAI](?=\s)|(?![约約負负])[{CJK}]",
    r"(?<![!<>~≈≠])(?<!\\not)(?<!\\not )=|[-=]>|<[/\w|]+>|[→⇒∴&]",
    r"\\(?:[Rr]ightarrow|Longrightarrow|implies|iff|therefore|equiv|newline|\\)(?![A-Za-z])",
    rf"[“\"—👉{words.MARKS}{CJK_MARKS}]|(?<!\\);|(?<![0-9\\])[.,]|(?<!\\)[.,](?=\s)",
    r"(?<![0-9\\])(?<![0-9]\s):|(?<=[0-9]):(?=\s)",  # Step 2: \boxed{7}, but not 2:\boxed{7}
    r"(?<![-+])(?<![-+]\s)\\\$",
    rf"\\text\s*\{{(?![^{{}}]*\b{OTHER_BEFORE}\s*\}})[^{{}}]*[A-Za-z:=.,]\s*\}}",
)
BEFORE = re.compile(rf"(?:{'|'.join(LEFT)})(?:{SPACE}|{STYLE}|[${{`]|\\[(\[]|\*{{2,}}+|(?<![\w}})\]*])[*_](?!\*))*$")
RIGHT = (
    rf"\Z|\n|(?:\$+|\\[)\]])(?![A-Za-z^_])(?!{SPACE}*(?:\$|[.,]?[0-9]|(?:{STYLE}\{{\s*)?{OTHER}))",
    rf"[.;](?![0-9])|[,:](?!\s*(?:[-$0-9{{]|\\(?![\])])))|[{CJK_MARKS}”\"]|</?\w+>|<\||/(?!\s*[\w\\({{$])|\\\\|&",
    rf"(?<=\s)(?!{OTHER})(?:[^\W\d_]{{2,}}|[{words.LETTERS}AI]\b)|(?!{OTHER})[{CJK}]",
    rf"{STYLE}\{{\s*\(?(?!{OTHER})[^\W\d_]|(?<=\s)[-\u2013\u2014]\s+(?!{OTHER})[A-Za-z]{{2}}|(?<=\s)\(\s*(?!{OTHER})[A-Za-z]{{2}}",
    r"\\(?:p?mod|end|tag|newline|square|blacksquare|qed|implies|because)(?![A-Za-z])",
)
AFTER = re.compile(
    rf"(?:{SPACE}|[}}`]|\\?%|°|\^\s*(?:\\circ|\{{\s*\\circ\s*\}})|\\degree(?![A-Za-z]))*"
    rf"(?:[*_]{{1,3}}(?!\s*[0-9A-Za-z](?![A-Za-z]))[}}`\s]*)?(?:{'|'.join(RIGHT)})"
)


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
    line = text[text.rfind("\n", 0, start) + 1 : start]
    if not BEFORE.search(line[-200:]) or not AFTER.match(text, end):
        raise NotUnderstood("a box in a formula")
    return (" or " if between else ", ").join(dict.fromkeys(parts))


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
