"""Which of HiCache's host pools kvstore can keep pages of."""

from __future__ import annotations

from typing import Any

from kvstore.errors import ResourceError

POOLS = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
"""Classes of SGLang's whose pages were stored, read back and compared, by name (of the second without a server)."""
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
"""Likewise, of ``--hicache-mem-layout``."""
MAIN_POOL = "kv"


def check_pool(pool: Any) -> None:
    """Whether the pages of a ``HostKVCache`` lie still, and are whole.

    Raises:
        ResourceError: they don't, or nobody has looked.
    """
    kind = type(pool).__name__
    if kind not in POOLS:
        raise ResourceError(f"kvstore does not keep pages of SGLang's {kind}, only those of {' and '.join(POOLS)}")
    if pool.layout not in LAYOUTS:
        raise ResourceError(
            f"kvstore does not keep pages with --hicache-mem-layout {pool.layout}, only with {', '.join(LAYOUTS)}"
        )
    if getattr(pool, "shared_allocation_domain", None) is not None or getattr(pool, "stores_page_envelope", False):
        raise ResourceError("kvstore does not keep pages of a host pool that several models share")
    if getattr(pool, "dcp_size", 1) > 1:
        raise ResourceError(f"kvstore does not keep pages of a part of a page's tokens (dcp_size {pool.dcp_size})")


def check_side_pool(name: str) -> None:
    """Whether a pool beside the main one is none of its own.

    Raises:
        ResourceError: it is: of a sliding window, a recurrent state, an indexer, a draft model.
    """
    if name != MAIN_POOL:
        raise ResourceError(
            f"kvstore does not keep the pages of this model, which has a pool {name!r} beside that of its attention"
            " (sliding windows, recurrent layers, sparse attention's indexer and draft models have one): start SGLang"
            " without --hicache-storage-backend"
        )
