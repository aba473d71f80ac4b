"""Hints: what a request's ``kv_transfer_params`` ask of kvstore. They come from whoever may send requests: each is held
against its bounds, and what can't be followed is said and fails no request.

::

    "kvstore_load": false             compute what is there, too
    "kvstore_store": false            a scratchpad: store nothing
    "kvstore_store_generated": false  store the prompt's blocks alone
    "kvstore_store_first": 8          of the prompt's full blocks, the first eight, and nothing behind them
    "kvstore_store_last": 8           of the prompt's full blocks, the last eight, and what comes behind the prompt
    "kvstore_keep_minutes": 30        pin the prompt's pages in the arena
    "kvstore_shared_prefix": "name"   share the pages of a prefix that the engine's settings name, whatever the salts
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

_PREFIX = "kvstore_"
LOAD, STORE, GENERATED = f"{_PREFIX}load", f"{_PREFIX}store", f"{_PREFIX}store_generated"
FIRST, LAST, KEEP = f"{_PREFIX}store_first", f"{_PREFIX}store_last", f"{_PREFIX}keep_minutes"
SHARED = f"{_PREFIX}shared_prefix"
_KNOWN = (LOAD, STORE, GENERATED, FIRST, LAST, KEEP, SHARED)
_SHORT = tuple(key.removeprefix(_PREFIX) for key in _KNOWN)
_MOST_BLOCKS = 1_000_000
_UNSTORED = "; nothing of the request is stored"
_MOST_HINTS = 32
_MOST_COMPARED = 64
"""Characters of a key for which the nearest known one is looked for."""
_MOST_SHOWN = 40
"""Characters of a value that a log shows."""
_repr = reprlib.Repr()
_repr.maxstring = 4 * _MOST_SHOWN  # longer than what is shown of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What one request asks for."""

    load: bool = True
    store: bool = True
    generated: bool = True
    """Whether blocks with generated tokens are stored."""
    first: int | None = None
    """So many of the prompt's full blocks are stored, and nothing behind them."""
    last: int | None = None
    """So many of the prompt's full blocks are stored, and what comes behind the prompt."""
    keep_seconds: int = 0
    """For which the prompt's pages are pinned."""
    shared_prefix: str = ""
    """Which one it shares with requests of other salts that say so, too; empty: none."""

    def stored_tokens(self, prompt_tokens: int, num_tokens: int, block_size: int) -> tuple[int, int]:
        """Between which tokens blocks are stored, of a request with so many.

        Args:
            prompt_tokens: of the prompt.
            num_tokens: of the request, as far as they are computed.
            block_size: in which hints count blocks.
        """
        start, end = 0, num_tokens if self.generated else min(num_tokens, prompt_tokens)
        full = prompt_tokens // block_size
        if self.first is not None:
            end = min(end, min(self.first, full) * block_size)
        if self.last is not None:
            start = max(0, full - self.last) * block_size
        return start, end


def parse_hints(params: Any, most_keep_minutes: int, shared_prefixes: Collection[str] = ()) -> tuple[Hints, list[str]]:
    """A request's hints, and what can't be followed of them, in words.

    A hint that is not understood is left out. One about storing leaves the request unstored: it may have asked for it.

    Args:
        params: its ``kv_transfer_params``; keys of others are theirs.
        most_keep_minutes: that a request may ask for.
        shared_prefixes: names of those that requests may share.
    """
    if not isinstance(params, Mapping):
        return Hints(), []
    given = {key: value for key, value in params.items() if isinstance(key, str) and key.startswith(_PREFIX)}
    if len(given) > _MOST_HINTS:
        return Hints(store=False), [f"{len(given)} hints, at most {_MOST_HINTS} are read; none is followed{_UNSTORED}"]
    wrong: dict[str, str] = {}
    for key, value in given.items():
        if key not in _KNOWN:
            short = key.removeprefix(_PREFIX)
            nearest = difflib.get_close_matches(short, _SHORT, 1) if len(short) <= _MOST_COMPARED else []
            known = f"did you mean {_PREFIX}{nearest[0]}?" if nearest else f"known are {', '.join(_KNOWN)}"
            wrong[key] = f"{_shown(key)} is no hint; {known}"
        elif (needs := _needs(key, value, most_keep_minutes, shared_prefixes)) is not None:
            wrong[key] = f"{key} must be {needs}, got {_shown(value)}"
    if FIRST in given and LAST in given:
        wrong[LAST] = f"{FIRST} and {LAST} exclude each other"
    right = {key: value for key, value in given.items() if key not in wrong}
    spoilt = any(key.startswith(STORE) for key in wrong)
    hints = Hints(
        load=right.get(LOAD, True),
        store=right.get(STORE, True) and not spoilt,
        generated=right.get(GENERATED, True),
        first=right.get(FIRST),
        last=right.get(LAST),
        keep_seconds=60 * right.get(KEEP, 0),
        shared_prefix=right.get(SHARED, ""),
    )
    return hints, [f"{text}{_UNSTORED if key.startswith(STORE) else ''}" for key, text in wrong.items()]


def _needs(key: str, value: Any, most_keep_minutes: int, shared_prefixes: Collection[str]) -> str | None:
    """What a value must be; None: it is."""
    if key == SHARED:
        if isinstance(value, str) and value in shared_prefixes:
            return None
        return "a name in this engine's shared_prefixes" + ("" if shared_prefixes else ", which has none")
    if key in (LOAD, STORE, GENERATED):
        return None if isinstance(value, bool) else "true or false"
    most = most_keep_minutes if key == KEEP else _MOST_BLOCKS
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
        return None
    if not most:
        return "left out: this engine keeps nothing for requests (most_keep_minutes)"
    return f"a whole number from 1 to {most}"


def _shown(value: Any) -> str:
    text = _repr.repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
