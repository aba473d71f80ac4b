"""A connector whose copies stop in the middle of a page until the layer that is there has been computed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.connector.vllm import KVStoreConnector

LOAD_TO_BREAK = "LOAD_TO_BREAK"
"""The variable that says in which load, from 0 on, a page is taken away while its layers are copied."""
BROKEN_PAGE = 2
OVERLAPPED = "computed the first layer before the second one was copied"
SECONDS = 60.0


class ConnectorWithWatchedLayers(KVStoreConnector):
    """See :mod:`tests.vllm.watched_layers`."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        ((namespace, pages),) = self._worker._groups
        begin_scatter, loads = pages.begin_scatter, iter(range(1000))
        self._computed = threading.Event()

        def watched(
            sources: Sequence[Any], piece_ids: Sequence[int], on_layer: Callable[[int], None], after: Any
        ) -> Any:
            load = next(loads)
            self._computed.clear()

            def copied(layer: int) -> None:
                on_layer(layer)
                if layer == 0 and self._computed.wait(SECONDS):
                    print(OVERLAPPED, file=sys.stderr, flush=True)
                    if str(load) == os.environ[LOAD_TO_BREAK]:
                        namespace.evict([self._plan.loads[0].hashes[BROKEN_PAGE]])

            return begin_scatter(sources, piece_ids, copied, after)

        pages.begin_scatter = watched  # type: ignore[method-assign]

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Its attention has run."""
        self._computed.set()
