"""The stepping backend, whose holds last as long as a node allows."""

from __future__ import annotations

from typing import Any

from stepping_backend import SteppingBackend

import kvstore.connector.hicache.pages
import kvstore.connector.sglang
from kvstore.limits import LONGEST_LEASE


class HoldingBackend(SteppingBackend):
    """See :mod:`holding_backend`."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        kvstore.connector.hicache.pages.CALL_SECONDS = LONGEST_LEASE
        kvstore.connector.sglang.CALL_SECONDS = LONGEST_LEASE
        super().__init__(storage_config, kwargs)
