"""What it means that a prompt has no embedding."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Why = Literal["late", "failed", "skipped"]


class EmbeddingError(Exception):
    """There is no embedding: the request is computed.

    Args:
        why: ``late``: not by the deadline. ``failed``: there is none, or it can't be used. ``skipped``: it failed again
            and again, so that it was not asked.
        words: for people.
    """

    def __init__(self, why: Why, words: str) -> None:
        super().__init__(words)
        self.why: Why = why


def checked(vector: npt.NDArray[np.float32], dimensions: int | None) -> npt.NDArray[np.float32]:
    """A vector that can be compared.

    Args:
        vector: [dimensions] as it came.
        dimensions: that it must have; None: any.

    Raises:
        EmbeddingError: it has other dimensions or none, is not finite, or is of length 0.
    """
    if vector.ndim != 1 or not len(vector):
        raise EmbeddingError("failed", f"an embedding has the shape {vector.shape}, not that of a vector")
    if dimensions is not None and len(vector) != dimensions:
        raise EmbeddingError(
            "failed",
            f"an embedding has {len(vector)} dimensions, those before had {dimensions}: is it another model?"
            " Start the proxy again to begin anew with it",
        )
    length = float(np.linalg.norm(vector))
    if not 0 < length < float("inf"):
        raise EmbeddingError("failed", f"an embedding has the length {length:g}: nothing can be compared with it")
    return vector
