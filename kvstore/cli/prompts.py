"""Reads prompts from files of JSON: token ids or block hashes, where known with layout and extra keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from kvstore.errors import InvalidRequestError
from kvstore.hashing import HASH_BYTES, hash_blocks
from kvstore.layout import Layout

_KEYS = ("layout", "namespace", "tokens", "hashes", "extra_keys")
_MOST_BYTES = 64 << 20
_MOST_BYTES_OF_MANY = 1 << 30
_FORM = (
    'a JSON array of token ids, or an object with "tokens" (as vLLM\'s /tokenize answers) or "hashes" and, where known,'
    ' "layout" or "namespace", and "extra_keys"'
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, by what its file says of it."""

    layout: Layout | None = None
    """Of the namespace that the engine asks; None: not said."""
    namespace: str = ""
    """Its name or the first digits of its fingerprint, where there is no layout."""
    tokens: tuple[int, ...] | None = None
    given_hashes: tuple[bytes, ...] | None = None
    extra_keys: tuple[Any, ...] = ()
    """As :func:`kvstore.hashing.hash_blocks` takes them: for the whole prompt, or for each block."""

    def hashes(self, block_size: int) -> list[bytes]:
        """The block hashes; those that were given, or those of the tokens."""
        if self.given_hashes is not None:
            return list(self.given_hashes)
        return hash_blocks(self.tokens or (), block_size, self.extra_keys)

    def keys_of(self, block: int) -> tuple[Any, ...]:
        """The extra keys of one block."""
        if self.extra_keys and isinstance(self.extra_keys[0], list | tuple):
            return tuple(self.extra_keys[block]) if block < len(self.extra_keys) else ()
        return self.extra_keys


def read_prompt(path: Path, extra_keys: Sequence[str] = ()) -> Prompt:
    """A prompt from a file.

    Args:
        path: of the file; ``-`` is standard input.
        extra_keys: for the whole prompt, beside those in the file.

    Raises:
        InvalidRequestError: the file can't be read, or is none of the forms; the message says which there are.
    """
    return _parse(_read(path, _MOST_BYTES), str(path), extra_keys)


def read_prompts(path: Path, extra_keys: Sequence[str] = ()) -> list[Prompt]:
    """Prompts from a file, one a line; everything else as :func:`read_prompt`."""
    lines = _read(path, _MOST_BYTES_OF_MANY).splitlines()
    return [_parse(line, f"{path}, line {number}", extra_keys) for number, line in enumerate(lines, 1) if line.strip()]


def stdin() -> TextIO:
    """Standard input.

    Raises:
        InvalidRequestError: it is closed.
    """
    if sys.stdin is None:
        raise InvalidRequestError("- stands for standard input, which is closed")
    return sys.stdin


def _read(path: Path, most: int) -> bytes:
    try:
        data = stdin().buffer.read(most + 1) if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{path} can't be read: {error.strerror}") from error
    if len(data) > most:
        raise InvalidRequestError(f"{path} has more than {most} bytes")
    return data


def _parse(data: bytes, where: str, extra_keys: Sequence[str]) -> Prompt:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not JSON ({error}); write {_FORM}") from error
    prompt = _prompt({"tokens": value} if isinstance(value, list) else value, where)
    if extra_keys:
        if prompt.given_hashes is not None:
            raise InvalidRequestError(f"{where} has hashes: extra keys are in them already")
        prompt = replace(prompt, extra_keys=(*prompt.extra_keys, *extra_keys))
    return prompt


def _prompt(value: Any, path: str) -> Prompt:
    if not isinstance(value, dict) or not ("tokens" in value or "hashes" in value):
        raise InvalidRequestError(f"{path} is not {_FORM}")
    tokens, hashes = value.get("tokens"), value.get("hashes")
    if tokens is not None and not (isinstance(tokens, list) and all(type(each) is int for each in tokens)):
        raise InvalidRequestError(f"{path}: tokens must be an array of whole numbers")
    if hashes is not None and not (isinstance(hashes, list) and all(map(_is_hash, hashes))):
        raise InvalidRequestError(f"{path}: hashes must be an array of {2 * HASH_BYTES} hexadecimal digits each")
    layout = value.get("layout")
    if layout is not None:
        layout = Layout.from_json(layout if isinstance(layout, str) else json.dumps(layout))
    keys = value.get("extra_keys", [])
    if not isinstance(keys, list):
        raise InvalidRequestError(f"{path}: extra_keys must be an array")
    return Prompt(
        layout,
        str(value.get("namespace", "")),
        None if tokens is None else tuple(tokens),
        None if hashes is None else tuple(map(bytes.fromhex, hashes)),
        tuple(_key(each) for each in keys),
    )


def _key(value: Any) -> Any:
    """JSON has no tuples: an array in a block's keys is a tagged key, as ``["lora", "name"]``."""
    if isinstance(value, list):
        return [tuple(each) if isinstance(each, list) else each for each in value]
    return value


def _is_hash(text: object) -> bool:
    try:
        return isinstance(text, str) and len(bytes.fromhex(text)) == HASH_BYTES
    except ValueError:
        return False
