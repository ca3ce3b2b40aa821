r"""Final answers: found in a response, brought to one notation, compared by form.

Three ways to mark an answer: \boxed{...} (MATH, Geometry3K), a line "Answer: ..." (DAPO, AIME), "#### ..." (GSM8K). The last
mark counts. An answer that is not marked is none: a response that only mentions the right number is wrong.

Around an answer may stand Markdown, a full stop, a currency, units and plain words. Nothing may stand there that changes its
value ("not 25", "25 thousand") or leaves a choice ("25 or 30").
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
LONGEST = 400  # characters of an answer; the longest truth of MATH has about 160
LONGEST_TRUTH = 4000  # characters: the data is trusted, but not to be endless
NUMBER = r"(?:\d+(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
EXPONENT = r"(?:[eE][+-]?\d{1,3}(?![\d.]))?"
CURRENCIES = "£€¥₹¢"
# Words next to a number that make it another number, or none.
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
    r"\pi ": "GREEK SMALL LETTER PI",
    r"\theta ": "GREEK SMALL LETTER THETA",
    r"\alpha ": "GREEK SMALL LETTER ALPHA",
    r"\beta ": "GREEK SMALL LETTER BETA",
    r"\lambda ": "GREEK SMALL LETTER LAMDA",
    r"\phi ": "GREEK SMALL LETTER PHI",
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
    r"""The content of the last \boxed or \fbox: in braces, after a blank, or as one word without braces. Boxes with nothing but
    commas or "and" between them are one answer. None if there is none, or if the last one is never closed."""
    parts: list[str] = []
    end = 0
    for mark in BOX.finditer(text):
        if mark.start() < end:
            continue  # a box in a box
        if not parts or text[end : mark.start()].strip("$,; \t\r\n\f\v") not in ("", "and", "or"):
            parts = []
        content, end = _braces(text, mark.end())
        if content is None:
            return None
        parts.append(content)
    return ", ".join(dict.fromkeys(parts)) if parts and all(part.strip() for part in parts) else None


def _braces(text: str, start: int) -> tuple[str | None, int]:
    """The content of the braces that open at `start`, or the word that stands there, and where it ends; None if it does not."""
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
    """The text behind the last "Answer:", on its line or, if that is empty, on the next line that is not. None without one."""
    marks = list(re.finditer("(?i)answer(?:\\s+is)?[*_`\\s]{0,4}[:\N{FULLWIDTH COLON}]", text))
    lines = text[marks[-1].end() :].splitlines() if marks else []
    return next((line for line in lines if line.strip("*_`$#>|~{}[]()\\ \t-.")), None)


def hash_line(text: str) -> str | None:
    """The text behind the last "####" that has any, up to the end of its line. None without one."""
    found = re.findall(r"#{4,}\s*([^\n#]*[^\n#\s])", text)
    return found[-1] if found else None


def last_number(text: str) -> Fraction | None:
    """The last number of a text; a hyphen behind a number or a word is no minus."""
    end = next((i for i in range(len(text), 0, -1) if text[i - 1].isdecimal()), 0)
    text = "".join(map(_latex, text[max(0, end - 200) : end])).replace("\\$", "$")
    found = re.findall(rf"((?<![\w)}}\]])-\s?)?\$?((?:{NUMBER}){EXPONENT})", text)
    return number("".join(found[-1]).replace(" ", "")) if found else None


# --------------------------------------------------------------------------------------------------- one notation


def canonical(answer: str, longest: int = LONGEST) -> str:
    """The answer without what is written around it, in LaTeX with one spelling for each thing. Empty for a longer text than any
    answer is."""
    text = answer.strip()
    if len(text) > longest:
        return ""
    text = _without_unicode(text)
    if len(text) > 2 * longest:
        return ""
    if BOX.search(text):
        text = boxed(text) or ""
    text = re.sub(r"(?:\s*</?\|?\w+\|?>)+\s*$", "", text)  # an end token, or a closing tag
    text = text.replace("{,}", ",").replace(r"\$", "").translate(dict.fromkeys(map(ord, CURRENCIES)))
    text = re.sub(r"(?<=\d)(?:,?(?:\\[!,;: ]|~)+|,\s*\\!\s*)(?=\d{3}(?!\d))", "", text)  # a thin gap between thousands
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
    """Typeset characters as LaTeX; without pictures and characters of no width."""
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
    r"""The only formula in $..$, \(..\) or \[..\], if the words around it say nothing of their own; else all without these
    signs."""
    delimited = r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    formulas = [next(filter(None, groups)) for groups in re.findall(delimited, text)]
    around = re.sub(delimited, " ", text)
    if len(formulas) == 1 and not re.search(r"[\d\\=]", around) and not NOT_JUST_UNITS & _words(around):
        return formulas[0]
    return re.sub(r"\$|\\[()\[\]]", " ", text)


def _without_units(text: str) -> str:
    r"""Without \text{...} and its like; where they stand behind a number, as units, without what they hold, too."""
    group = r"\\(?:text(?:bf|it|rm|sf|normal)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname|rm|bf)\s*\{([^{}]*)\}"
    before = None
    while text != before:  # from the inside out
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
    """Without markup, punctuation and braces around all of it, and without commas between thousands."""
    before = None
    while text != before:
        before = text
        text = text.strip(' \t\n*_`"#').rstrip(" .,;:").lstrip(" :=")
        text = text.rstrip("\\") if not text.endswith(r"\\") else text
        depth = text.count("{") - text.count("}")
        if depth < 0 and text.endswith("}"):  # of \textbf{Answer: 5}
            text = text[:-1]
        elif text.startswith("}"):  # of \textbf{Answer:} 5
            text = text[1:]
        elif text.startswith("{") and _braces(text, 0) == (text[1:-1], len(text)):
            text = text[1:-1]
    return re.sub("[, ]", "", text) if re.fullmatch(r"[+-]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d*)?", text) else text


# ------------------------------------------------------------------------------------------------------ comparison


def number(text: str) -> Fraction | None:
    """The number that the text, in canonical notation, is; a per cent sign is not counted. None if it is something else."""
    text = re.sub(r"\s*\\?%$", "", text.strip())
    text = re.sub(r"^[(\[]([^,]*)[)\]]$|^([+-])\s+", r"\1\2", text)
    text = re.sub(r"\s*\\times 10\^\{(.*)\}$", r"e\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return Fraction(text) if re.fullmatch(rf"[+-]?(?:{NUMBER}){EXPONENT}", text) and len(text) < 100 else None


def quantity(text: str) -> Fraction | None:
    """The only number of a text in canonical notation whose other words are units or fill ("25 dollars", "x = 25", "the sum is
    25, since ..."). None if there is no such number."""
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
    letters = re.sub(r"(?:^|(?<=\s))a(?=\s)", " ", f"{text[: value.start()]}0{text[value.end() :]}")  # but for the article
    variables = set(re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])", letters)) - {*UNIT_LETTERS}
    if re.search(r"[^A-Za-z\s.,;:'\"%*`_\\-]|\\[^%]", around) or NOT_JUST_UNITS & _words(around) or variables:
        return None
    return number(value[0])


def same(answer: str, truth: str, any_root: bool = False) -> bool:
    r"""True if both are the same number, word or mathematical object in the same form (answer_compare.py). Nothing is
    computed for the answer: 2+3 is not 5. any_root: \sqrt{884} is 2\sqrt{221}, though."""
    b = canonical(truth, LONGEST_TRUTH)
    a = canonical(answer, max(LONGEST, 2 * len(b)))
    if not a or not b:
        return False
    if _spelling(b) in (_spelling(a), _spelling(re.sub(r"^[A-Za-z]\s*=", "", a))):
        return True
    given, value = number(a), number(b)
    if value is not None and given is None:
        given = quantity(a)
    if given is not None and value is not None:
        return given in _percentages(value, a, b)
    if a.endswith("%") and given is not None and agree(_fraction(given / 100), b):
        return True
    a, b = (re.sub(rf"\s*\\?%$|(?<=[\w}})])(?:\s*\b(?:{UNITS})\b)+(?:\s*\^\s*\{{?[23]\}}?)?$", "", text) for text in (a, b))
    agreed = agree(a, b, any_root)
    if not agreed and re.search(r"\d,\d{3}(?!\d)", a) and "," not in b:
        agreed = agree(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", a), b, any_root)  # 1,000\pi
    return bool(agreed)


def _fraction(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _percentages(value: Fraction, answer: str, truth: str) -> set[Fraction]:
    """The numbers that an answer may have: a per cent sign may be left out, and 0.1 is 10%."""
    values = {value}
    if truth.endswith("%"):
        values.add(value / 100)
    return values | ({value * 100} if answer.endswith("%") else set())


def _spelling(text: str) -> str:
    """The answer to compare letter by letter; a choice is the same with and without parentheses."""
    text = re.sub(rf"\s+|\\?%$|{DEGREE}", "", text)
    choice = re.fullmatch(r"\(?([A-Z])\)?", text)
    return choice[1] if choice else text.lower() if re.fullmatch(r"[A-Za-z]{2,}", text) else text
