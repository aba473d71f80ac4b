"""A word without the ending that changes no question, and for all that mean the same the same. No I/O, no model."""

from __future__ import annotations

import re

from kvstore.responses.semantic.synonyms import OPPOSITES, SYNONYMS
from kvstore.responses.semantic.vocabulary import DATES

_IRREGULAR = {
    "children": "child", "men": "man", "women": "woman", "people": "person", "feet": "ft", "teeth": "tooth", "mice": "mouse",
    "bought": "buy", "sold": "sell", "made": "make", "went": "go", "written": "write", "wrote": "write", "taken": "take",
    "took": "take", "given": "give", "gave": "give", "paid": "pay", "found": "find", "lost": "lose", "kept": "keep",
    "won": "win", "built": "build", "sent": "send", "spoken": "speak", "spoke": "speak", "began": "begin", "begun": "begin",
    "born": "born", "ate": "eat", "eaten": "eat", "drunk": "drink", "drove": "drive", "driven": "drive", "chosen": "choose",
    "wives": "wife", "lives": "life", "knives": "knife", "leaves": "leave", "differ": "difference", "differs": "difference",
    "different": "difference", "signed": "sign", "meaning": "mean", "news": "news", "paris": "paris", "definition": "mean",
    "define": "mean", "grew": "grow", "grown": "grow", "knew": "know", "known": "know", "threw": "throw", "thrown": "throw",
    "broke": "break", "broken": "break", "stole": "steal", "stolen": "steal", "wore": "wear", "worn": "wear",
    "thought": "think", "taught": "teach", "caught": "catch", "brought": "bring", "fought": "fight", "held": "hold",
    "led": "lead", "met": "meet", "fell": "fall", "fallen": "fall", "rose": "rise", "risen": "rise", "ran": "run",
    "running": "run", "hidden": "hide", "flew": "fly", "flown": "fly", "drew": "draw", "drawn": "draw", "sang": "sing",
    "sung": "sing", "swam": "swim", "forgot": "forget", "forgotten": "forget", "bacteria": "bacterium", "fungi": "fungus",
    # these lose their e nowhere else than in other forms of themselves
    "coding": "code", "coded": "code", "codes": "code", "rating": "rate", "rated": "rate", "rates": "rate",
    "riding": "ride", "rides": "ride", "hiding": "hide", "hides": "hide", "notes": "note", "biting": "bite",
    "bites": "bite", "bitten": "bite", "bit": "bit", "caring": "care", "hoping": "hope", "pasting": "paste",
    "pasted": "paste", "taping": "tape", "tapes": "tape", "planes": "plane", "sites": "site", "wines": "wine",
    "fines": "fine", "fined": "fine", "tubes": "tube", "cubes": "cube", "tires": "tire", "fires": "fire",
    "breathing": "breathe", "bathing": "bathe", "hated": "hate", "hates": "hate", "dining": "dine",
}  # fmt: skip
_AS_WRITTEN = frozenset(
    # what the ending makes another word of
    "glasses customs goods clothes arms means savings specs shorts contents greens spirits"
    # what somebody feels, and what makes them feel it
    " bored boring interested interesting excited exciting confused confusing tired tiring annoyed annoying amazed"
    " amazing frightened frightening disappointed disappointing embarrassed embarrassing exhausted exhausting relaxed"
    " relaxing surprised surprising satisfied satisfying depressed depressing shocked shocking"
    # what is a word of its own without its e
    " plane care hope note code cube tube wine fine site bite kite rate mate cape pine cane stare bathe breathe humane"
    " morale paste tape ride hide cute hate fate bare dine mane pane mode robe ware tone cope pole fire tire core sore"
    " gene here evening wedding".split()
)
_NO_PLURAL = ("ss", "us", "is", "as", "os", "news")
_DOUBLED = 3
_PREFIXES = [
    "un",
    "in",
    "im",
    "ir",
    "il",
    "dis",
    "de",
    "non",
    "anti",
    "mis",
    "sub",
    "super",
    "pre",
    "post",
    "re",
    "out",
    "under",
    "over",
]


def stem(word: str) -> str:
    """A word as it is compared.

    Args:
        word: lowered.
    """
    base = _base(word.removesuffix("'s").removesuffix("'"))
    return _SYNONYMS.get(base, base)


def _base(word: str) -> str:
    word = _IRREGULAR.get(word, word)
    if word in _AS_WRITTEN:
        return word
    if len(word) > 7 and word.endswith("tion"):
        return word[:-3]
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ches", "shes", "sses", "xes", "zes", "oes")):
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not word.endswith(_NO_PLURAL):
        word = word[:-1]
        if word in _AS_WRITTEN:
            return word
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) - len(ending) >= _DOUBLED:
            short = word[: -len(ending)]
            if not re.search("[aeiouy]", short):
                break
            if len(short) > _DOUBLED and short[-1] == short[-2] and short[-1] not in "lsz":
                short = short[:-1]
            return short
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


_SYNONYMS = {_base(word): _base(first) for word, first in SYNONYMS.items()}
DATE_STEMS = frozenset(stem(word) for word in DATES)
_OPPOSITES = frozenset(frozenset((stem(left), stem(right))) for left, right in OPPOSITES if stem(left) != stem(right))


def are_opposites(left: str, right: str) -> bool:
    """Whether two stems mean the contrary of each other: by a list, or by a prefix that negates."""
    if frozenset((left, right)) in _OPPOSITES:
        return True
    short, long = sorted((left, right), key=len)
    return len(short) > 2 and any(long == prefix + short for prefix in _PREFIXES)
