"""Detaching mapped files in place: a forked child's views of its parent's arena get memory of its own."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping

import numpy as np

from kvstore.host.descriptors import redirect_to_null

_PROT_READ_WRITE, _PROT_READ = mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_INSTEAD = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_FAILED = ctypes.c_void_p(-1).value


def detach(mappings: Mapping[tuple[int, int], mmap.mmap]) -> None:
    """Put empty memory of this process's own in the place of mapped files, given by device and inode.

    Views keep their addresses. They read zeros, and what is written to them is nobody else's.
    """
    for mapping in mappings.values():
        _replace(mapping)

    def is_one(fd: int) -> bool:
        status = os.fstat(fd)
        return (status.st_dev, status.st_ino) in mappings

    redirect_to_null(is_one)  # a mapping of Python's has a descriptor of its own


def _replace(mapping: mmap.mmap) -> None:
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    # Where memory is never promised twice there may be none to write to; the address must not become another's.
    for protection in (_PROT_READ_WRITE, _PROT_READ):
        if _libc.mmap(address, len(mapping), protection, _INSTEAD, -1, 0) != _FAILED:
            return
