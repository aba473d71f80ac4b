"""How many paraphrases are answered from similar prompts within a bound on errors, and how many of these are wrong.

Half of the families in intents-*.txt, and all in fresh-*.txt, are what guards and embedding were tuned on. The other
half is asked, as streams of requests that begin with nothing stored, beside the best fixed threshold; and each pair of
prompts alone, with nothing learnt. Of hits, intents are the unit: a false hit is counted once for each. Of paraphrases,
different prompts are.

    python benchmarks/similar/evaluate.py [--bound 0.02] [--streams 3] [--files MINE.txt | --pairs MINE.jsonl] [--wrong]
    python benchmarks/similar/evaluate.py --learn     # writes what the embedding begins with

With --files all of their families are asked (the format is in corpus.py). With --pairs, a JSON object on each line is a
pair, {"a": "…", "b": "…", "same": true}: prompts that are the same as another are one intent with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from corpus import Family, family_of, halves, read_families, read_pairs  # noqa: E402
from stream import alone, best_threshold, by_entry, by_threshold, requests_of  # noqa: E402

from kvstore.responses.semantic import lexical  # noqa: E402
from kvstore.responses.semantic.decision import Experience, Outcome  # noqa: E402
from kvstore.responses.semantic.tuned import FILE, tuned_outcomes  # noqa: E402

FREER = [Path(__file__).parent / name for name in ("fresh-1.txt", "fresh-2.txt")]
LEARNT = 4
"""Requests for each prompt that is learnt from."""
ASKED = 3000


def learn(families: list[Family], first: int) -> list[tuple[int, str, float, bool]]:
    """Intent (numbered from ``first`` on), likeness, similarity, and whether the nearest stored prompt had the right
    answer."""
    numbers: dict[str, int] = {}
    for number, prompts in enumerate((prompts for family in families for prompts in family.intents), first):
        numbers |= dict.fromkeys(prompts, number)
    outcomes: list[Outcome] = []
    by_entry(requests_of(families, LEARNT * len(numbers), 1), lexical.embed, Experience(), -1, 1, told=outcomes.append)
    return [(numbers[each.entry], each.likeness, round(each.similarity, 3), each.right) for each in outcomes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bound", type=float, default=0.02)
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--files", type=Path, nargs="+")
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--wrong", action="store_true", help="shows prompts that were told a wrong answer")
    parser.add_argument("--learn", action="store_true")
    options = parser.parse_args()
    tuned, held_out = halves(read_families())
    if options.learn:
        sets = [tuned, *(read_families([file]) for file in FREER)]  # apart: some intents are in several
        learnt = [row for number, each in enumerate(sets) for row in learn(each, 10_000 * number)]
        rows = ",\n".join(json.dumps(row) for row in learnt)
        (ROOT / "kvstore/responses/semantic" / FILE).write_text(f"[{rows}]\n")
        return
    if options.pairs:
        pairs = read_pairs(options.pairs)
        asked = [family_of(pairs)]
    else:
        asked = read_families(options.files) if options.files else held_out
        pairs = [(*pair, True) for family in asked for pair in family.paraphrases()]
        pairs += [(*pair, False) for family in asked for pair in family.hard_negatives()]
        kinds = Counter(family.kind for family in asked for _ in family.hard_negatives())
        print("hard negatives:", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    embed = lru_cache(None)(lexical.embed)
    print(f"{sum(len(family.intents) for family in asked)} intents")
    print(f"each pair alone:      {alone(pairs, embed, Experience(tuned_outcomes()), options.bound)}")
    threshold = best_threshold(requests_of(tuned, ASKED, 1), embed, options.bound)
    for seed in range(options.streams):
        requests = requests_of(asked, ASKED, seed)
        decided = by_entry(requests, embed, Experience(tuned_outcomes()), options.bound, seed)
        print(f"by entry, bound {options.bound:.1%}: {decided}")
        print(f"threshold {threshold:.2f}:       {by_threshold(requests, embed, threshold)}")
        for asked_prompt, told in sorted(set(decided.wrong)) if options.wrong else ():
            print(f"  {asked_prompt!r} was told what {told!r} was")


if __name__ == "__main__":
    main()
