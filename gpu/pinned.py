"""Pinned memory over the arena: a CUDA device copies straight from and to a mapping that is registered with it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import InvalidRequestError

# Flags of cudaHostRegister (CUDA runtime API, driver_types.h).
_PORTABLE = 0x01  # pinned for every device of this process
_READ_ONLY = 0x08  # for mappings that this process may not write


class PinnedMapping:
    """A mapping registered with CUDA until it is released.

    Pinning is a matter of speed alone: where the machine can't do it, :attr:`reason` says why, and copies still work.

    Args:
        mapping: the memory, one-dimensional and contiguous; it must stay mapped until :meth:`release`.

    Raises:
        InvalidRequestError: the array is not contiguous, or empty.
    """

    def __init__(self, mapping: npt.NDArray[np.uint8]) -> None:
        if not mapping.flags.c_contiguous or mapping.nbytes == 0:
            raise InvalidRequestError(
                f"only contiguous memory of at least 1 byte can be pinned, got {mapping.nbytes} bytes"
                f" with strides {mapping.strides}"
            )
        self._mapping: npt.NDArray[np.uint8] | None = mapping
        self.reason = _register(mapping)
        """Why the mapping is not pinned; empty where it is."""

    @property
    def pinned(self) -> bool:
        """Whether a device copies to and from the mapping without a detour."""
        return self._mapping is not None and not self.reason

    def release(self) -> None:
        """Unregister; call it before the mapping goes away. A second call does nothing."""
        if self.pinned:
            assert self._mapping is not None
            torch.cuda.cudart().cudaHostUnregister(self._mapping.ctypes.data)  # type: ignore[no-untyped-call]
        self._mapping = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _register(mapping: npt.NDArray[np.uint8]) -> str:
    """Register with CUDA; the reason why not, or an empty string."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    flags = _PORTABLE if mapping.flags.writeable else _PORTABLE | _READ_ONLY
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(mapping.ctypes.data, mapping.nbytes, flags)
    if int(status) != 0:
        return f"cudaHostRegister refused {mapping.nbytes} bytes: error {int(status)}"
    return ""
