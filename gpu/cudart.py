"""The CUDA runtime (libcudart) that torch has loaded: the calls that pin host memory, most of which torch lacks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

# CUDA runtime API, driver_types.h.
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_ERRORS = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    3: "cudaErrorInitializationError",
    4: "cudaErrorCudartUnloading",
    35: "cudaErrorInsufficientDriver",
    46: "cudaErrorDevicesUnavailable",
    100: "cudaErrorNoDevice",
    101: "cudaErrorInvalidDevice",
    304: "cudaErrorOperatingSystem",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    713: "cudaErrorHostMemoryNotRegistered",
    719: "cudaErrorLaunchFailure",
    800: "cudaErrorNotPermitted",
    801: "cudaErrorNotSupported",
    900: "cudaErrorStreamCaptureUnsupported",
    901: "cudaErrorStreamCaptureInvalidated",
    906: "cudaErrorStreamCaptureImplicit",
    999: "cudaErrorUnknown",
}
"""cudaError_t, of which pinning memory may meet these."""


def error_name(status: int) -> str:
    """What CUDA calls a status that is not 0, and its number, which finds it in CUDA's documents."""
    return f"{_ERRORS[status]} ({status})" if status in _ERRORS else f"error {status}"


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
    device as the current one. What it refuses is told by its status alone: an error that stayed behind would be raised
    by whatever this thread asks the device for next. Without a device: the thread's current one.

    It does not end a capture of a CUDA graph in another thread. Torch, and so vLLM, begins captures as *global* ones:
    CUDA then prohibits "potentially unsafe" calls, of which registering memory is one, in every thread but those whose
    own mode is *relaxed* (``cudaThreadExchangeStreamCaptureMode``). The calls are made in that mode, as torch makes
    those that allocate pinned memory; where it can't be had they are not made. A graph does not depend on what they
    change: no copy from or to an arena is captured.
    """

    def __init__(self, library: Any, device: torch.device | None = None) -> None:
        self._library = library
        self._device = device

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Register memory."""
        with self._ready() as refused:
            return refused or self._status(
                self._library.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(flags))
            )

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Take it back."""
        with self._ready() as refused:
            return refused or self._status(self._library.cudaHostUnregister(ctypes.c_void_p(address)))

    def can_use_host_pointers(self, device: int) -> bool:
        """Whether kernels of a device reach registered memory at the addresses that this process has for it."""
        value = ctypes.c_int(0)
        with self._ready() as refused:
            if refused:
                return False
            status = self._library.cudaDeviceGetAttribute(ctypes.byref(value), _CAN_USE_HOST_POINTER, device)
            return self._status(status) == 0 and value.value == 1

    @contextmanager
    def _ready(self) -> Iterator[int]:
        """Device and mode set; the status where that is refused, and else 0."""
        mode = ctypes.c_int(_RELAXED)
        with torch.cuda.device(self._device):
            refused = self._status(self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
            try:
                yield refused
            finally:
                if not refused:
                    self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # back to what it was

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
    library = _loaded(int(torch.version.cuda.partition(".")[0]))
    return None if library is None else CudaRuntime(library, device)


def _loaded(major: int) -> ctypes.CDLL | None:
    """The runtime that torch uses. One that was found by its name alone may be another one, of the machine's."""
    name = "libcudart.so.11.0" if major == 11 else f"libcudart.so.{major}"  # what all of CUDA 11 have
    # Under a name of its own where a wheel brought it along: libcudart-9335f6a2.so.12.
    for path in (name, *_mapped(f".so.{major}")):
        with suppress(OSError):
            return ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    # Linked into torch: any runtime of this version does, since what is registered is the driver's, for the process.
    with suppress(OSError):
        return ctypes.CDLL(name)
    return None


def _mapped(ending: str) -> list[str]:
    """Paths of the runtimes of this version that are mapped into this process."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())  # file names may be bytes that are no text
    lines = (line.split(maxsplit=5) for line in maps.split("\n"))
    paths = dict.fromkeys(fields[5] for fields in lines if len(fields) == 6)
    return [each for each in paths if Path(each).name.startswith("libcudart") and ending in Path(each).name]
