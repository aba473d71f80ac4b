"""Pinned host memory: a CUDA device copies straight from and to a mapping that is registered (``cudaHostRegister``).

Registering belongs to the process, not to a tensor: :func:`is_pinned` knows every mapping that is registered here.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvstore.errors import InvalidRequestError
from kvstore.gpu.cudart import Runtime, cuda_runtime, error_name
from kvstore.gpu.registered import Bytes, Registered

# Flags of cudaHostRegister (CUDA runtime API, driver_types.h).
_PORTABLE = 0x01  # pinned for every device of this process
_MAPPED = 0x02  # kernels reach it, at the same address as the host
_READ_ONLY = 0x08  # for mappings that this process may not write

REGISTERED = Registered()
"""Of this process."""

is_pinned = REGISTERED.is_pinned
"""Whether all bytes of a page lie in one mapping that is registered now."""
cut = REGISTERED.cut
"""A page in parts that CUDA takes as one copy each."""
pinned_bytes = REGISTERED.pinned_bytes
"""How many bytes of an array are registered now."""


class PinnedMapping:
    """A mapping registered with CUDA until it is released.

    Pinning is a matter of speed alone: where the machine can't do it, :attr:`reason` says why, and copies still work.
    CUDA registers memory once: what several of these have, the last one to be released unregisters.

    Args:
        mapping: the memory, one-dimensional and contiguous. This object keeps it mapped.
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
        self.status = 0
        """What ``cudaHostRegister`` answered, where it was asked."""
        self.reason = self._register(mapping, runtime if runtime is not None else cuda_runtime())
        """Why the mapping is not pinned; empty where it is."""

    @property
    def pinned(self) -> bool:
        """Whether a device copies to and from the mapping without a detour."""
        return self._mapping is not None and not self.reason

    def release(self) -> None:
        """Unregister, behind the last use (:meth:`Registered.use`) that may rely on it; where there is none, now. A
        copy that begins from now on does not rely on it. A second call does nothing."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None and not self.reason:
            REGISTERED.leave(mapping)

    def _register(self, mapping: Bytes, runtime: Runtime | None) -> str:
        """Register with CUDA; the reason why not, or an empty string."""
        if runtime is None:
            return "no CUDA device, or no CUDA runtime that can be found"
        flags = _PORTABLE | _MAPPED
        if not mapping.flags.writeable:
            flags |= _READ_ONLY
        self.status = REGISTERED.take(mapping, runtime, flags)
        if self.status != 0:
            return f"cudaHostRegister refused {mapping.nbytes} bytes: {error_name(self.status)}"
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
