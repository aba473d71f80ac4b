"""A connector to stand beside kvstore's in ``MultiConnector``: it has a handshake of its own, as NIXL's has, and loads
in the step that computes, as file connectors do, where a request asks for it; and each of these loads fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

LOADS = "sibling_loads"
"""Key of a request's ``kv_transfer_params``: how many tokens this connector promises for it."""


@dataclass
class SiblingHandshake(KVConnectorHandshakeMetadata):
    """Nobody else's."""

    address: str = "here"


@dataclass
class SiblingMetadata(KVConnectorMetadata):
    """Blocks that a step is to load."""

    block_ids: list[int] = field(default_factory=list)


class SiblingConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.heard: list[KVConnectorHandshakeMetadata] = []
        self._promised: dict[str, int] = {}
        self._next: list[int] = []
        self._failed: set[int] = set()

    def get_handshake_metadata(self) -> SiblingHandshake:
        return SiblingHandshake()

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        if not all(isinstance(each, SiblingHandshake) for each in metadata.values()):
            raise ValueError(f"another connector's handshake: {metadata}")  # as NIXL's does
        self.heard += metadata.values()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        promised = self._promised.setdefault(request.request_id, (request.kv_transfer_params or {}).get(LOADS, 0))
        return max(0, promised - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            block_size = self._vllm_config.cache_config.block_size
            end = self._promised[request.request_id]
            self._promised[request.request_id] = 0
            self._next += blocks.get_block_ids()[0][(end - num_external_tokens) // block_size : end // block_size]

    def build_connector_meta(self, scheduler_output: Any) -> SiblingMetadata:
        planned, self._next = self._next, []
        return SiblingMetadata(planned)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SiblingMetadata)
        self._failed.update(metadata.block_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._promised.pop(request.request_id, None)
        return False, None


class NixlLikeConnector(SiblingConnector):
    """It hands prompts over to other engines: its answers have the keys that NIXL's have, and kvstore's tickets."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished_all_groups(request, block_ids)
        asks = (request.kv_transfer_params or {}).get("do_remote_decode")
        return False, {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "here"} if asks else None
