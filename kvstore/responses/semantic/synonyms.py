"""Words that mean the same in a question, and words that mean the contrary.

A word is on a list of synonyms only where exchanging it changes no question that we could think of: what is missing
here costs hits, and what is wrong here costs wrong answers. So there are no words with two meanings that are both common.
"""

from __future__ import annotations

SYNONYMS: dict[str, str] = {
    word: group.split()[0]
    for group in (
        # what is done
        "enable activate", "disable deactivate", "delete remove erase removal deletion", "buy purchase",
        "fix repair mend", "begin start commence", "modify alter change", "answer reply", "choose pick select",
        "show display", "happen occur", "obtain acquire", "convert transform conversion",
        "setup configure configuration config", "write compose", "help assistance", "install installation",
        "translate translation", "calculate compute calculation", "enjoy like", "summarise summarize summary",
        "create creation", "cancel cancellation", "register registration",
        "explain explanation", "ship deliver delivery", "repay reimburse", "quit resign",
        "permit authorise authorize", "prohibit forbid ban", "discover discovery", "invent invention",
        "use utilise utilize", "recommend suggest recommendation suggestion", "verify verification",
        "analyse analyze analysis", "optimise optimize optimization", "recognise recognize", "memorise memorize",
        "preserve preservation", "renew renewal", "withdraw withdrawal", "improve improvement enhance",
        "reduce lessen", "prepare preparation", "gather collect", "invade invasion", "employ hire",
        "locate location",
        # what things are
        "phone telephone", "movie film", "doctor physician", "car automobile", "sofa couch", "photo photograph",
        "holiday vacation", "tv television", "ad advertisement", "app application", "info information", "child kid",
        "reason cause", "advantage benefit pro upside", "disadvantage drawback con downside", "purpose goal aim",
        "sum total", "shop store", "folder directory dir", "city town", "job occupation", "salary wage",
        "error mistake", "attorney lawyer", "infant baby", "fridge refrigerator", "garbage trash rubbish",
        "highway motorway freeway", "petrol gasoline", "lorry truck", "autumn fall", "flat apartment",
        "airplane aeroplane plane", "bike bicycle", "exam examination", "lab laboratory", "maths math mathematics",
        "human person", "illness disease", "sport sports", "warranty guarantee", "luggage baggage", "parcel package",
        "element item", "author writer", "javascript js", "typescript ts", "postgresql postgres", "kubernetes k8s",
        "function func", "database db", "command cmd", "parameter param", "variable var", "repository repo",
        "environment env", "documentation docs", "difference distinction", "bathroom restroom", "stove cooker",
        "pants trousers", "sweater jumper", "gift present", "tip advice", "image picture", "creator maker",
        # how they are
        "big large huge", "bigger larger", "biggest largest", "small little tiny", "smallest tiniest",
        "quick fast rapid quickly", "fastest quickest", "cheap inexpensive affordable", "smart clever intelligent",
        "smarter cleverer", "required necessary mandatory obligatory compulsory", "tallest highest", "taller higher",
        "sick ill", "daily everyday", "newest latest", "main primary", "difficult hard", "impolite rude",
        "dangerous unsafe harmful hazardous", "expensive costly pricey", "legal lawful legally", "illegal unlawful",
        "polite courteous", "correct right", "incorrect wrong", "whole entire", "annual yearly per-year annually",
        "monthly per-month", "weekly per-week", "hourly per-hour", "strange weird", "beautiful pretty", "angry mad",
        "simple easy", "simpler easier", "simplest easiest", "only just solely merely exclusively", "all every each",
        "everyone everybody", "anyone anybody", "someone somebody", "immediately instantly", "often frequently",
        "approximately roughly", "abroad overseas", "tasty delicious", "typical usual", "percent percentage",
        "weigh weight", "nearby near",
        # of several parts of speech
        "arrival arrive", "departure depart", "solution solve", "dict dictionary", "intro introduction", "programmer developer",
        "faucet tap", "quantity amount", "veggie vegetable", "faster quicker", "combine merge", "iterate loop",
        "substitute replace replacement", "empty blank", "africa african", "europe european", "asia asian", "trip journey",
        "responsibility duty", "pregnancy pregnant", "nodejs node", "terminate end kill", "multiply multiplied",
        # how they are written
        "colour color", "favourite favorite", "centre center", "organise organize", "neighbour neighbor",
        "behaviour behavior", "grey gray", "licence license", "tyre tire", "programme program",
        "ok okay", "theatre theater",
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
