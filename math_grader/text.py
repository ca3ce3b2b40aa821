r"""The text of an answer as tokens: LaTeX with one spelling for each thing.

Only what carries no meaning is left out: spaces, sizes of brackets, delimiters of formulas, markdown around the whole answer,
punctuation after it, end tokens, zero-width characters. A character that is not understood is a token that no parser accepts.
"""

import re
import unicodedata

from math_grader import words

LONGEST = 400  # characters of an answer; MATH's longest ground truth has about 160
LONGEST_TRUTH = 4000  # characters
BOX = re.compile(r"\\[bf]?box(?:ed)?(?![A-Za-z])\s*")
DOLLAR = r"(?<!\\)\$"
CURRENCIES = {"£", "€", "¥", "₹", r"\$"}
SIGNS = {  # typeset characters, by their Unicode names, as LaTeX
    "-": "MINUS SIGN, EN DASH, EM DASH, HYPHEN, NON-BREAKING HYPHEN, SMALL HYPHEN-MINUS",
    **{f"\\{name} ": f"GREEK SMALL LETTER {name.upper()}" for name in ("pi", "theta", "alpha", "beta", "phi")},
    r"\lambda ": "GREEK SMALL LETTER LAMDA",
    r"\infty ": "INFINITY",
    r"\times ": "MULTIPLICATION SIGN",
    r"\cdot ": "DOT OPERATOR, MIDDLE DOT",
    "/": "DIVISION SIGN, FRACTION SLASH",
    r"\pm ": "PLUS-MINUS SIGN",
    r"^\circ ": "DEGREE SIGN",
    r"^\circ C": "DEGREE CELSIUS",
    r"^\circ F": "DEGREE FAHRENHEIT",
    r"\le ": "LESS-THAN OR EQUAL TO",
    r"\ge ": "GREATER-THAN OR EQUAL TO",
    r"\ne ": "NOT EQUAL TO",
    r"\approx ": "ALMOST EQUAL TO",
    r"\cup ": "UNION",
    r"\cap ": "INTERSECTION",
    r"\in ": "ELEMENT OF",
    r"\emptyset ": "EMPTY SET",
    r"\angle ": "ANGLE",
    r"\,": "THIN SPACE, NARROW NO-BREAK SPACE, NO-BREAK SPACE",
    ".": "IDEOGRAPHIC FULL STOP",
    "": "ZERO WIDTH SPACE, ZERO WIDTH NON-JOINER, ZERO WIDTH JOINER, WORD JOINER, ZERO WIDTH NO-BREAK SPACE",
    " ": "VARIATION SELECTOR-16",
}
LATEX = {unicodedata.lookup(name): latex for latex, names in SIGNS.items() for name in names.split(", ")}
LATEX |= dict.fromkeys(words.MARKS, " ")
SUPER = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ"
SUB = "₀₁₂₃₄₅₆₇₈₉₋₊ₙ"
SAME_SHAPE = ("<wide>", "<narrow>", "<font>", "<noBreak>")  # decompositions that change nothing but the look
SPELLINGS = {r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne", r"\lvert": "|", r"\rvert": "|", r"\div": "/", r"\lbrace": r"\{"}
SPELLINGS |= {r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\leqslant": r"\le", r"\geqslant": r"\ge", r"\vert": "|"}
SPELLINGS |= {r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\varnothing": r"\emptyset", r"\%": "%"}
SPELLINGS |= {r"\mid": "|", r"\lt": "<", r"\gt": ">", r"\percent": "%"}
SIZES = r"\\(?:left|right|displaystyle|textstyle|mathstrut|big[lr]?|Big[lr]?|limits)(?![A-Za-z])"
END_TOKENS = r"(?:\s*(?:<\|[a-z_]+\|>|</?(?:s|answer|think|eos|end|solution|final_answer)>))+\s*$"
GROUP = re.compile(r"\\(?:text(?:bf|it|rm|sf|normal|tt)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname|rm|bf)\s*\{([^{}]*)\}")
ROMAN = re.compile(r"\\(?:text|mathrm|mbox|hbox|textrm|rm|textnormal)\s*\{")
LETTER = rf"(?<![A-Za-z\\{{])([{words.LETTERS}])(?![A-Za-z0-9_(}}])"  # a unit of one letter
GROUPED = (  # 1,234 and 1 234, but not 1 234/567
    r"(?<![0-9.,])(?<![0-9] )[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+(?![0-9]|,[0-9])|(?: [0-9]{3})+(?![0-9]| ?[/0-9]| ?\\[dtc]?frac))"
    r"(?:\.[0-9]*)?"
)
POWER_OF_TEN = r"(?<![A-Za-z0-9.\\])(?:[0-9]+(?:\.[0-9]+)?)[eE][+-]?[0-9]{1,3}(?![A-Za-z0-9.])"
TOKEN = re.compile(
    rf"\\unit\{{[A-Za-z]\}}|\\begin\{{\w+\}}|\\end\{{\w+\}}|\\[A-Za-z]+|\\.|{POWER_OF_TEN}|{GROUPED}"
    r"|[0-9]+\.?[0-9]*|\.[0-9]+|[^\W\d_]+|\S",
    re.DOTALL,
)


class NotUnderstood(ValueError):
    """A text that is not an answer in a notation that this grader knows completely."""


def normalized(answer: str, longest: int = LONGEST, prose: bool = False) -> str:
    """Return the answer in LaTeX without decoration. Raise NotUnderstood if it is too long or a value is only about right.
    prose: m, g and other letters after a number are units, as outside formulas."""
    if len(answer) > longest:
        raise NotUnderstood("too long")
    text = answer if answer.isascii() else _without_unicode(answer)
    text = BOX.sub("", re.sub(END_TOKENS, "", text.strip()))
    if re.search(r"(?:^|[^\w\s}:.])\s*~\s*[\d.$\\]", text):
        raise NotUnderstood("~5 is about 5")
    if len(re.findall(DOLLAR, text)) == 1:  # a currency: formulas have two
        text = re.sub(rf"{DOLLAR}(?=\s*-?[0-9.])", r"\\$", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|,\s*\\!\s*)(?=\d{3})", ",", text)
    text = re.sub(rf"(?<!\\)\\[!,;: ]|(?<=\S)~(?=\S)|(?<!\\)\\q?quad(?![A-Za-z])|{DOLLAR}|\\[()]|(?<!\\)\\[\[\]]", " ", text)
    text = re.sub(SIZES, " ", text)
    text = re.sub(r"\\(?:blacksquare|square|checkmark|qed)\s*$", "", text)
    text = re.sub(r"(?:\^\s*)?\\(?:text)?degrees?(?![A-Za-z])", r"^\\circ ", text)
    text = re.sub(r"(?<=[A-Za-z ])!=", r"\\ne ", text).replace("<=", r"\le ").replace(">=", r"\ge ")
    if "{" in text:
        text = _without_groups(text)
    if prose:
        text = re.sub(r"(?<=[a-z]{3})!$", "", text)  # 18 eggs! is no factorial, while 18! may be one
        text = re.sub(rf"(?<=\d)(?=[{words.LETTERS}](?![A-Za-z]))", " ", text)
        text = re.sub(rf"(?<=[\d/]) ?{LETTER}", r" \\unit{\1} ", text)
    return _bare(re.sub(r"\bper cent\b|\bpercent\b", " % ", text))


def tokens(text: str) -> list[str]:
    """Return the tokens of a normalized text. Between brackets, a comma separates: (1,234) has two parts."""
    found: list[str] = []
    depth = 0
    for token in TOKEN.findall(text):
        token = SPELLINGS.get(token, token)
        if token in ("(", "[", r"\{"):
            depth += 1
        elif token in (")", "]", r"\}"):
            depth -= 1
        if depth and "," in token and len(token) > 1:
            found += re.findall("[^,]+|,", token)
        elif token.isalpha() and token.lower() in words.RELATION_WORDS:
            found.append("=")
        else:
            found.append(token)
    return found


def _without_unicode(text: str) -> str:
    """Return the text with typeset characters as LaTeX."""
    text = re.sub(
        f"[{SUPER}]+", lambda run: "^{" + unicodedata.normalize("NFKC", run[0]).replace("\N{MINUS SIGN}", "-") + "}", text
    )
    text = re.sub(
        f"[{SUB}]+", lambda run: "_{" + unicodedata.normalize("NFKC", run[0]).replace("\N{MINUS SIGN}", "-") + "}", text
    )
    text = re.sub(r"√\s*(?:\(([^()]*)\)|(\d+|[a-z]))", lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)
    return "".join(map(latex, text))


def latex(character: str) -> str:
    """Return a typeset character as LaTeX; itself if it is not known."""
    if character in LATEX:
        return LATEX[character]
    kind = unicodedata.decomposition(character).partition(" ")[0]
    if kind == "<fraction>":
        above, slash, below = unicodedata.normalize("NFKC", character).partition("\N{FRACTION SLASH}")
        return rf"\frac{{{above}}}{{{below}}}" if slash and below else character
    if kind in SAME_SHAPE:
        plain = unicodedata.normalize("NFKC", character)
        return LATEX.get(plain, plain)
    return " " if character.isspace() and character != "\n" else character


def _without_groups(text: str) -> str:
    r"""Return the text without \text{...} and similar commands. Their content stays; a letter that is a unit is \unit{m}."""
    before = None
    while text != before:  # the innermost first
        before = text
        text = GROUP.sub(_content, text)
    return text


def _content(group: re.Match) -> str:
    content = group[1]
    if ROMAN.match(group[0]) and not re.search(r"\d", re.sub(r"\^\s*[23]", "", content)):
        content = re.sub(LETTER, r"\\unit{\1}", content)
    return f" {content} "


def _bare(text: str) -> str:
    """Return the text without markdown or braces around all of it, punctuation after it, and an equals sign before it."""
    before = None
    while text != before:
        before = text
        text = text.strip()
        for mark in ("**", "__", "*", "_", "`", '"', "'"):
            if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
                text = text[len(mark) : -len(mark)]
        if re.search(r"(?<![.,;:\\])[.,;:]$", text):
            text = text[:-1]
        text = text.lstrip(":=")
        if text.startswith("{") and text.endswith("}") and _is_one_group(text):
            text = text[1:-1]
    return text


def _is_one_group(text: str) -> bool:
    """Return whether the brace that opens the text closes at its end."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end() == len(text)
    return False
