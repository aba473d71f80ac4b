"""A connector whose second rank takes itself for a worker on another host, with that host's node."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import kvstore.connector.vllm
from kvstore.connector.vllm import KVStoreConnector

OTHER_HOST = "the-other-host"
OTHER_URL = "OTHER_HOSTS_URL"
"""The variable that says what ``url`` stands for on that host: all ranks are given the same socket path."""


class ConnectorOnTwoHosts(KVStoreConnector):
    """See :mod:`tests.vllm.two_hosts`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        if role is KVConnectorRole.WORKER and get_tp_group().rank_in_group == 1:
            vllm_config.kv_transfer_config.kv_connector_extra_config["url"] = os.environ[OTHER_URL]
            kvstore.connector.vllm.socket = SimpleNamespace(gethostname=lambda: OTHER_HOST)
        super().__init__(vllm_config, role, kv_cache_config)
