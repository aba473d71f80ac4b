"""Many copies from memory to memory in one call, which gives the interpreter's lock away once and not once a copy.

A thread that copies beside one that computes in Python gets the lock back only after the interpreter's switch interval,
5 ms: a prompt of hundreds of runs, copied one by one, would take seconds. Linux copies a whole list of runs by one
system call, ``process_vm_readv`` on the process itself, at about the speed of memcpy.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

MOST_RUNS = 1024
"""Most runs a system call: ``IOV_MAX`` of Linux."""

SHORTEST_RUN = 4096
"""Bytes below which a run costs the kernel more than it costs NumPy."""

_SYSTEM = ctypes.CDLL(None, use_errno=True)
_ARGUMENTS = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


@cache
def can_copy_runs() -> bool:
    """Whether this system copies lists of runs: some sandboxes refuse it."""
    call = getattr(_SYSTEM, "process_vm_readv", None)
    if call is None:
        return False
    call.argtypes, call.restype = _ARGUMENTS, ctypes.c_ssize_t
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    places = np.array([target.ctypes.data], np.uint64), np.array([source.ctypes.data], np.uint64)
    try:
        copy_runs(*places, source.nbytes)
    except OSError:
        return False
    return bool((source == target).all())


def copy_runs(targets: Addresses, sources: Addresses, run_bytes: int) -> None:
    """Copy ``run_bytes`` bytes from each source to the target at its place. Nothing may overlap.

    Args:
        targets: addresses in this process, of memory that stays while this runs.
        sources: as many.

    Raises:
        OSError: the system refuses. Some runs may have been copied.
    """
    vectors = np.empty((2, len(targets), 2), np.uint64)
    vectors[0, :, 0], vectors[1, :, 0] = targets, sources
    vectors[:, :, 1] = run_bytes
    process = os.getpid()
    for start in range(0, len(targets), MOST_RUNS):
        count = min(MOST_RUNS, len(targets) - start)
        local, remote = (each[start:].ctypes.data for each in vectors)
        copied = _SYSTEM.process_vm_readv(process, local, count, remote, count, 0)
        if copied != count * run_bytes:
            error = ctypes.get_errno() if copied < 0 else 0
            raise OSError(error, f"process_vm_readv copied {copied} of {count * run_bytes} bytes")
