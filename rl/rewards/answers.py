r"""The final answer of a response: found, brought to one notation, and compared with the ground truth.

An answer is marked in one of three ways: \boxed{...} (MATH, Geometry3K), a line "Answer: ..." (DAPO, AIME) or "#### ..."
(GSM8K). The last mark counts. A response that mentions the right number without a mark is wrong.

Markdown, a full stop, a currency, units and plain words around an answer are ignored, unless they change its value ("not 25",
"25 thousand") or leave a choice ("25 or 30").
"""

import re
import unicodedata
from fractions import Fraction

from rl.rewards.answer_compare import agree


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


BOX = re.compile(r"\\[bf]?box(?:ed)?(?![A-Za-z])\s*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
WORD = re.compile(r"[^\s$]+")
LONGEST = 400  # characters of an answer; MATH's longest ground truth has about 160
LONGEST_TRUTH = 4000  # characters
NUMBER = r"(?:\d+(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
EXPONENT = r"(?:[eE][+-]?\d{1,3}(?![\d.]))?"
CURRENCIES = "£€¥₹¢"
# Words next to a number that change its value, or with which it is no answer
NOT_JUST_UNITS = _words(
    "no not never nor or and either neither wrong incorrect than least most less more fewer greater smaller between within "
    "about approximately approx roughly around nearly almost hundred thousand million billion trillion dozen half third "
    "quarter twice double squared cubed factorial times plus minus divided over power root negative mod modulo except unless "
    "if pi isn aren doesn don can cannot undefined unknown"
)
UNITS = (
    "cm|mm|km|ft|mi|inch(?:es)?|feet|foot|miles?|yards?|(?:centi|milli|kilo)?meters?|units?|square|cubic|sq|degrees?|radians?"
)
UNIT_LETTERS = "mgshlLNJWVAKCF"
SIGNS = {  # typeset characters, by their Unicode names, as LaTeX
    "-": "MINUS SIGN, EN DASH, EM DASH, HYPHEN, NON-BREAKING HYPHEN, SMALL HYPHEN-MINUS",
    **{f"\\{name} ": f"GREEK SMALL LETTER {name.upper()}" for name in ("pi", "theta", "alpha", "beta", "phi")},
    r"\lambda ": "GREEK SMALL LETTER LAMDA",
    r"\infty ": "INFINITY",
    r"\times ": "MULTIPLICATION SIGN",
    r"\cdot ": "DOT OPERATOR, MIDDLE DOT",
    "/": "DIVISION SIGN",
    r"\pm ": "PLUS-MINUS SIGN",
    r"^\circ ": "DEGREE SIGN",
    r"\le ": "LESS-THAN OR EQUAL TO",
    r"\ge ": "GREATER-THAN OR EQUAL TO",
    r"\ne ": "NOT EQUAL TO",
    r"\approx ": "ALMOST EQUAL TO",
    r"\cup ": "UNION",
    r"\cap ": "INTERSECTION",
    r"\in ": "ELEMENT OF",
    r"\emptyset ": "EMPTY SET",
    r"\,": "THIN SPACE, NARROW NO-BREAK SPACE, NO-BREAK SPACE",
    ".": "IDEOGRAPHIC FULL STOP",
    "": "ANGLE, END OF PROOF",
}
LATEX = {unicodedata.lookup(name): latex for latex, names in SIGNS.items() for name in names.split(", ")}
DEGREE = r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![A-Za-z]))|\\degrees?(?![A-Za-z])"
DECORATION = r"\\(left|right|displaystyle|mathstrut|blacksquare|square|checkmark|qed|bigcirc)(?![A-Za-z])"

# ---------------------------------------------------------------------------------------------- finding the answer


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed or \fbox, which is in braces or one word. Boxes with only commas, "and" or "or"
    between them are one answer. Return None if there is no box, or if the last one is not closed."""
    parts: list[str] = []
    end = 0
    for mark in BOX.finditer(text):
        if mark.start() < end:
            continue  # it is inside another box
        if not parts or text[end : mark.start()].strip("$,; \t\r\n\f\v") not in ("", "and", "or"):
            parts = []
        content, end = _braces(text, mark.end())
        if content is None:
            return None
        parts.append(content)
    return ", ".join(dict.fromkeys(parts)) if parts and all(part.strip() for part in parts) else None


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


def answer_line(text: str) -> str | None:
    """Return the text after the last "Answer:", from the first line that has any. Return None without one."""
    marks = list(re.finditer("(?i)answer(?:\\s+is)?[*_`\\s]{0,4}[:\N{FULLWIDTH COLON}]", text))
    lines = text[marks[-1].end() :].splitlines() if marks else []
    return next((line for line in lines if line.strip("*_`$#>|~{}[]()\\ \t-.")), None)


def hash_line(text: str) -> str | None:
    """Return the text after the last "####" that has text after it on its line. Return None without one."""
    found = re.findall(r"#{4,}\s*([^\n#]*[^\n#\s])", text)
    return found[-1] if found else None


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text. A hyphen after a number or a word is not a minus."""
    end = next((i for i in range(len(text), 0, -1) if text[i - 1].isdecimal()), 0)
    text = "".join(map(_latex, text[max(0, end - 200) : end])).replace("\\$", "$")
    found = re.findall(rf"((?<![\w)}}\]])-\s?)?\$?((?:{NUMBER}){EXPONENT})", text)
    return number("".join(found[-1]).replace(" ", "")) if found else None


# --------------------------------------------------------------------------------------------------- one notation


def canonical(answer: str, longest: int = LONGEST) -> str:
    """Return the answer in LaTeX, with one spelling for each thing and no decoration; an empty string if it is too long."""
    text = answer.strip()
    if len(text) > longest:
        return ""
    text = _without_unicode(text)
    if len(text) > 2 * longest:
        return ""
    if BOX.search(text):
        text = boxed(text) or ""
    text = re.sub(r"(?:\s*</?\|?\w+\|?>)+\s*$", "", text)  # end tokens and closing tags
    text = text.replace("{,}", ",").replace(r"\$", "").translate(dict.fromkeys(map(ord, CURRENCIES)))
    text = re.sub(r"(?<=\d)(?:,?(?:\\[!,;: ]|~)+|,\s*\\!\s*)(?=\d{3}(?!\d))", "", text)  # a thin space between thousands
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ")
    text = re.sub(r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![A-Za-z])", " ", text)
    text = _only_formula(text)
    text = re.sub(DECORATION, "", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text).replace(r"\varnothing", r"\emptyset")
    text = re.sub(r"\\frac\s*(\\[a-z]+|\w)\s*(\\[a-z]+|\w)(?![a-z])", r"\\frac{\1}{\2}", text)
    if not re.search(r"sin|cos|tan|cot|sec|csc", text):
        text = re.sub(DEGREE, "", text)
    text = re.sub(r"(\d+)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", _repeating_decimal, _without_units(text))
    text = re.sub(r"(?<![A-Za-z\d.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?![A-Za-z\d])", r"\1\\times 10^{\2}", text)
    text = _bare(re.sub(r"\s+", " ", text))
    return re.sub(r"^([+-]?[1-9](?:\.\d*)?)\s*\\(?:times|cdot)\s*10\s*\^\s*\{?([+-]?\d{1,3})\}?$", r"\1\\times 10^{\2}", text)


def _without_unicode(text: str) -> str:
    """Return the text with typeset characters as LaTeX, without symbols such as emoji and without zero-width characters."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda run: "^{" + "".join(map(_latex, run[0])) + "}", text)
    text = re.sub(r"√\s*(?:\(([^()]*)\)|(\d+|[a-z]))", lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)
    return "".join(map(_latex, text))


def _latex(character: str) -> str:
    if character in LATEX or unicodedata.category(character) in ("So", "Cf"):
        return LATEX.get(character, "")
    plain = unicodedata.normalize("NFKC", character)
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return r"\frac{" + plain.replace("\N{FRACTION SLASH}", "}{") + "}"
    return LATEX.get(plain, plain)


def _only_formula(text: str) -> str:
    r"""Return the formula in $..$, \(..\) or \[..\] if there is only one and the words around it do not matter; otherwise the
    whole text without these delimiters."""
    delimited = r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    formulas = [next(filter(None, groups)) for groups in re.findall(delimited, text)]
    around = re.sub(delimited, " ", text)
    if len(formulas) == 1 and not re.search(r"[\d\\=]", around) and not NOT_JUST_UNITS & _words(around):
        return formulas[0]
    return re.sub(r"\$|\\[()\[\]]", " ", text)


def _without_units(text: str) -> str:
    r"""Return the text without \text{...} and similar commands. Their content stays, unless it is a unit after a number."""
    group = r"\\(?:text(?:bf|it|rm|sf|normal)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname|rm|bf)\s*\{([^{}]*)\}"
    before = None
    while text != before:  # the innermost first
        before = text
        unit = re.search(rf"(?:(?<=[\d}})\]%])|(?<=\\pi))\s*{group}(?:\s*\^\s*\{{?[23]\}}?)?", text)
        if unit and not NOT_JUST_UNITS & _words(unit[1]) and not re.search(rf"\d|^\s*[^{UNIT_LETTERS}\s]?\s*$", unit[1]):
            text = text[: unit.start()] + " " + text[unit.end() :]
        else:
            text = re.sub(group, r" \1 ", text, count=1)
    return text


def _repeating_decimal(found: re.Match) -> str:
    whole, fixed, repeated = found.groups()
    shift = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), shift) + Fraction(int(repeated), shift * (10 ** len(repeated) - 1))
    return _fraction(value)


def _bare(text: str) -> str:
    """Return the text without surrounding markup, punctuation and braces, and without commas between thousands."""
    before = None
    while text != before:
        before = text
        text = text.strip(' \t\n*_`"#').rstrip(" .,;:").lstrip(" :=")
        text = text.rstrip("\\") if not text.endswith(r"\\") else text
        depth = text.count("{") - text.count("}")
        if depth < 0 and text.endswith("}"):  # what remains of \textbf{Answer: 5}
            text = text[:-1]
        elif text.startswith("}"):  # what remains of \textbf{Answer:} 5
            text = text[1:]
        elif text.startswith("{") and _braces(text, 0) == (text[1:-1], len(text)):
            text = text[1:-1]
    return re.sub("[, ]", "", text) if re.fullmatch(r"[+-]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d*)?", text) else text


# ------------------------------------------------------------------------------------------------------ comparison


def number(text: str) -> Fraction | None:
    """Return the text, in canonical notation, as a number, ignoring a per cent sign; None if it is not one number."""
    text = re.sub(r"\s*\\?%$", "", text.strip())
    text = re.sub(r"^[(\[]([^,]*)[)\]]$|^([+-])\s+", r"\1\2", text)
    text = re.sub(r"\s*\\times 10\^\{(.*)\}$", r"e\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return Fraction(text) if re.fullmatch(rf"[+-]?(?:{NUMBER}){EXPONENT}", text) and len(text) < 100 else None


def quantity(text: str) -> Fraction | None:
    """Return the only number of a text in canonical notation, if its other words are units or plain words ("25 dollars", "x =
    25", "the sum is 25, since ..."); None otherwise."""
    text = re.sub(r"\s*\((?![^()]*\bor\b)[^()]*\)\s*$", "", text)
    text = re.sub(r"[,;.]?\s+(?:because|since|as|where|which|when|for)\b.*$", "", text)
    *before, text = re.split(r"=(?=[^=]*\d)", text)
    left = [re.split(r"[,;]", side)[-1].strip() for side in before]  # the left-hand sides
    if NOT_JUST_UNITS & _words(" ".join(before)) or len(set(left)) < len(left):
        return None  # x = 5 or x = 25
    text = re.sub(r"(?<=[a-z]{2})\s?\^\s?\{?[23]\}?|/(?=\s?[a-z])", " ", text)  # cm^2, km/h
    found = list(re.finditer(rf"(?<![\w.)}}\]+-])[+-]?\s?(?:{NUMBER}){EXPONENT}(?![\d^_!(])", text))
    if len(found) != 1:
        return None
    value = found[0]
    around = f"{text[: value.start()]} {text[value.end() :]}"
    letters = re.sub(r"(?:^|(?<=\s))a(?=\s)", " ", f"{text[: value.start()]}0{text[value.end() :]}")  # without the article
    variables = set(re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])", letters)) - {*UNIT_LETTERS}
    if re.search(r"[^A-Za-z\s.,;:'\"%*`_\\-]|\\[^%]", around) or NOT_JUST_UNITS & _words(around) or variables:
        return None
    return number(value[0])


def same(answer: str, truth: str, any_root: bool = False) -> bool:
    r"""Return whether both are the same number, word or mathematical object in the same form (answer_compare.py). Nothing is
    computed for the answer: 2+3 is not 5. any_root: accept \sqrt{884} for 2\sqrt{221}."""
    b = canonical(truth, LONGEST_TRUTH)
    a = canonical(answer, max(LONGEST, 2 * len(b)))
    if not a or not b:
        return False
    if _spelling(b) in (_spelling(a), _spelling(re.sub(r"^[A-Za-z]\s*=", "", a))):
        return True
    given, value = number(a), number(b)
    if value is not None and given is None:
        given = quantity(a)
    if given is not None and value is not None:  # a per cent sign may be missing on either side, and 0.1 is 10%
        return given == value or (b.endswith("%") and given == value / 100) or (a.endswith("%") and given == value * 100)
    if a.endswith("%") and given is not None and agree(_fraction(given / 100), b):
        return True
    a, b = (re.sub(rf"\s*\\?%$|(?<=[\w}})])(?:\s*\b(?:{UNITS})\b)+(?:\s*\^\s*\{{?[23]\}}?)?$", "", text) for text in (a, b))
    agreed = agree(a, b, any_root)
    if not agreed and re.search(r"\d,\d{3}(?!\d)", a) and "," not in b:
        agreed = agree(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", a), b, any_root)  # 1,000\pi
    return bool(agreed)


def _fraction(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _spelling(text: str) -> str:
    """Return the answer for a comparison by letters: words in lower case, (A) as A, no spaces, per cent or degree signs."""
    text = re.sub(rf"\s+|\\?%$|{DEGREE}", "", text)
    choice = re.fullmatch(r"\(?([A-Z])\)?", text)
    return choice[1] if choice else text.lower() if re.fullmatch(r"[A-Za-z]{2,}", text) else text
