"""Whether an arena fits into the machine's memory: asked before it is allocated, since running out later kills."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvstore.errors import ResourceError
from kvstore.units import format_size

_CGROUPS = Path("/sys/fs/cgroup")


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
    limit, path = memory_limit(Path("/proc/self/cgroup").read_text(), _CGROUPS)
    if limit is not None and limit < size:
        raise ResourceError(
            f"the arena needs {format_size(size)}, this process's memory limit is {format_size(limit)} ({path})"
        )


def memory_limit(membership: str, root: Path) -> tuple[int | None, Path]:
    """The smallest memory limit, in bytes, of a process's cgroups, and the file that says so.

    Args:
        membership: the text of ``/proc/<pid>/cgroup``: lines of ``id:controllers:path`` (version 2: ``0::path``).
        root: where the cgroup file systems are mounted.
    """
    limits: list[tuple[int, Path]] = []
    for line in membership.splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0" and not controllers:
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may not exist below the mount: its root is then the container's own group.
        folder = base / group.lstrip("/")
        for each in [folder, *folder.parents]:
            with contextlib.suppress(OSError, ValueError):
                limits.append((int((each / name).read_text()), each / name))
            if each == base:
                break
    smallest = min(limits, default=None)
    return smallest or (None, root)
