"""Embeddings of a ``sentence-transformers`` model in a folder that the operator has. Nothing is downloaded.

It runs on the CPU, one text at a time. The library is imported where it is used: it needs torch, and few want it.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import ConfigError, ResourceError
from kvstore.responses.embedding.failure import EmbeddingError, checked

_CHUNK = 1 << 20
_SIGN = "modules.json"
"""Every such folder has it."""


class FolderEmbedder:
    """Safe for threads.

    Args:
        folder: as ``SentenceTransformer.save`` writes it.

    Raises:
        ConfigError: there is no such model.
        ResourceError: the library is missing, or can't load it.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / _SIGN).is_file():
            raise ConfigError(f"{folder} is no folder of a sentence-transformers model: it has no {_SIGN}")
        try:
            from sentence_transformers import SentenceTransformer
        except ModuleNotFoundError as error:
            raise ResourceError(
                f"{error.name} is missing; pip install 'kvstore-offload[sentence-transformers]'"
            ) from error
        try:
            self._digest = _digest(folder)
            self._model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        except Exception as error:
            raise ResourceError(f"the sentence-transformers model {folder} can't be loaded: {error}") from error
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Of its vectors: those of other weights, or of another configuration, are never compared with them."""
        return f"folder {self._digest}"

    def __call__(self, text: str) -> npt.NDArray[np.float32]:
        """The embedding of a text. [dimensions]

        Raises:
            EmbeddingError: there is none.
        """
        try:
            with self._lock:
                (vector,) = self._model.encode([text], convert_to_numpy=True, show_progress_bar=False)
        except Exception as error:
            raise EmbeddingError("failed", f"the sentence-transformers model failed: {error}") from error
        return checked(np.asarray(vector, np.float32), None)


def _digest(folder: Path) -> str:
    """Of all files: names and contents."""
    hashed = xxhash.xxh3_128()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        hashed.update(str(path.relative_to(folder)).encode() + b"\0")
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                hashed.update(chunk)
    return hashed.hexdigest()
