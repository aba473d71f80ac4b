"""English words by what they do in a question, for :mod:`kvstore.responses.semantic.reading`.

The lists are short on purpose. A word that is on none of them counts as content, and content must be equal: what is
missing here costs hits. What is wrong here costs wrong answers, so a word is on a list of synonyms only where exchanging
it changes no question that we could think of.
"""

from __future__ import annotations

import re
from collections.abc import Callable

CONTRACTIONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), into)
    for pattern, into in (
        (r"\bcan(?:'?t|not)\b", "can not"),
        (r"\bwon'?t\b", "will not"),
        (r"\bshan't\b", "shall not"),
        (r"\bain't\b", "is not"),
        (r"\b([a-z]+)n't\b", r"\1 not"),
        (r"\b(do|does|did|is|are|was|were|should|would|could|has|have|had)nt\b", r"\1 not"),
        (r"\b(what|where|who|how)s\b(?! of\b)", r"\1 is"),
        (r"\b(i)'m\b", r"\1 am"),
        (r"\b([a-z]+)'re\b", r"\1 are"),
        (r"\b([a-z]+)'ve\b", r"\1 have"),
        (r"\b([a-z]+)'ll\b", r"\1 will"),
        (r"\b([a-z]+)'d\b", r"\1 would"),
        (r"\b(what|where|who|when|how|why|that|there|here|it|he|she)'s\b", r"\1 is"),
        (r"\blet's\b", "let us"),
    )
)
"""Of lowered text with straight apostrophes."""

FRAMES: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        r"^(?:hi|hello|hey|good (?:morning|afternoon|evening)|dear \w+)\b(?: there)?[,!. ]+",
        r"^(?:ok|okay|so|well|um|also|and)[, ]+",
        r"^(?:i have a (?:quick )?question|quick question)[:,. -]+",
        r"\b(?:please|pls|plz|kindly|thanks|thank you|thx)\b(?: in advance| very much)?",
        r"^[, ]*(?:can|could|would|will) you (?:please |kindly |maybe |possibly )*(?=(?:tell|explain|show|give|help|list"
        r"|describe|name|say|write|translate|summarize|summarise|recommend|suggest|calculate|compute|find|define|provide"
        r"|teach|walk|let|create|generate|make|compare|convert|draft|check)\b)",
        r"^[, ]*i (?:am|was) wondering(?: if you (?:can|could) (?:tell|explain|show) (?:to )?me)?(?: about)?\b,?",
        r"^[, ]*i (?:would|want|need)(?: like)? (?:to know|to find out|to learn|to understand)\b(?: about)?",
        r"^[, ]*do you (?:happen to )?know\b",
        r"^[, ]*(?:tell|explain|show|teach|give) (?:to )?(?:me|us)(?: again)?\b(?! (?:a|an|some|one|two|\d))",
        r"^[, ]*let (?:me|us) know\b",
        r"^[, ]*(?:help me|walk me through)(?: to)?(?: understand)?\b(?! with)",
        r"^[, ]*explain(?: to me)?\b",
        r"^[, ]*i just (?=want|need|would)",
        r"^[, ]*give me(?: a list of)?\b(?! (?:a|an|some|one|two|\d))",
    )
)
"""What is said around a question, and asks nothing; taken away one behind the other."""

AGREED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), into)
    for pattern, into in (
        (r"\b(?:united states of america|united states|u\.s\.a\.|u\.s\.|usa)(?=\W|$)", "Unitedstates"),
        (r"\b(?:united kingdom|u\.k\.|uk)(?=\W|$)", "Unitedkingdom"),
        (r"\b(?:european union|eu)\b", "Europeanunion"),
        (r"\b(?:2fa|two[- ]factor auth(?:entication)?)\b", "twofactor"),
        (r"\be-mail", "email"),
        (r"\bwi-fi\b", "wifi"),
        (r"\bthe year (?=\d{4}\b)", ""),
    )
)
"""Names that are written in several ways."""

PHRASES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), into)
    for pattern, into in (
        # ways to ask how
        (r"^(?:i (?:am trying|want|need|would like|have) to )?(.+?)[,:]? how(?: to| (?:do|can|could|should) i do (?:it|that"
         r"|this)| does (?:it|that|this) work)?[ ?.!]*$", r"@how \1 "),
        (r"^(?:some |any )?(?:tips|advice|guide|tutorial|instructions)(?: on how)? (?:to|for|on)\b", "@how "),
        (r"\b(?:what|which)(?: is| are)? (?:the |a |some )?(?:\w+est |best |good |right |correct |proper |quick |easy "
         r"|simple )?(?:way|ways|method|methods|process|procedure|steps?|instructions?)"
         r"(?: i (?:need|have) to (?:take|follow))?(?: required| needed)?(?: to| for| of)\b", "@how "),
        (r"^(?:the )?(?:way|steps|instructions|guide|process|procedure)(?: on how)? (?:to|for)\b", "@how "),
        (r"\bhow (?:do|can|could|should|would|might|may|does|is it possible)(?: (?:i|you|we|one|someone|somebody|people)"
         r"\b)?(?: go about| be able to| get to| manage to)?(?: to)?\b", "@how "),
        (r"\bhow to\b", "@how "),
        (r"\bwhat (?:do|should|must|can) i (?:need to |have to )?do (?:to|in order to|if i want to)\b", "@how "),
        (r"\bwhat (?:is|are) (?=[^?]{1,60} (?:command|code|css|shortcut|query)\b)", "what is "),
        (r"\bis there (?:a|any) way (?:to|of)\b", "@able "),
        (r"\b(?:is it possible|am i able|are you able|are we able)(?: for (?:me|us|one))? to\b", "@able "),
        (r"\bis it (?:recommended|advisable|advised|a good idea) to\b", "@should "),
        # kinds of questions
        (r"\b(?:at )?(?:what|which) (?:time|date|day)\b", "@when "),
        (r"\b(?:in )?(?:what|which) year\b", "@when "),
        (r"\b(?:in )?(?:what|which) (?:place|location)\b", "@where "),
        (r"\b(?:for what reason|what (?:is|are|was) the reasons?(?: why| that| for)?|why is it that|how come)\b", "@why "),
        (r"\b(?:who|when|where|what|which) (?:is|was) it that\b", lambda found: found[0].split()[0] + " "),
        (r"\b(?:what|how much) (?:does|do|did|will|would) (.{1,60}?) (?:cost|costs)\b", r"@howmuch cost \1 "),
        (r"\bhow much (?:is|are) (?=\d)", "what is "),
        (r"\bhow much (?:is|are|was|were)\b", "@howmuch "),
        (r"^(?:calculate|compute|work out|name|list)\b", "what is "),
        (r"\bwhat is the (?:length|duration) of\b", "@howlong "),
        (r"\bwhat is the height of\b", "@howtall "),
        (r"\bwhat is the distance\b", "@howfar "),
        (r"\bwhat is the age of\b", "@howold "),
        (r"\b(?:what is|what are) the (?:price|cost)s?(?: of| for)?\b", "@howmuch cost "),
        (r"\bfor how long\b", "how long"),
        (r"\bhow far away\b", "how far"),
        (r"\bhow many\b", "@howmany "),
        (r"\bhow much\b", "@howmuch "),
        (r"\bhow (?:long|old|far|often|big|tall|fast|high|deep|wide|heavy|early|late|soon|large|hot|cold|well|likely)\b",
         lambda found: "@" + found[0].replace(" ", "") + " "),
        # meaning
        (r"\bwhat (?:is|are) (?:the )?(?:meaning|definition) of\b", "what @mean "),
        (r"\bwhat (?:does|do) (.{1,60}?) (?:mean|stand for)\b", r"what @mean \1 "),
        (r"^(?:define|the definition of|definition of|meaning of)\b", "what @mean "),
        # phrasal verbs, which their second word decides
        (r"\b(?:turn|turned|turns|turning|switch|switched|switches|switching) on\b", "enable"),
        (r"\b(?:turn|turned|turns|turning|switch|switched|switches|switching) off\b", "disable"),
        (r"\b(turn|turned|turns|turning|switch|switched|switches|switching) (\w+(?: \w+)?) (on|off)\b(?! \w)",
         lambda found: ("enable " if found[3] == "on" else "disable ") + found[2]),
        (r"\b(?:log|logged|logging|logs|sign|signed|signing|signs) ?(?:in|on)(?:to)?\b", "login"),
        (r"\b(?:log|logged|logging|logs|sign|signed|signing|signs) ?(?:out|off)\b", "logout"),
        (r"\b(?:sign|signed|signing|signs) ?up\b", "register"),
        (r"\bget(?:ting)? rid of\b", "remove"),
        (r"\b(?:set|sets|setting) up\b", "setup"),
        (r"\bfind out\b", "find"),
        (r"\bin order to\b", "to"),
        (r"\b(?:each|every) day\b", "daily"),
        (r"\b(?:each|every|per) (week|month|year|hour)\b", r"per-\1"),
        (r"\bper day\b", "daily"),
    )
)  # fmt: skip
"""Of what is left: rewritten one behind the other. Words with ``@`` say what kind of question it is."""

KINDS = frozenset(
    "@how @able @should @when @where @why @who @howmany @howmuch @howlong @howold @howfar @howoften @howbig @howtall"
    " @howfast @howhigh @howdeep @howwide @howheavy @howearly @howlate @howsoon @howlarge @howhot @howcold @howwell"
    " @howlikely @mean".split()
)
QUESTION_WORDS = {"when": "@when", "where": "@where", "why": "@why", "who": "@who", "whom": "@who", "whose": "@whose"}
AUXILIARIES = frozenset(
    "is are am do does can could may should must will would did was were has have had shall might".split()
)
"""A question that begins with one is answered by yes or no, unless it is a polite way to ask for something."""
MODALS = {
    "should": "should", "ought": "should", "must": "must", "required": "must", "need": "must", "can": "may",
    "could": "may", "may": "may", "might": "may", "able": "may", "@able": "may", "@should": "should", "needed": "must", "needs": "must", "possible": "may", "shall": "should",
}  # fmt: skip
PAST = frozenset("was were did had".split())
FUTURE = frozenset("will".split())
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

SYNONYMS: dict[str, str] = {
    word: group.split()[0]
    for group in (
        "enable activate", "disable deactivate", "delete remove erase", "buy purchase", "fix repair mend", "begin start"
        " commence", "big large huge", "bigger larger", "biggest largest", "small little", "quick fast rapid",
        "quickly fast", "fastest quickest", "phone telephone", "movie film", "doctor physician", "car automobile",
        "sofa couch", "photo photograph", "holiday vacation", "cheap inexpensive", "help assistance",
        "smart clever intelligent", "smarter cleverer", "modify alter change", "tv television", "ad advertisement",
        "app application", "info information", "required necessary mandatory", "child kid", "children kids",
        "answer reply", "choose pick", "show display", "happen occur", "percent percentage", "colour color",
        "favourite favorite", "centre center", "organise organize", "tallest highest", "sick ill", "obtain acquire",
        "convert transform", "daily everyday", "setup configure", "write compose", "summarise summarize", "reason cause",
        "advantage benefit pro", "disadvantage drawback con", "weigh weight", "purpose goal", "sum total",
        "only just solely merely exclusively", "all every each", "everyone everybody",
    )
    for word in group.split()
}  # fmt: skip

OPPOSITES: tuple[tuple[str, str], ...] = tuple(
    (left, right)
    for pair in (
        "enable/disable increase/decrease add/remove add/delete create/delete open/close lock/unlock upgrade/downgrade"
        " import/export upload/download buy/sell accept/decline accept/reject approve/reject allow/block allow/deny"
        " allow/forbid start/stop start/end begin/end first/last maximum/minimum max/min most/least more/less more/fewer"
        " best/worst good/bad better/worse high/low higher/lower highest/lowest long/short longer/shorter longest/shortest"
        " big/small bigger/smaller biggest/smallest old/new older/newer oldest/newest old/young hot/cold warm/cool"
        " left/right up/down above/below over/under before/after inside/outside in/out on/off north/south east/west"
        " arrival/departure arrive/depart push/pull encrypt/decrypt encode/decode compress/decompress install/uninstall"
        " legal/illegal safe/dangerous safe/unsafe public/private free/paid male/female man/woman boy/girl mother/father"
        " brother/sister son/daughter husband/wife raw/cooked fresh/dried gain/lose win/lose expand/collapse show/hide"
        " mount/unmount merge/split join/leave login/logout register/unregister subscribe/unsubscribe mute/unmute"
        " input/output ascending/descending horizontal/vertical row/column client/server lend/borrow give/take teach/learn"
        " send/receive ask/answer question/answer question/response import/importer positive/negative internal/external"
        " indoor/outdoor early/late earlier/later earliest/latest today/tomorrow today/yesterday tomorrow/yesterday"
        " morning/evening day/night summer/winter spring/autumn past/future next/previous next/last include/exclude"
        " including/excluding advantage/disadvantage pro/con pros/cons temporary/permanent temporarily/permanently"
        " local/remote manual/automatic manually/automatically gross/net primary/secondary major/minor upper/lower"
        " front/rear front/back top/bottom full/empty strong/weak rich/poor hard/soft hard/easy difficult/easy light/dark"
        " light/heavy thick/thin wide/narrow deep/shallow wet/dry single/married employer/employee buyer/seller"
        " landlord/tenant parent/child adult/child adult/children teacher/student debit/credit deposit/withdraw profit/loss"
        " asset/liability import/export read/write load/save save/discard pause/resume connect/disconnect attach/detach"
        " archive/restore backup/restore fill/drain freeze/thaw heat/cool rise/fall raise/lower ascend/descend"
        " sunrise/sunset odd/even true/false pass/fail present/absent male/female all/none all/some always/never"
        " domestic/international wired/wireless daily/weekly weekly/monthly monthly/yearly per-month/per-year"
        " gas/electric diesel/electric junior/senior brighten/darken brighter/darker lighter/darker"
    ).split()
    for left, right in (pair.split("/"),)
)  # fmt: skip

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
