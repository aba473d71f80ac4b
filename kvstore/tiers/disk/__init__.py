"""The tier that keeps pages of this node on disk, over restarts and crashes (:class:`DiskTier`)."""

from kvstore.tiers.disk.tier import CheckReport, DiskTier

__all__ = ["CheckReport", "DiskTier"]
