"""Flags for the embedding by which similar prompts are found: the proxy's have a prefix."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from kvstore.cli.responses_store import read_secret
from kvstore.errors import ConfigError
from kvstore.responses.semantic import lexical
from kvstore.security.secret_files import check_private

_LEXICAL = "lexical"
_SCHEMES = ("http://", "https://")
_DEADLINE = 50.0
_LONGEST_DEADLINE = 10_000.0
KEY_VARIABLE = "KVSTORE_RESPONSES_EMBEDDING_KEY"
"""Of the environment: the API key, where no file is named."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """What :class:`kvstore.responses.similar.Similar` is told of it."""

    vector: Callable[[str], npt.NDArray[np.float32]]
    vectors: str
    deadline: float | None
    close: Callable[[], None] = lambda: None


def add_to(parser: argparse.ArgumentParser, prefix: str) -> None:
    """Add them.

    Args:
        parser: of the command.
        prefix: as ``--responses-``, or ``--``.
    """
    parser.add_argument(
        f"{prefix}embedding",
        metavar="WHAT",
        help="by what similar prompts are found: lexical (built in: the same words), the URL of an OpenAI-compatible"
        " API with an embedding model, as http://10.0.0.7:8300/v1, or a folder with a sentence-transformers model"
        " (default: lexical)",
    )
    parser.add_argument(f"{prefix}embedding-model", metavar="NAME", help="the model's name behind that URL")
    parser.add_argument(
        f"{prefix}embedding-key-file",
        metavar="FILE",
        type=Path,
        help=f"the API key for it (default: {KEY_VARIABLE} of the environment, or none)",
    )
    parser.add_argument(
        f"{prefix}embedding-deadline",
        metavar="MS",
        type=float,
        help="milliseconds that a request waits for its embedding before it is computed (default: 50)",
    )


def read(options: argparse.Namespace, prefix: str) -> Embedding:
    """The embedding.

    Raises:
        ConfigError: a value can't be used.
        ResourceError: sentence-transformers is missing, or can't load the folder.
    """
    what, model, key_file, deadline = given(options, prefix).values()
    name = f"{prefix}embedding"
    is_api = what is not None and what.startswith(_SCHEMES)
    if not is_api and (model is not None or key_file is not None):
        raise ConfigError(f"{name}-model and {name}-key-file are for an API: give its URL by {name}")
    if what is None or what == _LEXICAL:
        if deadline is not None:
            raise ConfigError(f"{name}-deadline is for a model; the lexical embedding takes no time")
        return Embedding(lexical.embed, _LEXICAL, None)
    deadline = _DEADLINE if deadline is None else deadline
    if not 0 < deadline <= _LONGEST_DEADLINE:
        raise ConfigError(f"{name}-deadline must be above 0 and at most {_LONGEST_DEADLINE:g}, got {deadline:g}")
    if is_api:
        from kvstore.responses.embedding.api import ApiEmbedder

        if model is None:
            raise ConfigError(f"{name} URL needs {name}-model")
        if not _is_url(what):
            raise ConfigError(f"{name} {what!r} is no URL of a server")
        api = ApiEmbedder(what, model, deadline / 1000, _key(key_file))
        return Embedding(api, api.name, deadline / 1000, api.close)
    if "://" in what:
        raise ConfigError(f"{name} is {_LEXICAL}, a URL with {' or '.join(_SCHEMES)}, or a folder, not {what!r}")
    from kvstore.responses.embedding.folder import FolderEmbedder

    folder = FolderEmbedder(Path(what))
    return Embedding(folder, folder.name, deadline / 1000)


def given(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The values of all of them, by the names of the flags; None: it was not given."""
    names = (f"{prefix}embedding{more}" for more in ("", "-model", "-key-file", "-deadline"))
    return {name: getattr(options, name.removeprefix("--").replace("-", "_")) for name in names}


def _key(file: Path | None) -> str:
    if file is None:
        return os.environ.get(KEY_VARIABLE, "")
    check_private(file, "API key file")
    return read_secret(file, "API key file")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return bool(parts.hostname) and not parts.query and not parts.fragment and "@" not in parts.netloc
