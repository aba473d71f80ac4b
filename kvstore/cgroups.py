"""How much memory a process's control groups let it have."""

from __future__ import annotations

import contextlib
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Where the cgroup file systems are mounted."""
_NO_LIMIT = 1 << 60
"""What cgroups of version 1 say where there is none is above it."""


def memory_limit(membership: str, root: Path = CGROUPS) -> tuple[int | None, Path]:
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
                limit = int((each / name).read_text())
                if limit < _NO_LIMIT:
                    limits.append((limit, each / name))
            if each == base:
                break
    smallest = min(limits, default=None)
    return smallest or (None, root)
