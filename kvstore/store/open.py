"""Opening: the arena, the lower tiers and the register that a configuration describes, as one store."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from kvstore.arena.arena import Arena, Progress
from kvstore.config.node import NodeConfig
from kvstore.errors import ResourceError
from kvstore.host.atomic_files import AtomicFiles
from kvstore.security.secret_files import read_key_file, read_key_ring
from kvstore.segments.folder import make_folder
from kvstore.store.formats import refuse_newer
from kvstore.store.store import Store
from kvstore.tiers.counters import TierCounts
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.tier import ClaimedTier, ObjectStorage, OwnTier
from kvstore.units import format_size

_log = logging.getLogger(__name__)


def open_store(
    config: NodeConfig, progress: Progress = lambda done, size: None, embedded_in: Path | None = None
) -> Store:
    """The store that a configuration describes: arena, lower tiers if it has them, register of namespaces.

    Args:
        config: of the node, or of the embedded store.
        progress: told how far the arena's memory is populated.
        embedded_in: the folder of the embedded store that the arena goes with; None: it stays.

    Raises:
        InUseError: another process owns a folder.
        ResourceError: a folder can't be used, or the memory is not there.
        FormatError: a newer version wrote the disk tier's files.
    """
    if config.disk_limit:
        refuse_newer(config.disk)  # before the arena, which drops what is in it where that is of another format
        try:
            make_folder(config.disk)  # before the arena, which takes long to populate
        except OSError as error:
            raise ResourceError.of_place(config.disk, error) from error
    numa_node = int(config.numa_node) if config.numa_node else None
    arena = Arena(config.arena_directory, config.arena, progress, config.sharers, numa_node, embedded_in)
    own: list[OwnTier] = []
    shared: ClaimedTier | None = None
    objects: ObjectStorage | None = None
    try:
        directories = [arena.directory]
        small_files = AtomicFiles()
        if config.disk_limit:
            disk = DiskTier(
                config.disk,
                config.disk_limit,
                verify=config.verify_checksums,
                deadline=config.disk_deadline,
                write_limit_bytes=config.disk_write_limit,
                key=None if config.disk_key_file is None else read_key_file(config.disk_key_file),
                counts=TierCounts(arena.tier_counters(DiskTier.name)),
            )
            own.append(disk)
            directories.append(config.disk)
            small_files = AtomicFiles(config.disk, disk.reserve_for_other_files)
            available = shutil.disk_usage(config.disk).free + disk.statistics().used_bytes
            if available < config.disk_limit:
                _log.warning(
                    "%s: the disk limit is %s, but there is room for %s only: the tier will stay that small; lower"
                    " --disk-limit, or make room",
                    config.disk,
                    format_size(config.disk_limit),
                    format_size(available),
                )
        if config.redis:
            from kvstore.tiers.redis import RedisTier  # an engine's side is without redis and lz4

            shared = RedisTier(config.redis, config.redis_limit, counts=TierCounts(arena.tier_counters(RedisTier.name)))
        if config.objects:
            from kvstore.tiers.objects import ObjectTier  # the extra `objects`

            keys = () if config.objects_key_file is None else read_key_ring(config.objects_key_file)
            objects = ObjectTier(
                config.objects,
                config.objects_limit,
                prefix_limit=config.objects_prefix_limit,
                write_limit=config.objects_write_limit,
                deadline=config.objects_deadline,
                keys=keys,
                counts=TierCounts(arena.tier_counters(ObjectTier.name)),
            )
        arena.note_folder()
        return Store(
            arena,
            own,
            directories,
            shared,
            config.namespace,
            small_files,
            config.expire_namespaces,
            config.tenant,
            objects,
            archive_all=config.objects_admit == "all",
        )
    except BaseException:
        for tier in own:
            tier.close()
        for each in (shared, objects):
            if each is not None:
                each.close()
        arena.abandon()
        raise
