"""The CUDA driver (libcuda) that torch has loaded: one call that queues a whole list of copies (CUDA 12.8)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from kvstore.errors import ResourceError
from kvstore.gpu.addresses import Addresses

# CUDA driver API, cuda.h.
_SINCE = 12080
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_ANY_ORDER = 3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY


class _Location(ctypes.Structure):
    """``CUmemLocation``: a hint for managed memory, and ignored for what we copy."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``, the same in CUDA 12.8 and 13.0. No flags: vLLM's figures, on which
    :mod:`kvstore.gpu.preference` rests, were taken without."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_COPY_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int, _pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer, _pointer
)
"""Targets, sources, sizes, how many; attributes, the first copy that each is for, how many; the copy that failed; the
stream. While it runs, the interpreter's lock is free."""

# Constants, which the driver only reads: threads share them.
_IN_STREAM_ORDER = _Attributes(_STREAM_ORDER)
_IN_ANY_ORDER = _Attributes(_ANY_ORDER)
_FIRST_COPY = _size(0)


class BatchedMemcpy:
    """``cuMemcpyBatchAsync``. It may be called in several threads at once.

    Args:
        library: the driver's.
        stream: gives the handle of the stream that is current in this thread.

    Raises:
        ResourceError: the driver does not have the call.
    """

    def __init__(self, library: Any, stream: Callable[[], int]) -> None:
        self._library = library
        self._stream = stream
        address, found = ctypes.c_void_p(), ctypes.c_int()
        try:
            # By the version that it was made in: a newer one of this name has other arguments, and a driver keeps both.
            status = library.cuGetProcAddress_v2(
                b"cuMemcpyBatchAsync",
                ctypes.byref(address),
                ctypes.c_int(_SINCE),
                ctypes.c_uint64(0),
                ctypes.byref(found),
            )
        except AttributeError:  # a driver older than CUDA 12.0
            status = 0
        if status != 0 or not address.value:
            raise ResourceError(f"the driver has no cuMemcpyBatchAsync, which came with CUDA 12.8{self._words(status)}")
        self._copy = _COPY_BATCH(address.value)

    def __call__(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, stable_source: bool) -> None:
        """Queue copies on the current stream, which must not be the legacy default one, nor be captured.

        The arrays may go when this returns: the driver has read them. In what order the copies are done is not said:
        none may read what another one writes.

        Args:
            targets: where each copy writes.
            sources: where it reads; as many.
            sizes: bytes, each at least 1: the driver refuses empty copies.
            stable_source: nothing on the stream writes to the sources any more, and nobody will until the copies are
                done; the driver may read them before the stream comes to it.

        Raises:
            ResourceError: the driver refuses; the message has its reason. Some copies may have been queued.
        """
        if not len(targets):
            return
        # The driver reads them one behind the other, however they lie: a share of the layers is a view with strides.
        targets, sources, sizes = map(np.ascontiguousarray, (targets, sources, sizes))
        attributes = _IN_ANY_ORDER if stable_source else _IN_STREAM_ORDER
        failed = _size(len(targets))
        status = self._copy(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(targets),
            ctypes.addressof(attributes),
            ctypes.addressof(_FIRST_COPY),
            1,
            ctypes.addressof(failed),
            self._stream(),
        )
        if status != 0:
            # The driver puts the greatest number there where it is not for a single copy.
            at = f", at copy {failed.value}" if failed.value < len(targets) else ""
            raise ResourceError(f"cuMemcpyBatchAsync refused {len(targets)} copies{at}{self._words(status)}")

    def _words(self, status: int) -> str:
        if status == 0:
            return ""
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        return f": error {status} ({text.value.decode()})" if text.value else f": error {status}"


@cache
def batched_memcpy() -> BatchedMemcpy:
    """That of the driver in this process.

    By ctypes, not by the package ``cuda.bindings``: that one looks up the same function in the same library, and would
    be one more thing that has to fit the driver.

    Raises:
        ResourceError: there is no driver, or none that has the call.
    """
    try:  # torch has loaded it: its name is enough
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ResourceError(f"the CUDA driver can't be loaded: {error}") from None
    return BatchedMemcpy(library, _current_stream)


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
