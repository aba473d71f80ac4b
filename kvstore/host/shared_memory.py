"""Whether an arena fits into the machine's memory: asked before it is allocated, since running out later kills."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.cgroups import memory_limit
from kvstore.errors import ResourceError
from kvstore.units import format_size


def check_space(directory: Path, size: int, reusable: int = 0) -> None:
    """Refuse an arena of ``size`` bytes that can't be held.

    Args:
        directory: where it is to be.
        size: all its files.
        reusable: bytes of files there that will be deleted first.

    Raises:
        ResourceError: the file system or the process's memory limit is smaller; the message names both numbers.
    """
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize + reusable
    if free < size:
        raise ResourceError(
            f"{directory}: the arena needs {format_size(size)}, only {format_size(free)} are free there;"
            " make it smaller (--arena) or give the mount more room"
        )
    limit, path = memory_limit(Path("/proc/self/cgroup").read_text())
    if limit is not None and limit < size:
        raise ResourceError(
            f"the arena needs {format_size(size)}, this process's memory limit is {format_size(limit)} ({path})"
        )
