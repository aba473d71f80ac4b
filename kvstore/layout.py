"""Layout: everything that must agree before one engine's page bytes mean the same to another."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvstore.errors import InvalidRequestError

MAX_NAME_BYTES = 1024
"""Longest text a layout's field may hold, in UTF-8 bytes."""
_MOST_CHARACTERS = 64 << 10
"""Longest JSON object of a layout: the longest texts that there are, escaped, fit several times."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Layout:
    """What makes page bytes interchangeable. Its fingerprint is the namespace that pages live in.

    A page holds the KV of ``block_size`` consecutive tokens for all layers of one cache group, on one rank, in
    ``page_bytes`` bytes. Every field but ``page_bytes`` is the namespace's *name*: two clients that agree on the
    name and not on ``page_bytes`` disagree about the model, and the second one is refused.

    Raises:
        InvalidRequestError: a field is out of its range; the message names field, value and limit.
    """

    model: str
    block_size: int
    """Tokens a page, at least 1."""
    page_bytes: int
    """Bytes a page, at least 1, exactly the same for every page."""
    revision: str = ""
    dtype: str = ""
    """Element type of the KV, as torch names it without the prefix: ``"bfloat16"``, ``"float8_e4m3fn"``."""
    layers: int = 0
    kv_heads: int = 0
    head_size: int = 0
    format: str = ""
    """How the bytes inside a page are ordered: attention backend and its version of the layout."""
    group: int = 0
    """Which of the model's cache groups."""
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    tenant: str = ""
    """Whose pages: tenants never hit each other's pages."""
    codec: str = ""
    """How pages were made smaller, with loss, before they were stored; empty: they were not."""

    def __post_init__(self) -> None:
        lowest = {"block_size": 1, "page_bytes": 1, "tp_size": 1, "pp_size": 1}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "str":
                if not isinstance(value, str):
                    raise InvalidRequestError(f"layout: {field.name} must be a string, got {value!r}")
                try:
                    length = len(value.encode())
                except UnicodeEncodeError as error:
                    raise InvalidRequestError(f"layout: {field.name} can't be encoded: {error}") from error
                if length > MAX_NAME_BYTES:
                    raise InvalidRequestError(f"layout: {field.name} has {length} bytes, the limit is {MAX_NAME_BYTES}")
            elif isinstance(value, bool) or not isinstance(value, int):
                raise InvalidRequestError(f"layout: {field.name} must be an integer, got {value!r}")
            elif not lowest.get(field.name, 0) <= value < 1 << 31:
                raise InvalidRequestError(
                    f"layout: {field.name} must lie between {lowest.get(field.name, 0)} and {(1 << 31) - 1},"
                    f" got {value}"
                )
        if not self.model:
            raise InvalidRequestError("layout: model must not be empty")
        if self.tp_rank >= self.tp_size or self.pp_rank >= self.pp_size:
            raise InvalidRequestError(
                f"layout: rank must be below its size: tp {self.tp_rank} of {self.tp_size},"
                f" pp {self.pp_rank} of {self.pp_size}"
            )

    def __repr__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        told = [f"{each.name}={given[each.name]!r}" for each in fields(self) if given[each.name] != each.default]
        return f"Layout({', '.join(told)})"

    @property
    def name(self) -> str:
        """The namespace's name: every field but ``page_bytes``, in a form that people read."""
        return self.named(self.model)

    def named(self, label: str) -> str:
        """The name with what people call the model in the model's place (:mod:`kvstore.labels`)."""
        model = label + (f"@{self.revision}" if self.revision else "")
        parts = [model, f"block {self.block_size}"]
        if self.dtype:
            parts.append(self.dtype)
        if self.layers or self.kv_heads or self.head_size:
            parts.append(f"{self.layers}x{self.kv_heads}x{self.head_size}")
        if self.format:
            parts.append(self.format)
        parts.append(f"group {self.group}")
        if self.tp_size > 1:
            parts.append(f"tp {self.tp_rank}/{self.tp_size}")
        if self.pp_size > 1:
            parts.append(f"pp {self.pp_rank}/{self.pp_size}")
        if self.tenant:
            parts.append(f"tenant {self.tenant}")
        if self.codec:
            parts.append(f"codec {self.codec}")
        return " · ".join(parts)

    @property
    def identity(self) -> bytes:
        """32 bytes: SHA-256 over every field but ``page_bytes``."""
        return self._digest(exclude="page_bytes")

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: SHA-256 over every field. Half of a page's key, the block hash being the other half."""
        return self._digest()

    def to_json(self) -> str:
        """The layout as a JSON object with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that :meth:`to_json` wrote.

        Raises:
            InvalidRequestError: no such JSON object, a key is unknown or missing, or a value is out of range.
        """
        if len(text) > _MOST_CHARACTERS:  # small lists take many times what they are written with
            raise InvalidRequestError(
                f"layout: not a JSON object of at most {_MOST_CHARACTERS} characters: it has {len(text)}"
            )
        try:
            values: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"layout: not a JSON object: {error}") from error
        if not isinstance(values, dict):
            raise InvalidRequestError("layout: not a JSON object")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InvalidRequestError(f"layout: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
        if missing := sorted({"model", "block_size", "page_bytes"} - set(values)):
            raise InvalidRequestError(f"layout: field {missing[0]!r} is missing")
        return cls(**values)

    def _digest(self, exclude: str = "") -> bytes:
        values = {name: value for name, value in asdict(self).items() if name != exclude}
        if not self.codec:  # a younger field: without one, fingerprints are what they were before it
            del values["codec"]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvstore/layout/1\n" + text.encode()).digest()
