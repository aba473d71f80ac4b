"""The CUDA runtime (libcudart) that torch has loaded: the calls that pin host memory, most of which torch lacks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

# CUDA runtime API, driver_types.h.
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


class Runtime(Protocol):
    """The two calls that pin memory. Each returns its status, 0 for success."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Register memory."""
        ...

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Take it back."""
        ...


class CudaRuntime:
    """:class:`Runtime` for one device, from any thread.

    A call begins to use the thread's current device, which is the first one in a new thread: so each is made with this
    device as the current one. It does not end a capture of a CUDA graph in another thread. What it refuses is told by
    its status alone: an error that stayed behind would be raised by whatever this thread asks the device for next.
    Without a device: the thread's current one.
    """

    def __init__(self, library: Any, device: torch.device | None = None) -> None:
        self._library = library
        self._device = device

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Register memory."""
        with self._ready():
            return self._status(
                self._library.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(flags))
            )

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Take it back."""
        with self._ready():
            return self._status(self._library.cudaHostUnregister(ctypes.c_void_p(address)))

    def can_use_host_pointers(self, device: int) -> bool:
        """Whether kernels of a device reach registered memory at the addresses that this process has for it."""
        value = ctypes.c_int(0)
        with self._ready():
            status = self._library.cudaDeviceGetAttribute(ctypes.byref(value), _CAN_USE_HOST_POINTER, device)
            return self._status(status) == 0 and value.value == 1

    @contextmanager
    def _ready(self) -> Iterator[None]:
        mode = ctypes.c_int(_RELAXED)
        with torch.cuda.device(self._device):
            self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # mode: what it was
            try:
                yield
            finally:
                self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def _status(self, status: int) -> int:
        if status != 0:
            self._library.cudaGetLastError()  # forgets it
        return status


def cuda_runtime(device: torch.device | None = None) -> CudaRuntime | None:
    """Torch's; None where torch has no CUDA device, or a runtime that can't be found.

    Args:
        device: as for :class:`CudaRuntime`; one of another kind has none.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None or (device and device.type != "cuda"):
        return None
    try:  # it is loaded: its name is enough
        library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None
    return CudaRuntime(library, device)
