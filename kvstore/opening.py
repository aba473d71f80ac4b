"""From a configuration to an open store."""

from __future__ import annotations

from kvstore.arena.arena import Arena, Progress
from kvstore.config import NodeConfig
from kvstore.store import Store
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.tier import Tier


def open_store(config: NodeConfig, progress: Progress = lambda done, size: None) -> Store:
    """The store that a configuration describes: arena, disk tier if it has one, register of namespaces.

    Raises:
        InUseError: another process owns a folder.
        ResourceError: a folder can't be used, or the memory is not there.
        FormatError: a newer version wrote the disk tier's files.
    """
    arena = Arena(config.arena_directory, config.arena, progress)
    try:
        tiers: list[Tier] = []
        directories = [arena.directory]
        if config.disk_limit:
            tiers.append(DiskTier(config.disk, config.disk_limit, verify=config.verify_checksums))
            directories.append(config.disk)
    except BaseException:
        arena.close()
        raise
    return Store(arena, tiers, directories)
