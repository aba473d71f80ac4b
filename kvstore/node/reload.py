"""The plan of a reload by SIGHUP: which settings a running node takes over, and which need a restart. No I/O."""

from __future__ import annotations

from kvstore.config.node import SETTINGS, NodeConfig


def plan_reload(before: NodeConfig, after: NodeConfig) -> tuple[list[str], list[str]]:
    """The settings that differ: those that a running node takes over, and those that need a restart."""
    differ = [key for key in SETTINGS if getattr(after, key) != getattr(before, key)]
    taken = [key for key in differ if SETTINGS[key].reloaded and _has_its_tier(key, before, after)]
    return taken, [key for key in differ if key not in taken]


def _has_its_tier(key: str, before: NodeConfig, after: NodeConfig) -> bool:
    """Whether a limit is one before and behind the change: tiers come and go with the node."""
    if key in ("disk_limit", "disk_write_limit"):
        return bool(before.disk_limit and after.disk_limit)
    if key in ("objects_limit", "objects_prefix_limit", "objects_write_limit"):
        return bool(before.objects and after.objects)
    return key != "redis_limit" or bool(before.redis and after.redis)
