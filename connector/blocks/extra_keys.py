"""Extra keys of block hashes: what besides its tokens a block's KV depends on (LoRA, images, salt, embeddings)."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequestError
from kvstore.hashing import TaggedKey

EventKey = str | bytes | tuple[str, int]
"""A key as events show it: LoRA name, (multimodal identifier, offset), shared prefix, salt, or digest of embeddings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalInput:
    """An image, a sound or the like: tokens ``offset`` to ``offset + length`` of the prompt stand for it.

    Raises:
        InvalidRequestError: no identifier, a negative offset, or no token.
    """

    identifier: str
    """Equal for equal inputs alone: a hash of the content."""
    offset: int
    length: int

    def __post_init__(self) -> None:
        _check_text("identifier", self.identifier)
        if not self.identifier:
            raise InvalidRequestError("identifier of a multimodal input must have at least 1 character, got ''")
        for name, value, lowest in (("offset", self.offset, 0), ("length", self.length, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InvalidRequestError(f"{name} must be an integer of at least {lowest}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """The beginning of a prompt that requests with different salts share: blocks that lie in it as a whole.

    Raises:
        InvalidRequestError: no identifier, or no token.
    """

    identifier: str
    """Equal for equal tokens alone. Who does not say that it shares them has other blocks."""
    num_tokens: int

    def __post_init__(self) -> None:
        _check_text("identifier", self.identifier)
        if not self.identifier:
            raise InvalidRequestError("identifier of a shared prefix must have at least 1 character, got ''")
        if isinstance(self.num_tokens, bool) or not isinstance(self.num_tokens, int) or self.num_tokens < 1:
            raise InvalidRequestError(f"num_tokens must be an integer of at least 1, got {self.num_tokens!r}")


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixKeys:
    """What besides tokens the KV of one request depends on.

    Raises:
        InvalidRequestError: a value that can't be used; the message names it.
    """

    lora_name: str = ""
    """The adapter in use; empty for none."""
    lora_path: str = ""
    """Where the adapter lies, so that a name that moved to another adapter does not find the KV of the old one."""
    multimodal: tuple[MultimodalInput, ...] = ()
    """In the order of their offsets. They may overlap, as a video and its sound do."""
    cache_salt: str = ""
    """Requests with different salts never share a block, but for those of a prefix that they share. Empty for none."""
    shared_prefix: SharedPrefix | None = None
    """The salt enters behind it."""
    prompt_embeds: npt.NDArray[Any] | None = None
    """Of shape (tokens, hidden size), instead of token ids. Its bytes count; nobody may change them from now on."""

    _digests: dict[tuple[int, int], bytes] = field(default_factory=dict, init=False, repr=False)
    # hashed once by (start, end): for block hashes, and for events again

    def __post_init__(self) -> None:
        _check_text("lora_name", self.lora_name)
        _check_text("lora_path", self.lora_path)
        _check_text("cache_salt", self.cache_salt)
        if self.lora_path and not self.lora_name:
            raise InvalidRequestError(f"lora_path needs a lora_name, got {self.lora_path!r} alone")
        if not isinstance(self.multimodal, tuple):
            raise InvalidRequestError(f"multimodal must be a tuple, got {self.multimodal!r}")
        for item in self.multimodal:
            if not isinstance(item, MultimodalInput):
                raise InvalidRequestError(f"multimodal must hold nothing but MultimodalInput, got {item!r}")
        for before, after in zip(self.multimodal, self.multimodal[1:], strict=False):
            if before.offset > after.offset:
                raise InvalidRequestError(
                    f"multimodal must be in the order of offsets, got {before.offset} before {after.offset}"
                )
        embeds = self.prompt_embeds
        if embeds is not None and not isinstance(embeds, np.ndarray):
            raise InvalidRequestError(f"prompt_embeds must be an array of NumPy, got {type(embeds).__name__}")
        if embeds is not None and (embeds.ndim != 2 or embeds.dtype.hasobject):
            raise InvalidRequestError(
                f"prompt_embeds must be numbers of shape (tokens, hidden size), got {embeds.dtype} of {embeds.shape}"
            )

    @property
    def is_uniform(self) -> bool:
        """Whether all blocks but the first have the same keys."""
        return not self.multimodal and self.prompt_embeds is None and self.shared_prefix is None

    def of_block(self, start: int, end: int) -> tuple[TaggedKey, ...]:
        """The keys of the block of tokens ``start`` to ``end``, in a fixed order; () for none.

        ::

            ("lora", name, path)
            ("mm", identifier, offset)  each input with a token in the block; from the block's start, may be negative
            ("shared", identifier)      in the first block, if it lies in a shared prefix: the others depend on it
            ("salt", salt)              in the first block that does not: those behind it depend on it
            ("embeds", digest)          SHA-256 of the block's embeddings, also where there are none any longer
        """
        return next(self.from_block(start, end - start))

    def from_block(self, start: int, block_size: int) -> Iterator[tuple[TaggedKey, ...]]:
        """:meth:`of_block` for the block that begins at token ``start`` and each one behind it, without an end."""
        inputs, reach = self.multimodal, self._reach
        num_shared = 0 if self.shared_prefix is None else self.shared_prefix.num_tokens
        lora: list[TaggedKey] = [("lora", self.lora_name, self.lora_path)] if self.lora_name else []
        first = bisect_right(reach, start)  # only moves on: many inputs are not looked at again for each block
        for at in count(start, block_size):
            end = at + block_size
            keys = lora.copy()
            while first < len(reach) and reach[first] <= at:
                first += 1
            for index in range(first, len(reach)):
                item = inputs[index]
                if item.offset >= end:
                    break
                if item.offset + item.length > at:  # not so for a short input within a long one
                    keys.append(("mm", item.identifier, item.offset - at))
            if at == 0 and self.shared_prefix is not None and end <= num_shared:
                keys.append(("shared", self.shared_prefix.identifier))
            if self.cache_salt and at <= num_shared < end:
                keys.append(("salt", self.cache_salt))
            if self.prompt_embeds is not None:
                keys.append(("embeds", self._digest(self.prompt_embeds, at, end)))
            yield tuple(keys)

    def event_keys(self, start: int, end: int) -> tuple[EventKey, ...] | None:
        """The same keys as events show them; None for none."""
        keys = self.of_block(start, end)
        # What says which kind of key it is stays inside.
        return cast("tuple[EventKey, ...]", tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)) or None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrefixKeys):
            return NotImplemented
        return self._texts == other._texts and _equal(self.prompt_embeds, other.prompt_embeds)

    def __hash__(self) -> int:
        return hash(self._texts)

    @property
    def _texts(self) -> tuple[object, ...]:
        return self.lora_name, self.lora_path, self.multimodal, self.cache_salt, self.shared_prefix

    @cached_property
    def _reach(self) -> list[int]:
        # Where the inputs so far have all ended. Ascending even where a short input lies inside a long one.
        return list(accumulate((item.offset + item.length for item in self.multimodal), max))

    def _digest(self, embeds: npt.NDArray[Any], start: int, end: int) -> bytes:
        digest = self._digests.get((start, end))
        if digest is None:
            digest = self._digests[start, end] = hashlib.sha256(embeds[start:end].tobytes()).digest()
        return digest


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a str, got {value!r}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise InvalidRequestError(f"{name} {value!r} can't be encoded: {error}") from error


def _equal(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    if one is None or other is None or one is other:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
