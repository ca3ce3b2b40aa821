"""The words that may accompany a value: the only ones. An answer with any other word is undecided.

A list of harmless words can be complete, a list of words that change a value cannot ("12 bn", "12 lakh", "a tenth of 12").
"""

import re


def _lines(text: str) -> list[str]:
    return text.strip().split("\n")


def _words(text: str) -> list[str]:
    return text.split()


# One unit a line, first the name that stands for all of them
UNITS = {
    spelling: line.split()[0]
    for line in _lines("""
mm millimeter millimeters millimetre millimetres
cm centimeter centimeters centimetre centimetres 厘米
m meter meters metre metres 米
km kilometer kilometers kilometre kilometres kms 公里 千米
inch inches
ft foot feet
yard yards yd
mile miles mi
mg milligram milligrams
g gram grams gm 克
kg kilogram kilograms kgs 千克 公斤
lb pound pounds lbs
oz ounce ounces
ton tons tonne tonnes
ml mL milliliter milliliters
l L liter liters litre litres
gallon gallons gal
quart quarts
pint pints
cup cups
acre acres
s second seconds sec secs 秒
min minute minutes mins 分钟
h hour hours hr hrs 小时
day days 天
week weeks
month months
year years yr yrs 岁
dollar dollars USD usd $
cent cents
euro euros EUR €
pound-sterling GBP £
yen yuan 元 ¥
rupee rupees Rs ₹
degree degrees 度
radian radians rad
calorie calories
watt watts W
volt volts V
newton newtons N
joule joules J
mph
unit units
""")
    for spelling in line.split()
}
MONEY = {"dollar", "cent", "euro", "pound-sterling", "yen", "yuan", "rupee"}
LETTERS = "mghslLNJWV"  # units of one letter, which count only in \text{} or in prose
NOUNS = _words("""
apple article bag ball balloon banana bar basket bead bean bear bed bee bill bird block blueberry book bottle box boy bracelet
brick brownie bucket bug building bus bushel butterfly button cake camper can candle candy car card carrot cat chair cherry
chicken child children chip chocolate choice circle class clip coin color coloring combination cookie cow crab crate crayon
cupcake customer desk dinner dish dog doll donut door dress duck egg element elephant employee episode event face factor
family fish floor flower friend frog fruit function game gift girl glass goal goat grape group guest guppy gumball hat head
hen home horse house infant insect integer item jar jellybean job kid kitten lap leaf leaves leg lemon letter light line
lollipop loop man marble meal member men message mice minion mistake monkey movie muffin mushroom nail necklace node note
notebook nut orange order orchid outcome outfit package packet pack page painting pair pancake parent passenger path pastry
patient pea pear pen pencil people permutation person pet phone photo picture pie piece pig pill pizza plant plate player
point polygon polynomial post potato present prime prize problem pumpkin pupil puppy question rabbit rectangle ribbon ring
road rock room rope rose row sandwich seashell seat section seed sequence serving set sheep sheet shell shirt shoe side sign
sister slice snake soda sock solution song spider spoon spot staff stamp star step sticker stone story store strawberry string
student subset suit sweet symbol table teacher team term ticket tie tile tire token tomato tooth teeth tourist toy train treat
tree triangle trip truck tulip turtle value vehicle vertex vertices visitor vote wall watermelon way wheel window woman women
word worker yarn 个 人 本 只 支 名 棵 种
""")
QUIET = set(_words("left remaining old long tall wide such different distinct total altogether overall as shown"))
IN_ALL = {"total", "all"}  # after "in"
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
PER = {"per", "a", "an", "every"}
LEADS = set(
    _words("""
the a an final answer answers result results solution solutions value values sum total number count amount cost price profit
revenue income length width height depth radius diameter area perimeter circumference volume distance time speed rate angle
measure average mean median probability remainder age salary product of so thus therefore hence there it she he they we
you his her their our my has have had makes make made gets get needs need earns earn pays pay spends spend sells sell bought
uses use takes take 答案 一共 总共 共
""")
)
FILLERS = set(
    _words(
        "the a an final answer answers result results solution solutions value values of so thus therefore hence there it 答案"
    )
)
ARTICLES = {"a", "an", "the"}
THUS = {"so", "thus", "therefore", "hence"}
SHORT = {"yes", "no", "odd", "all", "one", "two", "six", "ten"}  # words of up to three letters that are words in any case
RELATION_WORDS = {"is": "=", "are": "=", "equals": "=", "是": "=", "为": "=", "答案是": "=", "答案为": "="}
JOINS = {"and": "and", "or": "or"}
NUMBERS = _words("zero one two three four five six seven eight nine ten eleven twelve")
MARKS = "✅✓✔☑🎉🎊🏆⭐🌟🥳∎■□▪"  # pictures that say that an answer is there or right


def _plurals(noun: str) -> tuple[str, ...]:
    if noun.endswith(("s", "x", "ch", "sh", "o")):
        return (noun, noun + "s", noun + "es") if noun.endswith("o") else (noun, noun + "es")
    return (noun, noun[:-1] + "ies") if re.search("[^aeiou]y$", noun) else (noun, noun + "s")


COUNTED = {spelling: noun for noun in NOUNS for spelling in _plurals(noun)}


def unit(word: str) -> str | None:
    """Return the name of the unit or of the thing that is counted; None for any other word. Short units have case: MM is not
    mm."""
    found = UNITS.get(word) or (UNITS.get(word.lower()) if len(word) > 3 else None)
    return found or COUNTED.get(word.lower())


def is_known(word: str) -> bool:
    """Return whether it is one of the words of this file."""
    lower = word.lower()
    return (
        lower in LEADS
        or lower in RELATION_WORDS
        or lower in JOINS
        or lower in POWERS
        or lower in PER
        or lower in QUIET
        or lower in NUMBERS
        or lower == "in"
        or unit(word) is not None
    )
