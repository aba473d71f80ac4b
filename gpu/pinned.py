"""Pinned memory over the arena: a CUDA device copies straight from and to a mapping that is registered with it.

Registering belongs to the process, not to a tensor: :func:`is_pinned` knows every mapping that is registered here.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import InvalidRequestError

Bytes = npt.NDArray[np.uint8]

# Flags of cudaHostRegister (CUDA runtime API, driver_types.h).
_PORTABLE = 0x01  # pinned for every device of this process
_MAPPED = 0x02  # kernels reach it, at the same address as the host
_READ_ONLY = 0x08  # for mappings that this process may not write


class Runtime(Protocol):
    """The two calls of the CUDA runtime that pin memory. Each returns its status, 0 for success."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Register memory."""
        ...

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Take it back."""
        ...


class PinnedMapping:
    """A mapping registered with CUDA until it is released.

    Pinning is a matter of speed alone: where the machine can't do it, :attr:`reason` says why, and copies still work.

    Args:
        mapping: the memory, one-dimensional and contiguous; it stays mapped at least until :meth:`release`.
        runtime: the CUDA runtime; torch's where not given.

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
        self._runtime = runtime if runtime is not None else _cuda_runtime()
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
            with _lock:
                _ranges.remove(_range(self._mapping))
            self._runtime.cudaHostUnregister(self._mapping.ctypes.data)
        self._mapping = None

    def _register(self, mapping: Bytes) -> str:
        """Register with CUDA; the reason why not, or an empty string."""
        if self._runtime is None:
            return "no CUDA device"
        flags = _PORTABLE | _MAPPED
        if not mapping.flags.writeable:
            flags |= _READ_ONLY
        status = int(self._runtime.cudaHostRegister(mapping.ctypes.data, mapping.nbytes, flags))
        if status != 0:
            return f"cudaHostRegister refused {mapping.nbytes} bytes: error {status}"
        with _lock:
            _ranges.append(_range(mapping))
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
        return any(first <= start and end <= last for first, last in _ranges)


_lock = threading.Lock()
_ranges: list[tuple[int, int]] = []  # first address, and the one behind the last, of what is registered


def _range(memory: Bytes) -> tuple[int, int]:
    start = memory.ctypes.data
    return start, start + memory.nbytes


def _cuda_runtime() -> Runtime | None:
    if not torch.cuda.is_available():
        return None
    runtime: Runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return runtime
