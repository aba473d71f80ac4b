"""Flags that name a store of responses and how they lie in it, for the proxy and for ``kvstore responses``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.config.node import default_disk
from kvstore.errors import ConfigError
from kvstore.responses.open import open_store
from kvstore.responses.sealing import Sealing
from kvstore.responses.store import Limits, Store
from kvstore.security.grants import EVERY_TENANT
from kvstore.security.secret_files import check_private, read_file, read_key_file, read_tokens

SQLITE = "sqlite"
"""Stands for the file at the default place."""
_FILE = "responses.sqlite"


@dataclass(frozen=True, slots=True)
class StoreFlags:
    """What the flags are called: the proxy's have a prefix."""

    where: str
    key_file: str
    plain: str
    password_file: str

    @classmethod
    def with_prefix(cls, prefix: str) -> StoreFlags:
        """``--responses`` and so on; without a prefix ``--store``."""
        name = prefix.rstrip("-") or "--store"
        start = prefix or "--"
        return cls(name, f"{start}key-file", f"{start}plain", f"{start}password-file")

    def add_to(self, parser: argparse.ArgumentParser, words: str, default: str | None) -> None:
        """Add those that say where the store is to a command."""
        parser.add_argument(self.where, metavar="WHERE", default=default, help=words)
        parser.add_argument(
            self.password_file, metavar="FILE", type=Path, help="the password of the Redis (default: that in its URL)"
        )

    def add_key_to(self, parser: argparse.ArgumentParser) -> None:
        """Those that say how entries lie in the store."""
        parser.add_argument(
            self.key_file,
            metavar="FILE",
            type=Path,
            help="encrypt responses with this key: 32 bytes, or 64 hexadecimal digits, as a node's disk_key_file",
        )
        parser.add_argument(
            self.plain, action="store_true", help="keep prompts and answers as they are, readable for who has the store"
        )

    def sealing(self, options: argparse.Namespace) -> Sealing:
        """How entries lie in the store.

        Raises:
            ConfigError: neither a key nor the word that none is needed, both, or a key that can't be used.
        """
        key_file, plain = _value(options, self.key_file), _value(options, self.plain)
        if (key_file is None) != bool(plain):
            raise ConfigError(
                f"responses hold prompts: give the key that encrypts them ({self.key_file} FILE), or say that they"
                f" needn't be ({self.plain}); one of both"
            )
        return Sealing(None if key_file is None else read_key_file(key_file))

    def open(self, options: argparse.Namespace, limits: Limits) -> Store:
        """The store.

        Raises:
            ConfigError: a flag's value can't be used.
            ResourceError: the file can't be.
        """
        where = _value(options, self.where)
        password_file = _value(options, self.password_file)
        password = None
        if password_file is not None:
            check_private(password_file, "password file")
            password = read_secret(password_file, "password file")
        return open_store(str(default_disk() / _FILE) if where == SQLITE else where, limits, password)


def read_secret(path: Path, what: str) -> str:
    """The one line of a file.

    Raises:
        ConfigError: it can't be read, or has none, or several.
    """
    lines = read_file(path, what).decode(errors="replace").split()
    if len(lines) != 1:
        raise ConfigError(f"{what} {path} must hold one word, it has {len(lines)}")
    return lines[0]


def read_tenants(path: Path | None) -> dict[str, str]:
    """The tenant of each API key that a token file gives one. Keys of no tenant, or of all, keep their own answers.

    Raises:
        ConfigError: it is no token file, or others can read it.
    """
    if path is None:
        return {}
    return {key: grant.tenant for key, grant in read_tokens(path).items() if grant.tenant not in ("", EVERY_TENANT)}


def _value(options: argparse.Namespace, flag: str) -> Any:
    return getattr(options, flag.removeprefix("--").replace("-", "_"))
