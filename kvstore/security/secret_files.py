"""Files that hold secrets: private keys and tokens."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.security.grants import Grant, check_together, parse_grant

_MOST_BYTES = 1 << 20
LEAST_TOKEN = 16
"""Fewest characters of a token: shorter ones can be guessed."""
KEY_BYTES = 32
"""Of a key that encrypts or signs."""
_HEX_DIGITS = 2 * KEY_BYTES


def check_private(path: Path, what: str) -> None:
    """Make sure that nobody else can read a file: its owner alone, or also a group when root owns it (mode 0640).

    Raises:
        ConfigError: others can, or there is no such file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{what} {path} can't be read: {error.strerror}") from error
    allowed = 0o640 if status.st_uid == 0 else 0o600
    if status.st_mode & 0o777 & ~(allowed | 0o100):
        raise ConfigError(
            f"{what} {path} has mode {status.st_mode & 0o777:04o}: others than its owner could read or change it"
            " (chmod 600)"
        )


def read_file(path: Path, what: str) -> bytes:
    """What a small file holds.

    Raises:
        ConfigError: it can't be read, or is no small file.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{what} {path} can't be read: {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{what} {path} has more than {_MOST_BYTES} bytes: it is something else")
    return data


def read_tokens(path: Path) -> dict[str, Grant]:
    """The tokens of a file, one a line; empty lines and those that begin with # are none.

    A line is ``token`` or ``name:token``, and what the token grants behind it, as
    :func:`kvstore.security.grants.parse_grant` reads it: ``name:token tenant=search rights=read,write``. Without that
    it grants everything. A word that begins with # ends the line.

    Returns:
        For each token, in the file's order, what it grants; a token without a name is called ``line N``.

    Raises:
        ConfigError: others can read the file, it holds no token, the same one twice, or a line that is none.
    """
    check_private(path, "token file")
    tokens: dict[str, Grant] = {}
    for number, line in enumerate(read_file(path, "token file").decode(errors="replace").splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        first, *words = takewhile(lambda word: not word.startswith("#"), line.split())
        name, _, token = first.rpartition(":")
        # The token itself is never said: messages end in logs.
        if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
            raise ConfigError(
                f"token file {path}, line {number}: a token has at least {LEAST_TOKEN} ASCII characters and no spaces"
            )
        if token in tokens:
            raise ConfigError(f"token file {path}, line {number}: the same token as {tokens[token].name}")
        try:
            tokens[token] = parse_grant(name or f"line {number}", words)
        except ConfigError as error:
            raise ConfigError(f"token file {path}, line {number}: {error}") from error
    if not tokens:
        raise ConfigError(f"token file {path} holds no token")
    try:
        check_together(list(tokens.values()))
    except ConfigError as error:
        raise ConfigError(f"token file {path}: {error}") from error
    return tokens


def read_key_file(path: Path) -> bytes:
    """The key in a file: 32 bytes as they are, or 64 hexadecimal digits in one line.

    Raises:
        ConfigError: it can't be read, others than its owner can read it, or it holds something else.
    """
    data = _read_keys(path)
    if len(data) == KEY_BYTES:
        return data
    key = _key_of_digits(data.strip())
    if key is None:
        raise ConfigError(f"key file {path} must hold {KEY_BYTES} bytes or {_HEX_DIGITS} hexadecimal digits")
    return key


def read_key_ring(path: Path) -> tuple[bytes, ...]:
    """The keys in a file: one as :func:`read_key_file` reads it, or several of 64 hexadecimal digits, one a line. The
    first one writes, and all of them read, so that a key can be changed while what it wrote is still there.

    Raises:
        ConfigError: as there, or two keys are the same.
    """
    data = _read_keys(path)
    if len(data) == KEY_BYTES:
        return (data,)
    lines = [line.strip() for line in data.splitlines() if line.strip() and not line.strip().startswith(b"#")]
    keys = [_key_of_digits(line) for line in lines]
    if not keys or None in keys:
        raise ConfigError(
            f"key file {path} must hold {KEY_BYTES} bytes, or {_HEX_DIGITS} hexadecimal digits a line, one key each"
        )
    if len(set(keys)) < len(keys):
        raise ConfigError(f"key file {path} holds the same key twice")
    return tuple(key for key in keys if key is not None)


def _read_keys(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        data = path.read_bytes() if path.stat().st_size <= 4096 else b""
    except OSError as error:
        raise ConfigError(f"key file {path} can't be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"key file {path} has mode {mode & 0o777:o}: only its owner may read it (chmod 600)")
    return data


def _key_of_digits(line: bytes) -> bytes | None:
    try:
        return bytes.fromhex(line.decode("ascii")) if len(line) == _HEX_DIGITS else None
    except ValueError:
        return None
