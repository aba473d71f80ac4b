"""How many paraphrases are answered from similar prompts within a bound on errors, and how many of these are wrong.

Half of the families in intents-*.txt, and all in fresh-1.txt to fresh-3.txt, are what guards and embedding were tuned
on. The other half is asked, as streams of requests that begin with nothing stored, beside the best fixed threshold; and
each pair of prompts alone, with nothing learnt. Of hits, intents are the unit: a false hit is counted once for each. Of
paraphrases, different prompts are.

    python benchmarks/similar/evaluate.py [--bound 0.02] [--streams 3] [--requests 3000] [--wrong]
        [--files MINE.txt | --pairs MINE.jsonl]

With --files all of their families are asked (the format is in corpus.py). With --pairs, a JSON object on each line is a
pair, {"a": "…", "b": "…", "same": true}: prompts that are the same as another are one intent with it. With --embedding
and its kin, as a proxy has them, it is another embedding.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from corpus import family_of, halves, read_families, read_pairs  # noqa: E402
from stream import alone, best_threshold, by_entry, by_threshold, requests_of  # noqa: E402

from kvstore.cli import embedding_flags  # noqa: E402
from kvstore.responses.semantic.beginning import beginning  # noqa: E402
from kvstore.responses.semantic.decision import Experience  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bound", type=float, default=0.02)
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000, help="of each stream")
    parser.add_argument("--files", type=Path, nargs="+")
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--wrong", action="store_true", help="shows prompts that were told a wrong answer")
    embedding_flags.add_to(parser, "--")
    options = parser.parse_args()
    tuned, held_out = halves(read_families())
    if options.pairs:
        pairs = read_pairs(options.pairs)
        asked = [family_of(pairs)]
    else:
        asked = read_families(options.files) if options.files else held_out
        pairs = [(*pair, True) for family in asked for pair in family.paraphrases()]
        pairs += [(*pair, False) for family in asked for pair in family.hard_negatives()]
        kinds = Counter(family.kind for family in asked for _ in family.hard_negatives())
        print("hard negatives:", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    embedding = embedding_flags.read(options, "--")
    embed = lru_cache(None)(embedding.vector)
    print(f"{sum(len(family.intents) for family in asked)} intents")
    print(f"each pair alone:      {alone(pairs, embed, Experience(beginning()), options.bound)}")
    threshold = best_threshold(requests_of(tuned, 3000, 1), embed, options.bound)
    for seed in range(options.streams):
        requests = requests_of(asked, options.requests, seed)
        decided = by_entry(requests, embed, Experience(beginning()), options.bound, seed)
        print(f"by entry, bound {options.bound:.1%}: {decided}")
        print(f"threshold {threshold:.2f}:       {by_threshold(requests, embed, threshold)}")
        for asked_prompt, told in sorted(set(decided.wrong)) if options.wrong else ():
            print(f"  {asked_prompt!r} was told what {told!r} was")


if __name__ == "__main__":
    main()
