"""The connector, in an engine whose CPU attention takes every layout of the KV cache whose blocks are head-major.

vLLM's declares one of them; its kernels go by strides.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheLayout

from kvstore.connector.vllm import KVStoreConnector

LAYOUTS = ("LBHNC", "BLHNC", "LHBNC", "BHLNC")


class ConnectorOfEveryLayout(KVStoreConnector):
    """As it is: importing this module is what matters, before workers say which layouts they take."""


def _supported(cls: type[Any]) -> tuple[Any, ...]:
    return tuple(KVCacheLayout[name] for name in LAYOUTS)


CPUAttentionBackend.supported_kv_cache_layouts = classmethod(_supported)  # type: ignore[method-assign]
