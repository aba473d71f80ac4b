"""Pinned host memory: a CUDA device copies straight from and to a mapping that is registered (``cudaHostRegister``).

Registering belongs to the process, not to a tensor: :func:`is_pinned` knows every mapping that is registered here.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequestError
from kvstore.gpu.cudart import Runtime, cuda_runtime

Bytes = npt.NDArray[np.uint8]

# Flags of cudaHostRegister (CUDA runtime API, driver_types.h).
_PORTABLE = 0x01  # pinned for every device of this process
_MAPPED = 0x02  # kernels reach it, at the same address as the host
_READ_ONLY = 0x08  # for mappings that this process may not write


class PinnedMapping:
    """A mapping registered with CUDA until it is released.

    Pinning is a matter of speed alone: where the machine can't do it, :attr:`reason` says why, and copies still work.
    CUDA registers memory once: what several of these have, the last one to be released unregisters.

    Args:
        mapping: the memory, one-dimensional and contiguous; it stays mapped at least until :meth:`release`.
        runtime: the CUDA runtime; torch's, for this thread's device, where not given.

    Raises:
        InvalidRequestError: the array is not contiguous, or empty.
    """

    def __init__(self, mapping: Bytes, runtime: Runtime | None = None) -> None:
        if not mapping.flags.c_contiguous or mapping.nbytes == 0:
            raise InvalidRequestError(
                f"only contiguous memory of at least 1 byte can be pinned, got {mapping.nbytes} bytes"
                f" with strides {mapping.strides}"
            )
        self._mapping: Bytes | None = mapping
        self._runtime = runtime if runtime is not None else cuda_runtime()
        self.reason = self._register(mapping)
        """Why the mapping is not pinned; empty where it is."""

    @property
    def pinned(self) -> bool:
        """Whether a device copies to and from the mapping without a detour."""
        return self._mapping is not None and not self.reason

    def release(self) -> None:
        """Unregister; call it before the mapping goes away, and behind the last copy. A second call does nothing."""
        if self.pinned:
            assert self._mapping is not None
            assert self._runtime is not None
            memory = _range(self._mapping)
            with _changing(memory):
                with _lock:
                    _mappings[memory] -= 1
                    last = not _mappings[memory]
                    if last:
                        del _mappings[memory]  # nobody may begin a copy that relies on it
                if last:
                    self._runtime.cudaHostUnregister(self._mapping.ctypes.data)
        self._mapping = None

    def _register(self, mapping: Bytes) -> str:
        """Register with CUDA; the reason why not, or an empty string."""
        if self._runtime is None:
            return "no CUDA device, or no CUDA runtime that can be found"
        flags = _PORTABLE | _MAPPED
        if not mapping.flags.writeable:
            flags |= _READ_ONLY
        with _changing(_range(mapping)):
            if _range(mapping) not in _mappings:
                status = self._runtime.cudaHostRegister(mapping.ctypes.data, mapping.nbytes, flags)
                if status != 0:
                    return f"cudaHostRegister refused {mapping.nbytes} bytes: error {status}"
            with _lock:
                _mappings[_range(mapping)] += 1
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_pinned(page: Bytes) -> bool:
    """Whether all of these bytes lie in a mapping that is registered now."""
    start, end = _range(page)
    with _lock:
        return any(first <= start and end <= last for first, last in _mappings)


_Range = tuple[int, int]
"""First address, and the one behind the last."""

_lock = threading.Lock()
_mappings: Counter[_Range] = Counter()  # how many have what is registered
_locks: dict[_Range, threading.Lock] = {}  # for what may take seconds, registering it; as few as there were arenas


def _changing(memory: _Range) -> threading.Lock:
    """To be held, before :data:`_lock`, by whoever registers or unregisters this memory."""
    with _lock:
        return _locks.setdefault(memory, threading.Lock())


def _range(memory: Bytes) -> _Range:
    start = memory.ctypes.data
    return start, start + memory.nbytes
