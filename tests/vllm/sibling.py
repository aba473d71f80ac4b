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

SIBLING = {
    "kv_connector": "SiblingConnector",
    "kv_connector_module_path": "tests.vllm.sibling",
    "kv_role": "kv_both",
}
NIXL_LIKE = SIBLING | {"kv_connector": "NixlLikeConnector"}
"""As ``MultiConnector`` is told of them."""
LOADS = "sibling_loads"
"""Key of a request's ``kv_transfer_params``: how many tokens this connector promises for it."""
LOADS_LATER, STEPS, LOST = "sibling_loads_later", "sibling_steps", "sibling_lost"
"""The same for :class:`NixlLikeConnector`: it promises so many tokens, which come so many steps later, all but so many
blocks at the end (none)."""
HOLDS = "sibling_holds"
"""For how many steps it holds the blocks of the request when this is over."""


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


@dataclass
class NixlLikeMetadata(SiblingMetadata):
    """What a step begins beside."""

    loads: list[NixlLikeLoad] = field(default_factory=list)
    holds: dict[str, int] = field(default_factory=dict)


@dataclass
class NixlLikeLoad:
    """KV that comes from another engine, some steps later."""

    request_id: str
    steps: int
    block_ids: list[int]
    numbers: list[int]
    """The KV of each token in these blocks."""
    lost: int
    """So many of the blocks, the last ones, are not filled."""


class NixlLikeConnector(SiblingConnector):
    """It hands prompts over to other engines: its answers have the keys that NIXL's have, and kvstore's tickets. It
    holds the blocks of requests that are over, and loads while others are computed: layers that keep all tokens alone.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads: list[NixlLikeLoad] = []
        self._holds: dict[str, int] = {}
        self._told: set[str] = set()
        self._caches: dict[str, Any] = {}
        self.held: dict[str, int] = {}
        """The worker half's: for how many steps more it holds a request's blocks."""
        self.loading: list[NixlLikeLoad] = []
        """The worker half's: what has not come yet."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if LOADS_LATER not in params:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        if request.request_id in self._told:
            return 0, False  # once: what was lost is computed
        return max(0, params[LOADS_LATER] - num_computed_tokens), True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if LOADS_LATER not in params:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        elif num_external_tokens:
            from tests.vllm.loop import numbers_of  # beside a real model, whose KV this is not, there is none

            self._told.add(request.request_id)
            size, end = self._vllm_config.cache_config.block_size, params[LOADS_LATER]
            start = end - num_external_tokens
            self._loads.append(
                NixlLikeLoad(
                    request.request_id,
                    params[STEPS],
                    list(blocks.get_block_ids()[0][start // size : end // size]),
                    numbers_of(request.prompt_token_ids)[start:end],
                    params.get(LOST, 0),
                )
            )

    def build_connector_meta(self, scheduler_output: Any) -> NixlLikeMetadata:
        loads, self._loads = self._loads, []
        holds, self._holds = self._holds, {}
        return NixlLikeMetadata(super().build_connector_meta(scheduler_output).block_ids, loads, holds)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished_all_groups(request, block_ids)
        self._told.discard(request.request_id)
        params = request.kv_transfer_params or {}
        if HOLDS in params:
            self._holds[request.request_id] = params[HOLDS]
        asks = params.get("do_remote_decode")
        answer = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "here"} if asks else None
        return HOLDS in params, answer

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, NixlLikeMetadata)
        self.loading += metadata.loads
        self.held |= metadata.holds

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.held = {name: steps - 1 for name, steps in self.held.items()}
        sent = {name for name, steps in self.held.items() if steps <= 0}
        self.held = {name: steps for name, steps in self.held.items() if steps > 0}
        for load in self.loading:
            load.steps -= 1
        come = [load for load in self.loading if load.steps <= 0]
        self.loading = [load for load in self.loading if load.steps > 0]
        for load in come:
            self._fill(load)
        return sent, {load.request_id for load in come}

    def _fill(self, load: NixlLikeLoad) -> None:
        filled = len(load.block_ids) - load.lost
        self._failed.update(load.block_ids[filled:])
        size = self._vllm_config.cache_config.block_size
        for index, block_id in enumerate(load.block_ids[:filled]):
            for cache in self._caches.values():
                for offset, number in enumerate(load.numbers[index * size : (index + 1) * size]):
                    cache[block_id, :, offset] = float(number)
