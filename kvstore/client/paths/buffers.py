"""Callers' buffers as arrays of bytes: checked, without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequestError

Bytes = npt.NDArray[np.uint8]
Pages = Any
"""A sequence (list or tuple) of buffers, one a page, or one contiguous buffer of all of them. A buffer is anything
that has the buffer protocol: bytes, bytearray, memoryview, mmap, NumPy arrays."""


class Rows(Sequence[Bytes]):
    """Pages that lie one behind the other, as the rows of a table."""

    def __init__(self, table: npt.NDArray[np.uint8]) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Bytes]:
        return iter(self.table)

    @overload
    def __getitem__(self, place: int) -> Bytes: ...

    @overload
    def __getitem__(self, place: slice) -> Rows: ...

    def __getitem__(self, place: int | slice) -> Bytes | Rows:
        rows = self.table[place]
        return Rows(rows) if isinstance(place, slice) else rows


def page_arrays(pages: Pages, count: int, page_bytes: int, *, writable: bool) -> Sequence[Bytes]:
    """``pages`` as ``count`` arrays of ``page_bytes`` bytes over the same memory.

    Raises:
        InvalidRequestError: not buffers, not contiguous, not writable where they must be, or of another size.
    """
    plain = _is_plain(pages, writable)
    if not plain and isinstance(pages, list | tuple):
        if len(pages) != count:
            raise InvalidRequestError(f"{len(pages)} pages were given for {count} hashes")
        arrays = [_array(page, f"page {place}", writable=writable) for place, page in enumerate(pages)]
        for place, array in enumerate(arrays):
            if array.size != page_bytes:
                raise InvalidRequestError(
                    f"page {place} has {array.size} bytes, this namespace's pages have {page_bytes}"
                )
        return arrays
    whole = pages if plain else _array(pages, "the buffer of pages", writable=writable)
    if whole.size != count * page_bytes:
        raise InvalidRequestError(
            f"the buffer of pages has {whole.size} bytes, {count} pages of {page_bytes} have {count * page_bytes}"
        )
    return Rows(whole.reshape(count, page_bytes))


def _is_plain(pages: Pages, writable: bool) -> bool:
    """Whether these are an array already, as they should be."""
    if type(pages) is not np.ndarray or pages.dtype.char != "B":
        return False
    flags = pages.flags
    return bool(flags.c_contiguous and (flags.writeable or not writable))


def _array(buffer: Any, name: str, *, writable: bool) -> Bytes:
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise InvalidRequestError(f"{name} is no buffer: {type(buffer).__name__}") from error
    if "O" in view.format:
        raise InvalidRequestError(f"{name} holds Python objects, not bytes")
    if not view.c_contiguous:
        raise InvalidRequestError(f"{name} is not contiguous")
    if writable and view.readonly:
        raise InvalidRequestError(f"{name} can't be written to")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
