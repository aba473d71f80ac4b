"""English words by what they do in a question, for :mod:`kvstore.responses.semantic.reading`.

The lists are short on purpose. A word that is on none of them counts as content, and content must be equal: what is
missing here costs hits. What is wrong here costs wrong answers, so a word is on a list of synonyms only where exchanging
it changes no question that we could think of.
"""

from __future__ import annotations

KINDS = frozenset(
    "@how @able @should @when @whentime @whenday @whenyear @where @why @who @howmany @howmuch @howlong @howold @howfar @howoften @howbig @howtall"
    " @howfast @howhigh @howdeep @howwide @howheavy @howearly @howlate @howsoon @howlarge @howhot @howcold @howwell"
    " @howlikely @howis @fix @mean".split()
)
QUESTION_WORDS = {"when": "@when", "where": "@where", "why": "@why", "who": "@who", "whom": "@who", "whose": "@whose"}
CLAUSES = frozenset("if when because that but although unless while whether since so and or who which where".split())
"""Words that begin another clause behind a verb."""
AUXILIARIES = frozenset(
    "is are am do does can could may should must will would did was were has have had shall might".split()
)
"""A question that begins with one is answered by yes or no, unless it is a polite way to ask for something."""
FINITE = AUXILIARIES | {"be", "been"}
MODALS = {
    "should": "should", "ought": "should", "must": "must", "required": "must", "need": "must", "can": "may",
    "could": "may", "may": "may", "might": "may", "able": "may", "@able": "may", "@should": "should", "needed": "must", "needs": "must", "possible": "may",
    "shall": "should",
}  # fmt: skip
PAST = frozenset("was were did had".split())
NEGATIONS = frozenset(
    "not no never none nothing nobody neither nor without cannot except excluding non nowhere hardly barely unable"
    " lacking nicht kein keine keinen ohne nie pas jamais sans ningun ninguna nunca sin non mai senza не нет без".split()
)
SCOPES = frozenset("only all everyon everyth or both either".split())
"""Stems that say of how many something is asked."""
PERSONS = {"i": "1", "me": "1", "we": "1", "us": "1", "you": "2"}
"""First and second person."""
PAST_FORMS = frozenset(
    "took went wrote gave ate drove rose fell began spoke became came ran sang swam flew grew threw knew broke stole wore"
    " forgot".split()
)
"""Of verbs that have another form for what is done."""
OWNERS = {
    "my": "mine", "our": "mine", "mine": "mine", "ours": "mine", "your": "yours", "yours": "yours", "his": "his",
    "her": "hers", "hers": "hers", "their": "theirs", "theirs": "theirs",
}  # fmt: skip

SENTENCE_WORDS = frozenset(
    "a an the my our your his her their this that these those i you we he she they it is are am was were do does did has have"
    " had can could should would will must may might what which who whom whose when where why how if".split()
)
"""Of which there is none in a heading."""
STOPWORDS = frozenset(
    "a an the this these those i you we one it me us they"
    " is are am be been being was were do does did doing done has have had having will would shall should can could may"
    " might must ought need needs needed of in on at for by and or as so if whether that which what who whom whose"
    " when where why how there here then than really actually exactly currently usually generally ever also"
    " some any please from into with about during between thing things"
    " my our your his her their its mine ours yours theirs"
    " am able possible".split()
)
"""What is no content by itself. Words that point somewhere are compared besides, with what they point to."""

DIRECTIONS = {
    "from": "from", "to": "to", "into": "to", "onto": "to", "than": "than", "before": "before", "about": "about", "during": "in", "after": "after",
    "above": "above", "below": "below", "over": "over", "under": "under", "without": "without", "until": "until",
    "since": "since", "against": "against", "except": "except", "by": "by", "in": "in", "on": "on", "at": "in", "for": "for",
    "with": "with", "of": "of", "per": "per", "via": "with", "using": "with", "inside": "inside", "outside": "outside",
    "between": "between", "within": "within", "toward": "to", "towards": "to", "through": "through", "versus": "versus",
}  # fmt: skip
POINTING = frozenset(
    "from to than before after above below over under without until since against except inside outside within".split()
)
"""Directions that are compared with what they point to, wherever it stands. The others count where words change
places."""
BEFORE_A_VERB = frozenset(
    "how way ways want wants wanted need needs needed have has had like able going about try trying used steps time times"
    " possible allowed supposed required safe best better easy hard good legal illegal dangerous healthy ok okay where what"
    " when whether which who is are me age apply".split()
)
"""Behind these, ``to`` belongs to a verb."""

NUMBERS: dict[str, int] = {
    word: value
    for value, words in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
        " eighteen nineteen".split()
    )
    for word in (words,)
} | {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
NUMBERS |= {"dozen": 12}
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
ORDINALS = {
    word: value
    for value, word in enumerate(
        "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth".split(), 1
    )
}
UNITS: dict[str, str] = {
    word: group.split()[0]
    for group in (
        "km kilometer kilometers kilometre kilometres", "m meter meters metre metres", "cm centimeter centimeters"
        " centimetre centimetres", "mm millimeter millimeters millimetre millimetres", "mi mile miles", "ft foot feet", "inch inches",
        "yd yard yards", "kg kilogram kilograms kilo kilos", "g gram grams", "mg milligram milligrams", "lb lbs pound pounds",
        "oz ounce ounces", "l liter liters litre litres", "ml milliliter milliliters millilitre millilitres", "gal gallon"
        " gallons", "c celsius centigrade °c", "f fahrenheit °f", "s sec secs second seconds", "ms millisecond milliseconds",
        "min mins minute minutes", "h hr hrs hour hours", "day days", "week weeks wk wks", "month months", "year years yr yrs",
        "% percent percentage", "usd dollar dollars $", "eur euro euros €", "gbp £", "yen ¥ jpy", "kb kilobyte kilobytes",
        "mb megabyte megabytes", "gb gigabyte gigabytes gigs", "tb terabyte terabytes", "byte bytes", "bit bits", "w watt watts",
        "kw kilowatt kilowatts", "hp horsepower", "cup cups", "tbsp tablespoon tablespoons", "tsp teaspoon teaspoons",
        "mph", "kph kmh",
    )
    for word in group.split()
}  # fmt: skip
SHORT_UNITS = frozenset("km ml cm mm kg kb mb gb tb lb oz".split())
"""That mean nothing else, so they are units without a number, too."""
DATES = frozenset(
    "monday tuesday wednesday thursday friday saturday sunday january february march april may june july august september"
    " october november december today tomorrow yesterday tonight morning afternoon evening noon midnight weekday weekend"
    " spring summer autumn fall winter christmas easter q1 q2 q3 q4 am pm".split()
)
LANGUAGES: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "en": "the is are what how do does can i my to of in for and a you when where why who which with it please",
        "de": "der die das ist sind was wie wo wann warum wer ich mein meine zu von für und ein eine nicht kann mit wird im den",
        "fr": "le la les est sont que quoi comment où quand pourquoi qui je mon ma à de du des pour et un une ne pas dans puis quelle quel",
        "es": "el la los las es son qué cómo dónde cuándo cuál por quién yo mi a de del para y un una no en puedo se está",
        "it": "il lo la gli è sono che come dove quando perché chi io mio mia a di del per e un una non nel della qual posso",
        "pt": "o a os as é são que como onde quando qual quem eu meu minha de do da para e um uma não em no posso",
        "nl": "de het een is zijn wat hoe waar wanneer waarom wie ik mijn te van voor en niet kan met laat gaat op",
    }.items()
}  # fmt: skip
EVALUATING = frozenset(
    "rud saf dangerou legal illegal normal healthy unhealthy difficult simpl possibl impossibl good bad better allow true"
    " worth fast permanent".split()
)
"""Stems of what is said of something, in front of it or behind."""
WRITTEN_FOR_ONE = frozenset(
    "writ translat summaris draw draft generat creat recit sing invent imagin pretend act play send order book cancel enabl"
    " disabl remind call sto".split()
)
"""Stems of what one asks to be done: that is not how it is done."""
LIGHT = frozenset("step instruct tutorial explain explanat guid topic piec lot detail info currently".split())
"""Stems that say little beside others: what is asked is nearly the same without them."""
ASKING = frozenset(
    "a an the of is are am was were be what which who how why when where do does did can could may i you me we one it there"
    " that this in on for to my your about please with and some any".split()
)
"""Small words that ask; the others may be what is asked about, as its and it's."""
