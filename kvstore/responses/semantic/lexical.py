"""An embedding without a model: hashed n-grams of characters and of words. Good for prompts that are nearly the same.

It knows no meanings: "car" and "automobile" are strangers. It is deterministic, on every machine and in every version
of Python, takes a tenth of a millisecond for a question and one for a thousand characters, and needs nothing.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

DIMENSIONS = 512
_CHARACTERS = (3, 4)
_WORD_WEIGHT, _PAIR_WEIGHT = 2.0, 1.0
_WORD = re.compile(r"\w+")


def embed(text: str) -> npt.NDArray[np.float32]:
    """A vector of length 1 and :data:`DIMENSIONS` for a text; all zeros for one without letters and digits."""
    hashes: list[int] = []
    weights: list[float] = []
    for gram, weight in _grams(_WORD.findall(unicodedata.normalize("NFKC", text).lower())):
        hashes.append(xxhash.xxh32_intdigest(gram.encode()))
        weights.append(weight)
    hashed = np.array(hashes, np.uint32)
    signed = np.where(hashed >> 31, weights, np.negative(weights))
    vector = np.bincount(hashed % DIMENSIONS, signed, DIMENSIONS).astype(np.float32)
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector


def _grams(words: list[str]) -> Iterator[tuple[str, float]]:
    """Each once, with what all of its places weigh together."""
    for word, count in Counter(words).items():
        padded = f"<{word}>"
        yield f"w {word}", _WORD_WEIGHT * count
        for length in _CHARACTERS:
            for start in range(max(1, len(padded) - length + 1)):
                yield padded[start : start + length], count
    for (left, right), count in Counter(itertools.pairwise(words)).items():
        yield f"p {left} {right}", _PAIR_WEIGHT * count
