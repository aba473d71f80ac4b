"""SGLang's HiCache backend: a third level behind its device pool and its host pool, as a dynamic storage backend.

Only this file imports SGLang.

::

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "kvstore", "module_path": "kvstore.connector.sglang", "class_name": "KVStoreBackend",
        "interface_v1": 1}'

Each rank has one of these, for its own host pool. SGLang's keys are the SHA-256 of a page's tokens and all before it;
what else decides on a page's bytes is in the namespace (:mod:`kvstore.connector.hicache.identity`), which is opened in
the background when the weights were read: until then everything is a miss.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.version import __version__ as sglang_version

from kvstore.connector.hicache.versions import check_version

check_version(sglang_version)  # before what another release may not have

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args, get_serving

from kvstore.client.default_node import located
from kvstore.client.environment import connect_by_environment
from kvstore.client_name import MOST_NAME
from kvstore.connector.engine.identity import model_label
from kvstore.connector.hicache.host_pages import HostPages, copy_one_by_one
from kvstore.connector.hicache.identity import Place, layout_of, model_of
from kvstore.connector.hicache.options import Options
from kvstore.connector.hicache.pages import CALL_SECONDS, READ_PAGES, HiCachePages
from kvstore.connector.hicache.supported import check_pool, check_side_pool
from kvstore.errors import KVStoreError
from kvstore.gpu.host import can_copy_runs, copy_runs

assert STORAGE_BATCH_SIZE == READ_PAGES, "what is held is held in parts as large as SGLang's reads"

ENGINE = f"SGLang {sglang_version}"

logger = logging.getLogger("kvstore.connector.sglang")


class KVStoreBackend(HiCacheStorage):
    """Keeps the pages of HiCache's host pool in kvstore. See :mod:`kvstore.connector.sglang`.

    Raises:
        ConfigError: options that can't be used.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        self._options = Options.parse(storage_config.extra_config or {})
        self._arguments = resolving_view(get_server_args())  # as they are in effect, defaults resolved
        self._config = storage_config
        self._label = model_label(str(self._arguments.model_path))
        self._url = located(self._options.url, os.environ, logger)
        self._client = connect_by_environment(
            self._url, os.environ, timeout=CALL_SECONDS, name=_client_name(storage_config)
        )
        self._pages = HiCachePages(
            self._client, holders=storage_config.tp_size * storage_config.pp_size, weights=_weight_version
        )
        self._pool: Any = None
        self._copy_runs = copy_runs if can_copy_runs() else copy_one_by_one
        self._opening: threading.Thread | None = None

    # Set-up, on the scheduler's thread.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool whose pages these are.

        Raises:
            ResourceError: its pages can't be kept.
        """
        super().register_mem_pool_host(mem_pool_host)
        check_pool(mem_pool_host)
        self._pool = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool by its name, the main one among them.

        Raises:
            ResourceError: there is one beside the main one.
        """
        check_side_pool(str(host_pool_name))
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """All pools are known: what their pages mean is found out in the background, by reading the weights."""
        self._opening = threading.Thread(target=self._open, name="kvstore-open", daemon=True)
        self._opening.start()

    def close(self) -> None:
        """Let go of the node."""
        self._pages.close()

    # The three that carry pages, each on a thread of its own.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages are there; they are held for some seconds."""
        return self._pages.exists(_hashes(keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Copy pages into the pool. For each page whether it is there; behind one that is not, none is."""
        loaded = self._pages.load(_hashes(keys), self._host_pages(keys, host_indices)) if keys else 0
        return [place < loaded for place in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Copy pages out of the pool. For each page whether the node has it now."""
        if not keys:
            return []
        before = extra_info.prefix_keys if extra_info is not None else None
        parent = bytes.fromhex(before[-1]) if before else b""
        return self._pages.store(_hashes(keys), self._host_pages(keys, host_indices), parent)

    # The rest of the interface.

    def exists(self, key: str) -> bool:
        """Whether one page is there."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Drop the pages of servers like this one, in every tier."""
        logger.info("dropped %d pages of %s", self._pages.clear(), self._label)

    def get_stats(self) -> StorageMetrics:
        """How many pages went each way, and how fast, since this was last asked: for SGLang's ``/metrics``."""
        loads, stores = self._pages.rates.take()
        return StorageMetrics(loads.pages, stores.pages, loads.gigabytes_a_second, stores.gigabytes_a_second)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Not with ``interface_v1``: nothing is there."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """As :meth:`get`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not with ``interface_v1``: nothing is stored."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """As :meth:`set`."""
        return False

    def _open(self) -> None:
        """Find out what the pages mean, and begin to serve."""
        begin = time.monotonic()
        try:
            parts = self._pool.get_page_buffer_meta(torch.arange(self._pool.page_size))[1]
            layout = layout_of(
                model_of(self._arguments),
                self._pool,
                [int(each) for each in parts],
                Place.of(self._config),
                engine=ENGINE,
                tenant=self._options.tenant,
            )
            self._pages.open(self._client.namespace(layout, label=self._label, lazy=True))
        except KVStoreError as error:
            logger.error("SGLang runs without kvstore: %s", error)  # noqa: TRY400 - its words are enough
        except Exception:
            logger.exception("SGLang runs without kvstore")
        else:
            seconds = time.monotonic() - begin
            logger.info("kvstore at %s: %s (after %.1f s)", self._url, layout.named(self._label), seconds)

    def _host_pages(self, keys: Sequence[str], host_indices: torch.Tensor) -> HostPages:
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        return HostPages(addresses, sizes, len(keys), self._copy_runs)


def _hashes(keys: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]


def _weight_version() -> str:
    """What SGLang calls the weights that it has: who changes them in the running server may name them anew."""
    return str(get_serving().weight_version)


def _client_name(config: HiCacheStorageConfig) -> str:
    """What the node calls this rank."""
    replica = f" of replica {config.dp_rank}" if config.dp_rank else ""
    stage = f" stage {config.pp_rank}" if config.pp_size > 1 else ""
    return f"{ENGINE} rank {config.tp_rank}{stage}{replica}"[:MOST_NAME]
