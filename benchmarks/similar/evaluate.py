"""How many paraphrases are answered from similar prompts within a bound on errors, and how many of these are wrong.

Half of the families of prompts beside this file is what guards and embedding were tuned on; the other half is asked, as
streams of requests that begin with nothing stored. Intents are the unit: a false hit is counted once for each.

    python benchmarks/similar/evaluate.py [--bound 0.02] [--streams 3] [--files MINE.txt]
    python benchmarks/similar/evaluate.py --learn     # writes what the embedding begins with

With --files all of their families are asked (the format is in corpus.py).
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

from corpus import Family, halves, read_families  # noqa: E402
from stream import best_threshold, by_entry, by_threshold, requests_of  # noqa: E402

from kvstore.responses.semantic import lexical  # noqa: E402
from kvstore.responses.semantic.decision import Experience, Outcome  # noqa: E402
from kvstore.responses.semantic.tuned import FILE, tuned_outcomes  # noqa: E402

LEARNT = 4000
ASKED = 3000


def learn(families: list[Family]) -> list[tuple[int, str, float, bool]]:
    """Intent, likeness, similarity, and whether the nearest stored prompt had the right answer."""
    numbers: dict[str, int] = {}
    for number, prompts in enumerate(prompts for family in families for prompts in family.intents):
        numbers |= dict.fromkeys(prompts, number)
    outcomes: list[Outcome] = []
    by_entry(requests_of(families, LEARNT, 1), lexical.embed, Experience(), -1, 1, told=outcomes.append)
    return [(numbers[each.entry], each.likeness, round(each.similarity, 3), each.right) for each in outcomes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bound", type=float, default=0.02)
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--files", type=Path, nargs="+")
    parser.add_argument("--learn", action="store_true")
    options = parser.parse_args()
    tuned, held_out = halves(read_families())
    if options.learn:
        rows = ",\n".join(json.dumps(row) for row in learn(tuned))
        (ROOT / "kvstore/responses/semantic" / FILE).write_text(f"[{rows}]\n")
        return
    asked = read_families(options.files) if options.files else held_out
    embed = lru_cache(None)(lexical.embed)
    kinds = Counter(family.kind for family in asked for _ in family.hard_negatives())
    pairs = sum(1 for family in asked for _ in family.paraphrases())
    print(
        f"{sum(len(f.intents) for f in asked)} intents, {pairs} pairs of paraphrases, {kinds.total()} hard negatives:"
    )
    print(", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    threshold = best_threshold(requests_of(tuned, ASKED, 1), embed, options.bound)
    for seed in range(options.streams):
        requests = requests_of(asked, ASKED, seed)
        decided = by_entry(requests, embed, Experience(tuned_outcomes()), options.bound, seed)
        print(f"by entry, bound {options.bound:.1%}:  {decided}")
        print(f"threshold {threshold:.2f}:        {by_threshold(requests, embed, threshold)}")


if __name__ == "__main__":
    main()
