"""Ways to say the same in a question that are more than a word, as patterns with what is put in their place."""

from __future__ import annotations

import re
from collections.abc import Callable

Put = str | Callable[[re.Match[str]], str]

_LANGUAGES = (
    "english|spanish|french|german|italian|portuguese|dutch|russian|chinese|mandarin|japanese|korean|arabic|latin|greek"
    "|polish|turkish|hindi|swedish|danish|norwegian|finnish|hebrew|czech|hungarian|ukrainian|romanian"
)
_TOOLS = (
    "python|git|bash|sql|mysql|postgres|postgresql|sqlite|docker|linux|ubuntu|debian|windows|macos|java|javascript|js"
    "|typescript|css|html|excel|word|outlook|vim|emacs|pandas|numpy|react|rust|golang|php|ruby|swift|kotlin|kubernetes"
    "|kubectl|powershell|regex|django|flask|node|npm|terraform|ansible|nginx|grep|sed|awk|latex|matlab|r|c|photoshop"
)
_MADE = (
    "recipe|recipes|list|example|examples|tips|idea|ideas|poem|haiku|limerick|story|joke|jokes|summary|explanation|letter"
    "|email|essay|song|speech|outline|template|overview|script|function|query|regex|sentence|paragraph|slogan|caption"
    "|headline|quiz|suggestions|recommendations"
)
_END = r"(?=[ ?.!]*$)"
_WHO = r"(?:i|you|we|one|someone|somebody|people|they)"

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
        r"^[, ]*(?:do|would) you (?:happen to )?know\b",
        r"^[, ]*any (?:idea|clue)\b(?: about| on)?(?= (?:how|what|why|when|where|who|which|whether|if))",
        r"^[, ]*(?:tell|explain|show|teach) (?:to )?(?:me|us)(?: again)?\b",
        r"^[, ]*let (?:me|us) know\b",
        r"^[, ]*(?:help me|walk me through)(?: to)?(?: understand)?\b(?! with)",
        r"^[, ]*explain(?: to me)?\b",
        r"^[, ]*i just (?=want|need|would)",
        r"^[, ]*give me(?: a list of)?\b",
        r"^[, ]*(?:i (?:need|want|would like|am looking for)|do you have|can i have|could i (?:get|have)|write|compose"
        rf"|draft|create|generate|make|provide|recommend|suggest)(?: me| us)?(?= (?:[\w-]+ ){{0,4}}(?:{_MADE})\b)",
    )
)
"""What is said around a question, and asks nothing; taken away one behind the other."""

AGREED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), into)
    for pattern, into in (
        (r"\b(?:united states of america|united states|u\.s\.a\.|u\.s\.|usa)(?=\W|$)", "Unitedstates"),
        (r"\b(?-i:US)\b", "Unitedstates"),
        (r"\b(?:united kingdom|u\.k\.|uk)(?=\W|$)", "Unitedkingdom"),
        (r"\b(?:european union|eu)\b", "Europeanunion"),
        (r"\bunited nations\b", "UN"),
        (r"\bnew york city\b", "NYC"),
        (r"\b(?:first world war|world war (?:1|i|one)|wwi|ww1|ww i)\b", "Worldwarone"),
        (r"\b(?:second world war|world war (?:2|ii|two)|wwii|ww2|ww ii)\b", "Worldwartwo"),
        (r"\bchief executive(?: officer)?\b", "CEO"),
        (r"\bchief financial officer\b", "CFO"),
        (r"\bchief technology officer\b", "CTO"),
        (r"\bartificial intelligence\b", "AI"),
        (r"\bvalue[- ]added tax\b", "VAT"),
        (r"\bgross domestic product\b", "GDP"),
        (r"\b(?:curriculum vitae|résumé|cv)\b", "resume"),
        (r"\b(?:2fa|two[- ]factor auth(?:entication)?)\b", "twofactor"),
        (r"\bcapital city\b", "capital"),
        (r"\b(?:cell|mobile|cellular) ?phone(s?)\b", r"phone\1"),
        (r"\b(laptop|notebook) computer(s?)\b", r"\1\2"),
        (r"\be-mail", "email"),
        (r"\bwi-fi\b", "wifi"),
        (r"\bthe year (?=\d{4}\b)", ""),
        (r"(?<=\w)\s*=\s*\?\s*$", "?"),
    )
)
"""Names that are written in several ways."""


def _between(found: re.Match[str]) -> str:
    """What is between two things is between them in either order."""
    pair = sorted((found["one"], found["other"]), key=lambda each: re.sub(r"^(?:a|an|the|my) ", "", each))
    return f"between {pair[0]} and {pair[1]} "


def _difference(found: re.Match[str]) -> str:
    return f" difference {_between(found)}"


_VERSUS = (
    rf"^(?:what is )?(?P<one>[^,:?]{{1,40}}?) (?:vs\.?|versus) (?P<other>[^,:?]{{1,40}}?)"
    rf"(?:[,:] ?what is the difference)?{_END}"
)
_DIFFER = (
    rf"\bhow (?:does|do) (?P<one>.{{1,40}}?) differ from (?P<other>.{{1,40}}?){_END}",
    rf"\bhow (?:does|do) (?P<one>.{{1,40}}?) and (?P<other>.{{1,40}}?) differ{_END}",
    rf"\bhow (?:is|are) (?P<one>.{{1,40}}?) different from (?P<other>.{{1,40}}?){_END}",
    rf"\bwhat distinguishes (?P<one>.{{1,40}}?) from (?P<other>.{{1,40}}?){_END}",
)


def _aspects() -> list[tuple[str, Put]]:
    """How tall something is, is its height."""
    made: list[tuple[str, Put]] = []
    for noun, kind in (
        ("height", "@howtall"), ("age", "@howold"), ("depth", "@howdeep"), ("width", "@howwide"), ("weight", "@howheavy"),
        ("distance", "@howfar"), ("speed", "@howfast"), ("length", "@howlong"), ("duration", "@howlong"),
        ("(?:size|dimensions)", "@howbig"), ("location", "@where"), ("(?:price|cost)s?", "@howmuch cost"),
    ):  # fmt: skip
        units = (
            r" in (?:feet|foot|ft|meters|metres|m|miles|km|kilometers|kilometres|cm|centimeters|inches|kg|pounds|grams)"
        )
        made.append((rf"\b(?:what (?:is|are|was|were) )?(?:the )?{noun} (?:of|for)\b", f"{kind} "))
        made.append((r"\bthe distance (?=from)", "@howfar "))
        made.append(
            (
                rf"^(?:what (?:is|are|was|were) )?(?!@)(?P<of>[^@?]{{1,50}}?) {noun}(?=[ ?.!]*$|{units})",
                rf"{kind} \g<of>",
            )
        )
    return made


_HEADINGS: tuple[tuple[str, str], ...] = (
    (r"meanings?|definitions?|explained|explanation", r"what @mean \g<of>"),
    (r"instructions|steps|tutorial|guide|step by step", r"@how \g<of>"),
    (r"reasons?|why", r"@why \g<of>"),
    (r"frequency", r"@howoften \g<of>"),
    (r"duration", r"@howlong \g<of>"),
    (r"year", r"@whenyear \g<of>"),
)
"""What a search ends with."""


def _able(found: re.Match[str]) -> str:
    return f"@able {found['who'] or ''} "


_PHRASES: tuple[tuple[str, Put], ...] = (
    # words of a programming language
    (r"\b(is|in|as|or|and|if|for|with|on|not|while|by|to|at|from|of)(?= (?:operator|keyword|statement|loop|clause"
     r"|expression|condition|block)s?\b)", r"\1zz"),
    # two things
    (rf"^({_TOOLS}) (?P<one>\S+) (?:vs\.?|versus) (?P<other>\S+){_END}", lambda found: f"{_difference(found)} in {found[1]}"),
    *((pattern, _difference) for pattern in _DIFFER),
    (_VERSUS, _difference),
    (r"\bdifferences? between (?P<one>.{1,40}?) (?:and|vs\.?|versus) (?P<other>.{1,40}?)(?=[ ?.!,]*$|,| in | for | when )", _difference),
    (r"\b(?:difference|distance) (?P<one>[a-z' ]{1,30}?) ?- ?(?P<other>[a-z' ]{1,30}?)" + _END,
     lambda found: f"{found[0].split()[0]} {_between(found)}"),
    (r"\bbetween (?P<one>[a-z' ]{1,40}?) and (?P<other>[a-z' ]{1,40}?)(?=[ ?.!,]*$|,| in | for | when )", _between),
    # into another language
    (rf"\bhow (?:do|does|would|can|could|to)(?: {_WHO})? say (.+?) in ({_LANGUAGES})\b", r"translate \1 to \2"),
    (rf"\b(?:what is )?the (?:word|term|translation|expression) (?:for|of) (.+?) in ({_LANGUAGES})\b", r"translate \1 to \2"),
    (rf"\b(?:what is )?(?:the )?({_LANGUAGES}) (?:word |term |translation )?(?:for|of) (.+?){_END}", r"translate \2 to \1"),
    (rf"\bwhat is ([^?.!,]+?) in ({_LANGUAGES}){_END}", r"translate \1 to \2"),
    (rf"\btranslate ([^?.!]+?) in ({_LANGUAGES})\b", r"translate \1 to \2"),
    # what to do about it
    (r"[,.;:]? *\bwhat (?:can|do|should|could|must|shall) (?:i|we) do\b(?: about (?:it|this|that)| now| then)?"
     r"(?=[ ?.!]*$|,? (?:if|when)\b)", " @fix "),
    (r"[,.;:]? *\bhow (?:do|can|could|should|to)(?: i| we)? (?:fix|solve|resolve) (?:it|this|that)" + _END, " @fix "),
    (r"(?<=\w)[,.;:-]? (?:help|need help|any help)" + _END, " @fix "),
    (r"@fix ,? ?(?:if|when)\b", "@fix "),
    # ways to ask how
    (rf"\b(?:in|with|using|for) ({_TOOLS})[:,] ", r"in \1 "),
    (rf"^({_TOOLS}): (?!what|why|when|where|who|which|how|is |are |do |does |can |meaning|difference)(?=[a-z]+ )", r"@how in \1 "),
    (rf"^({_TOOLS}): ", r"in \1 "),
    (r"^(?:i (?:am trying|want|need|would like|have) to )?(.+?)[,:]? how(?: to| (?:do|can|could|should) i do (?:it|that"
     r"|this)| does (?:it|that|this) work)?[ ?.!]*$", r"@how \1 "),
    (r"^(?:some |any )?(?:good |best )?(?:tips|advice|guide|tutorial|instructions|ways)(?: on how)? (?:to|for|on)\b", "@how "),
    (r"\bwhat (?:is|are) the (?:(\w+) )?(?:command|syntax) (?:to|for|that)\b", lambda found: f"@how {found[1] or ''} "),
    (r"\b(?:what|which)(?: is| are)? (?:the |a |some |any )?(?:best |good |right |correct |proper |easy |easiest "
     r"|simple |simplest |recommended |usual )?(?:way|ways|method|methods|process|procedure|steps?|instructions?)"
     r"(?: i (?:need|have) to (?:take|follow))?(?: required| needed)?(?: to| for| of)\b", "@how "),
    (r"\bwhat (?:is|are) (?:the |a )?(\w+est|quick|fast|cheap|safe) (?:way|method)s?(?: to| of| for)\b", r"@how \1 "),
    (r"^(?:the )?(?:best |right |easiest )?(?:way|steps|instructions|guide|process|procedure)(?: on how)? (?:to|for)\b", "@how "),
    (rf"\bwhat (?:do|should|must|can) {_WHO} (?:need to |have to )?do (?:to|in order to|if i want to)\b", "@how "),
    (rf"\bhow (?:do|does|can|could|should|would|might|may|is it possible)(?: {_WHO}\b)?(?: go about| be able to"
     r"| get to| manage to)?(?: to)?\b", "@how "),
    (r"^how (?:is|are) (.{1,50}?) (made|done|built|written|sent|\w\w+ed)(?: of)?" + _END, r"@how \2 \1"),
    (r"\bhow to\b", "@how "),
    (r"\bwhat (?:is|are) (?=[^?]{1,60} (?:command|code|css|shortcut|query)\b)", "what is "),
    (r"\b(?:a |any |some )?(?:good )?recipes? for\b", "@how make "),
    (r"^(?:what is |a |any |some )*(?:good )?(?!@)([^@]{1,50}?) recipes?" + _END, r"@how make \1"),
    # whether one can, may, should, must
    (r"\bis there (?:a|any) (?:way|possibility|chance) (?:to|of|that)\b", "@able "),
    (r"\bis it possible (?:that|for)\b", "@able "),
    (r"\b(?:is|would) it (?:ok|okay|all right|alright|fine|allowed|permitted|acceptable|possible)(?: for (?P<who>[^?]"
     r"{1,40}?))? (?:to|if i)\b", _able),
    (r"^(?:is|are|am) (?P<who>[^@?]{1,40}?) (?:able|allowed|permitted) to\b", _able),
    (r"\bis it (?:recommended|advisable|advised|a good idea)(?: for [^?]{1,30}?)? to\b", "@should "),
    (r"\b(?:is|are|am) (?:(\w+) )?(?:required|obliged|obligated|supposed) to\b", lambda found: f"must {found[1] or ''}"),
    (r"\bis it (?:necessary|mandatory|required|compulsory|obligatory) to\b", "must "),
    (r"\b(?:have|has|had) (?:got )?to\b(?= [a-z])", "must"),
    # kinds of questions
    (r"\b(?:at )?(?:what|which) time\b", "@whentime "),
    (r"\b(?:on )?(?:what|which) (?:date|day)\b", "@whenday "),
    (r"\b(?:in )?(?:what|which) year\b", "@whenyear "),
    (r"\b(?:in )?(?:what|which) (?:place|location)\b", "@where "),
    (rf"\bwhere (?:can|could|do|does|would|might) {_WHO} find\b", "@where "),
    (r"\bwhere (?:is|are) ([^?]{1,50}?) (?:located|situated|to be found)\b", r"@where \1"),
    (r"\bwhere about(?:s)?\b", "where"),
    (r"\b(?:for what reason|what (?:is|are|was) the reasons?(?: why| that| for)?|why is it that|how come)\b", "@why "),
    (r"^(?:the )?reasons? (?:why|that)\b", "@why "),
    (r"^what makes (?!an? |the (?:best|perfect|ideal))", "@why "),
    (r"\b(?:who|when|where|what|which) (?:is|was) it that\b", lambda found: found[0].split()[0] + " "),
    (r"\bwho (?:is|was|are|were) (?:the )?(?:author|writer)s? of\b", "who wrote"),
    (r"\bwho (?:is|was|are|were) (?:the )?(invent|direct|creat|paint|compos|found|design|discover|produc|publish)(?:or|er)s? of\b",
     r"who \1ed"),
    (rf"\bhow much (?:does|do|did|will) {_WHO} charge for\b", "@howmuch cost "),
    (r"\bhow much (?:does|do|did) (.{1,50}?) weigh\b", r"@howheavy \1"),
    (r"\bwhat (?:does|do|did) (.{1,50}?) weigh\b", r"@howheavy \1"),
    (r"\b(?:what|how much)(?: money)? (?:does|do|did) (.{1,50}?) (?:earn|get paid)\b", r"what is salary of \1"),
    (r"\bhow much(?: money)? (?:does|do|did) (an? .{1,50}?|\w+s) make\b", r"what is salary of \1"),
    (r"\b(?:what|how much) (?:does|do|did|will|would) (.{1,60}?) (?:cost|costs)\b", r"@howmuch cost \1 "),
    (r"\bhow (?:expensive|costly|pricey|cheap) (?:is|are|was|were)\b", "@howmuch cost "),
    (r"\bhow much (?:is|are) (?=\d|(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|\w+ty)\b)", "what is "),
    (r"\bhow much (?:is|are|was|were) (?!in\b|left\b|there\b|too\b)", "@howmuch cost "),
    (r"^(?:calculate|compute|work out|name|list)\b", "what is "),
    (r"\bnumber of (?:inhabitants|people)(?: living)? (?:of|in)\b", "population of"),
    (r"\bhow many (?:people|inhabitants|residents) (?:live|are living|reside)(?: there)? in\b", "what is population of"),
    (r"\bhow many (?:people|inhabitants|residents) lived(?: there)? in\b", "what was population of"),
    (r"\bhow many (?:inhabitants|residents) (?:does|do) (.{1,40}?) have\b", r"what is population of \1"),
    (r"^(?:what (?:is|was) )?(?:the )?number of\b", "@howmany "),
    (r"\b(?:what|which) (?:amount|quantity) of\b", "@howmuch "),
    *_aspects(),
    *((rf"^(?!what|which|how|who|is|are|do|does|can)(?P<of>[^@?,.]{{3,60}}?) (?:{word}){_END}", put) for word, put in _HEADINGS),
    (r"^(?P<of>[a-z ]{1,40}?\w+ing) time" + _END, r"@howlong \g<of>"),
    (r"^(?:the )?reasons? for\b", "@why "),
    (r"^(?:name of )?(?:the )?(?:author|writer)s? of\b", "who wrote"),
    (r"\bwhat size (?:is|are)\b", "@howbig "),
    (r"\bfor how long\b", "how long"),
    (r"\bhow far away\b", "how far"),
    (r"\bhow many\b", "@howmany "),
    (r"\bhow much\b", "@howmuch "),
    (r"\bhow high\b", "@howtall "),
    (r"\bhow large\b", "@howbig "),
    (r"\bhow frequently\b", "@howoften "),
    (r"\bhow (?:long|old|far|often|big|tall|fast|deep|wide|heavy|early|late|soon|hot|cold|well|likely)\b",
     lambda found: "@" + found[0].replace(" ", "") + " "),
    # meaning
    (r"\bwhat (?:is|are) (?:the )?(?:meaning|definition) of\b", "what @mean "),
    (r"\bwhat (?:is|are) meant by\b", "what @mean "),
    (r"\bwhat (?:does|do) (.{1,60}?) (?:mean|stand for)\b", r"what @mean \1 "),
    (r"^(?:define|the definition of|definition of|meaning of)\b", "what @mean "),
    (r"@mean +(?:the )?(?:word|term|phrase|expression|acronym|abbreviation) ", "@mean "),
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
    (r"\bsum(?:s|med|ming)? up\b", "summarise"),
    (r"\bfind out\b", "find"),
    (r"\bin order to\b", "to"),
    (r"\b(?:come|comes|came) with\b", "have"),
    (r"\bcontains?\b", "have"),
    (r"\bgood for (?:you|me|one|us|your health|my health|the health)\b", "healthy"),
    (r"\bbad for (?:you|me|one|us|your health|my health|the health)\b", "unhealthy"),
    (r"\bagainst the law\b", "illegal"),
    (r"\b(?:for free|free of charge|at no cost)\b", "free"),
    (r"\b(?:close|near) to\b", "near"),
    (r"\b(?:at the moment|right now|these days|nowadays|at present)\b", "currently"),
    (r"\bmost recent\b", "newest"),
    (r"\b(?:each|every|per) day\b", "daily"),
    (r"(@how(?:much|many|often)\b.*\w) an? day(?=[ ?.!]*$)", r"\1 daily"),
    (r"\b(?:each|every|per) (week|month|year|hour)\b", r"per-\1"),
    (r"(@how(?:much|many|often)\b.*\w) an? (week|month|year|hour)(?=[ ?.!]*$)", r"\1 per-\2"),
)  # fmt: skip
PHRASES: tuple[tuple[re.Pattern[str], Put], ...] = tuple((re.compile(pattern), put) for pattern, put in _PHRASES)
"""Of what is left: rewritten one behind the other. Words with ``@`` say what kind of question it is."""

PAYLOAD = re.compile(
    r"^(?P<head>[^:\n]{0,160}\b(?:translate|correct|proofread|check|rewrite|rephrase|paraphrase|summari[sz]e|fix|edit"
    r"|classify|spell|pronounce|sentence|text|word|phrase|paragraph|email|code|following|this)\b[^:\n]{0,80}):\s+(?P<rest>\S.*)$",
    re.IGNORECASE | re.DOTALL,
)
"""What is to be worked on stands behind a colon: each letter of it counts."""
