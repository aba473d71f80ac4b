"""Opens the store of answers that an operator names."""

from __future__ import annotations

from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.responses.sqlite import SQLiteStore
from kvstore.responses.store import Limits, Store


def open_store(where: str, limits: Limits, password: str | None = None) -> Store:
    """The store at a path (an SQLite file) or a URL (``redis://``, ``rediss://``, ``unix://``).

    Args:
        where: path or URL.
        limits: what it holds at most.
        password: for Redis, in the place of that in the URL.

    Raises:
        ConfigError: the URL is of no known kind.
        ResourceError: the file can't be used.
        FormatError: another version wrote it.
    """
    if "://" not in where:
        if password is not None:
            raise ConfigError(f"{where} is a file, which has no password")
        return SQLiteStore(Path(where), limits)
    from kvstore.responses.redis import SCHEMES, RedisStore  # for those alone who use it

    if not where.startswith(SCHEMES):
        raise ConfigError(
            f"responses are kept in a file or behind {', '.join(SCHEMES)}, not in {where.split(':')[0]}://"
        )
    return RedisStore(where, limits, password)
