"""An embedding without a model: hashed n-grams of characters and of words. Good for prompts that are nearly the same.

It knows no meanings: "car" and "automobile" are strangers. It is deterministic, on every machine and in every version
of Python, takes a fraction of a millisecond, and needs nothing.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
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
    vector = np.zeros(DIMENSIONS, np.float32)
    for gram, weight in _grams(unicodedata.normalize("NFKC", text).lower()):
        hashed = xxhash.xxh32_intdigest(gram.encode())
        vector[hashed % DIMENSIONS] += weight if hashed >> 31 else -weight
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector


def _grams(text: str) -> Iterator[tuple[str, float]]:
    words = _WORD.findall(text)
    for word in words:
        padded = f"<{word}>"
        yield f"w {word}", _WORD_WEIGHT
        for length in _CHARACTERS:
            for start in range(max(1, len(padded) - length + 1)):
                yield padded[start : start + length], 1.0
    for left, right in itertools.pairwise(words):
        yield f"p {left} {right}", _PAIR_WEIGHT
