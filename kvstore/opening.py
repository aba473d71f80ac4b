"""From a configuration to an open store."""

from __future__ import annotations

import logging
import shutil

from kvstore.arena.arena import Arena, Progress
from kvstore.bytesize import format_size
from kvstore.config import NodeConfig
from kvstore.store import Store
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.tier import Tier

_log = logging.getLogger(__name__)


def open_store(config: NodeConfig, progress: Progress = lambda done, size: None) -> Store:
    """The store that a configuration describes: arena, disk tier if it has one, register of namespaces.

    Raises:
        InUseError: another process owns a folder.
        ResourceError: a folder can't be used, or the memory is not there.
        FormatError: a newer version wrote the disk tier's files.
    """
    arena = Arena(config.arena_directory, config.arena, progress)
    tiers: list[Tier] = []
    try:
        directories = [arena.directory]
        if config.disk_limit:
            disk = DiskTier(config.disk, config.disk_limit, verify=config.verify_checksums)
            tiers.append(disk)
            directories.append(config.disk)
            room = shutil.disk_usage(config.disk).free + disk.statistics().used_bytes
            if room < config.disk_limit:
                _log.warning(
                    "%s: the disk limit is %s, but there is room for %s only: when the disk is full, nothing new is"
                    " written to it; lower --disk-limit",
                    config.disk,
                    format_size(config.disk_limit),
                    format_size(room),
                )
        return Store(arena, tiers, directories)
    except BaseException:
        for tier in tiers:
            tier.close()
        arena.close()
        raise
