"""The backend, with a second tensor-parallel rank that is not as the first one.

``KVSTORE_TEST_SECOND_URL`` is its node's, as of a rank on another host. ``KVSTORE_TEST_SECOND_DELAY`` is the most
seconds for which SGLang's own injector delays each of its calls. ``KVSTORE_TEST_SECOND_STOP`` names a file: once it is
there, the rank's next load writes its process id into it, and stops the process before anything was copied.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from kvstore.connector.sglang import KVStoreBackend


class RankBackend(KVStoreBackend):
    """See :mod:`rank_backend`."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._stop = ""
        if storage_config.tp_rank == 1:
            self._stop = os.environ.get("KVSTORE_TEST_SECOND_STOP", "")
            if url := os.environ.get("KVSTORE_TEST_SECOND_URL"):
                storage_config.extra_config["url"] = url
            if delay := os.environ.get("KVSTORE_TEST_SECOND_DELAY"):
                # Each rank is a process of its own, and SGLang reads this when the backend is made.
                os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = delay
        super().__init__(storage_config, kwargs)

    def batch_get_v1(self, *args: Any) -> Any:
        path = Path(self._stop)
        if self._stop and path.exists() and not path.stat().st_size:
            path.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().batch_get_v1(*args)
