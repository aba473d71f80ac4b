"""NUMA placement: an arena's memory on the node of the engine that reads it.

Pages of shared memory lie where the thread that touches them first may allocate. So the thread that makes the arena is
bound to one node meanwhile; what was there before is moved by ``mbind``. Both are asked of the system directly: the
library that wraps them, libnuma, is not everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvstore.errors import ConfigError, ResourceError

_NODES = Path("/sys/devices/system/node")
_CALLS = {"x86_64": (237, 238), "aarch64": (235, 237)}
"""Numbers of ``mbind`` and ``set_mempolicy``."""
_DEFAULT, _BIND = 0, 2
_MOVE = 1 << 1
_MASK_BITS = 1024
_log = logging.getLogger(__name__)


def nodes_with_memory(root: Path = _NODES) -> list[int]:
    """The numbers of this machine's NUMA nodes that have memory; [0] where the system knows of none."""
    for name in ("has_memory", "online"):
        with contextlib.suppress(OSError, ValueError):
            return parse_list((root / name).read_text())
    return [0]


def parse_list(text: str) -> list[int]:
    """The numbers in ``0-3,8``.

    Raises:
        ValueError: no such list.
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


class Placement:
    """Memory of one node, or, without one, wherever the system puts it. ``nodes`` are by default this machine's.

    Raises:
        ConfigError: there is no such node; the message names those that there are.
    """

    def __init__(self, node: int | None = None, nodes: list[int] | None = None) -> None:
        known = nodes_with_memory() if nodes is None else nodes
        if node is not None and node not in known:
            raise ConfigError(
                f"numa_node is {node}; this machine has NUMA node{'s' * (len(known) > 1)}"
                f" {', '.join(map(str, known)) or 'none'}"
            )
        if node is not None and len(known) == 1:
            _log.info("numa_node %d: the only NUMA node of this machine, so there is nothing to place", node)
            node = None
        self.node = node

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Within it, what this thread allocates lies on the node.

        Raises:
            ResourceError: the system refuses.
        """
        if self.node is None:
            yield
            return
        self._call(1, _BIND, *_mask(self.node))
        try:
            yield
        finally:
            self._call(1, _DEFAULT, None, 0)

    def move(self, memory: mmap.mmap) -> None:
        """Let mapped shared memory lie on the node, with what it holds.

        Raises:
            ResourceError: the system refuses.
        """
        if self.node is not None:
            address = np.frombuffer(memory, np.uint8).ctypes.data
            self._call(0, ctypes.c_void_p(address), ctypes.c_ulong(len(memory)), _BIND, *_mask(self.node), _MOVE)

    def _call(self, which: int, *arguments: object) -> None:
        numbers = _CALLS.get(platform.machine())
        if numbers is None:
            raise ResourceError(f"numa_node: not known how to place memory on {platform.machine()}")
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(ctypes.c_long(numbers[which]), *arguments):
            code = ctypes.get_errno()
            hint = ""
            if code in (errno.EPERM, errno.ENOSYS):
                hint = "; a container needs the capability SYS_NICE for it, or `numactl --membind` around the node"
            raise ResourceError(f"numa_node {self.node}: the system refuses to place memory: {os.strerror(code)}{hint}")


def _mask(node: int) -> tuple[ctypes.Array[ctypes.c_uint8], ctypes.c_ulong]:
    """The set of this one node, and its length in bits as the system counts it."""
    bits = bytearray(_MASK_BITS // 8)
    bits[node // 8] = 1 << node % 8
    return (ctypes.c_uint8 * len(bits)).from_buffer(bits), ctypes.c_ulong(_MASK_BITS + 1)
