"""Which limits of a process and its container may keep it from registering memory, in words."""

from __future__ import annotations

import resource
from pathlib import Path

from kvstore.cgroups import memory_limit


def limits(need: int) -> str:
    """What stands in the way of so many bytes, and what to do about it.

    Neither the size of ``/dev/shm`` nor free memory is among it: an arena is allocated in full before it is mapped.
    """
    found = []
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < need:
        found.append(
            f"RLIMIT_MEMLOCK lets it lock {_size(soft)} (soft; hard: {_size(hard)}): `ulimit -l unlimited`,"
            " LimitMEMLOCK=infinity, or `docker run --ulimit memlock=-1`"
        )
    try:
        limit, path = memory_limit(Path("/proc/self/cgroup").read_text())
    except OSError:  # a machine without cgroups
        limit, path = None, Path()
    if limit is not None and limit < need:
        found.append(f"its memory limit is {_size(limit)} ({path}): raise it (MemoryMax, `docker run --memory`)")
    if not found:
        return (
            f"no limit of this process is below the {_size(need)} that it asks for"
            f" (RLIMIT_MEMLOCK: {_size(soft)}; memory limit: {'none' if limit is None else _size(limit)});"
            " the kernel's log (dmesg) may say more"
        )
    return f"this process asks for {_size(need)}, and " + "; and ".join(found)


def _size(count: int) -> str:
    if count == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
