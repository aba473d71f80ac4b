"""vLLM's V1 connector: the only file that imports vLLM. It translates vLLM's objects for the connector's two halves.

::

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_connector_module_path": "connector.vllm",
                           "kv_role": "kv_both", "kv_connector_extra_config": {"url": "unix:///run/kvstore.sock"}}'

Each worker describes its own pages (:meth:`KVStoreConnector.register_kv_caches`) and tells the scheduler by vLLM's
handshake at start, so that both speak of the same namespaces. Before that, and where a worker can't say what its bytes
mean, everything is a miss.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.version import __version__ as vllm_version

from connector.supported import check_version

check_version(vllm_version)  # before what another release may not have

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    group_kernel_blocks,
)
from vllm.v1.request import RequestStatus

from connector.announcements import Announcements, Block
from connector.handover import Handover, Prompt, default_node_id
from connector.hits import NumSkipped, longest_hit
from connector.identity import CacheGroup, Place, layouts
from connector.lookups import Tiers
from connector.metrics import METRICS, Counts, Increments, lookup_counts, ticket_counts, together, worker_counts
from connector.options import KEEP, RECOMPUTE, Options
from connector.peers import Peers
from connector.plan import StepPlan
from connector.scheduler import NULL_BLOCK_ID, SchedulerConnector
from connector.tracked import Tracked, wishes
from connector.vllm_values import Hashes, check_parallel, layers_of, model_of, new_blocks, rows_of
from connector.worker import LoadTiming, WorkerConnector
from connector.worth import Speeds
from gpu.arena import PinnedArena
from gpu.pages import PagedKV
from gpu.pinned import PinnedMapping
from kvstore.client.environment import connect_by_environment
from kvstore.errors import KVStoreError, ResourceError
from kvstore.layout import Layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvstore import Namespace

logger = init_logger("vllm.kvstore")  # below vLLM's own logger, or nobody would see its lines


@dataclass
class KVStoreMetadata(KVConnectorMetadata):
    """One step's plan on its way to the workers, as :class:`connector.plan.StepPlan` packs it."""

    plan: bytes
    step: int = 0
    """Not 0: the scheduler wants to know when this step is over."""


@dataclass
class KVStoreWorkerMetadata(KVConnectorWorkerMetadata):
    """What workers tell the scheduler: a step that is over, and how long loads took."""

    step: int
    timings: list[LoadTiming]
    stored: list[tuple[int, tuple[bytes, ...]]]
    """Groups and hashes; empty where nobody listens to block events."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVStoreWorkerMetadata:
        """Of all ranks."""
        assert isinstance(other, KVStoreWorkerMetadata)
        return KVStoreWorkerMetadata(
            max(self.step, other.step), self.timings + other.timings, self.stored + other.stored
        )


@dataclass
class KVStoreHandshake(KVConnectorHandshakeMetadata):
    """What a worker's pages are."""

    layouts: list[str]
    """By cache group: :class:`kvstore.Layout` as JSON."""
    host: str = ""
    """The machine that it runs on."""


class KVStoreStats(KVConnectorStats):  # a dataclass, with ``data``: counts as :mod:`connector.metrics` names them
    """What the halves have counted since it was last told."""

    def reset(self) -> None:
        """Forget it."""
        self.data: Counts = {}

    def aggregate(self, other: KVConnectorStats) -> KVStoreStats:
        """Of several workers, and of the scheduler, together."""
        self.data = together(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return {f"kvstore {name.replace('|', ' ')}": round(value, 3) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Nothing was counted."""
        return not self.data


class KVStoreMetrics(KVConnectorPromMetrics):
    """The same as counters on vLLM's ``/metrics``: ``vllm:kvstore_*``."""

    def __init__(
        self, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:kvstore_{name}",
                documentation=metric.documentation,
                labelnames=[*labelnames, *([metric.label] if metric.label else [])],
            )
            for name, metric in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what was counted."""
        for name, value in transfer_stats_data.items():
            metric, _, label = name.partition("|")
            labels = [*self.per_engine_labelvalues[engine_idx], *([label] if label else [])]
            self._counters[metric].labels(*labels).inc(max(0.0, value))


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV blocks in kvstore. See :mod:`connector.vllm`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        self._options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._client = connect_by_environment(self._options.url, os.environ)
        self._peers = Peers(self._options.peers, os.environ)
        self._ticket_key = self._options.ticket_key
        self._handover: Handover | None = None
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        self._plan = StepPlan()
        self._layouts: list[Layout] = []
        self._writes = True
        self._increments = Increments()
        self._speeds = Speeds()
        self._step = 0
        self._timed: dict[int, tuple[float, int]] = {}  # when steps began, and their tokens
        self._step_over = 0.0
        self._seconds_saved = 0.0
        events = vllm_config.kv_events_config
        self._has_listeners = events is not None and events.enable_kv_cache_events
        self._announcements: Announcements | None = None
        self._vllm_hash_block = 0
        self._loads_declined = 0
        self._requests: dict[str, Tracked] = {}
        self._block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._hashes = Hashes(math.gcd(*self._block_sizes))
        self._hashes_a_block = [size // self._hashes.block_size for size in self._block_sizes]
        self._num_skipped: list[NumSkipped] = []
        # Whether blocks stay with their request until its end: then a load may cover a prompt to its last token.
        self._keeps = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in kv_cache_config.kv_cache_groups]
        self._keeps_all = all(self._keeps)
        # A load in the step that needs it can't be told to have failed where blocks are of several groups.
        self._async_load = self._options.async_load or len(self._block_sizes) > 1
        if role is KVConnectorRole.SCHEDULER:
            if self._async_load and not self._options.async_load:
                logger.info("kvstore loads asynchronously: this model has several cache groups")
            self._set_failure_policy()

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is given up is a miss later on."""
        return False

    def shutdown(self) -> None:
        """Ends what is under way, stores first; a second call changes nothing."""
        if self._worker is not None:
            atexit.unregister(self.shutdown)
            self._worker.wait_for_save()
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()
        self._peers.close()
        self._client.close()

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        """What this half has counted since it was last asked."""
        counts: Counts = {}
        if self._worker is not None:
            counts = worker_counts(self._worker.statistics())
        elif self._scheduler is not None:
            counts = lookup_counts(self._scheduler.statistics())
            counts |= {"seconds_saved": self._seconds_saved, "loads_declined": self._loads_declined}
            if self._handover is not None:
                counts |= ticket_counts(self._handover.statistics())
        changed = self._increments.take(counts)
        return KVStoreStats(data=changed) if changed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        """From what another process has told."""
        return KVStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVStoreMetrics:
        """Counters on vLLM's ``/metrics``."""
        return KVStoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describes the pages and begins to serve. Where that can't be, the engine goes on without kvstore."""
        config, groups = self._kv_cache_config, self._kv_cache_config.kv_cache_groups
        try:
            _check_kinds(config)
            check_parallel(self._vllm_config.parallel_config)
            views = [
                [
                    rows_of(group_kernel_blocks(kv_caches[name], config.num_blocks), spec.page_size_bytes)
                    for name, spec in layers_of(g)
                ]
                for g in groups
            ]
            place = _place(self._vllm_config, config.kv_tp_replicas)
            described = [self._describe(group, kv_caches, of) for group, of in zip(groups, views, strict=True)]
            self._layouts = layouts(model_of(self._vllm_config), described, place, self._options.tenant)
            pages = [PagedKV(tensors, "block dim") for tensors in views]
        except Exception as error:  # noqa: BLE001 - a model that kvstore does not know is no error of vLLM's
            self._layouts = []
            logger.warning("vLLM runs without kvstore: %s: %s", type(error).__name__, error)
            return
        self._writes = _tp_rank() % config.kv_tp_replicas == 0
        device = views[0][0].device
        on_cuda = device.type == "cuda"
        self._worker = WorkerConnector(
            self._namespaces(self._layouts),
            pages,
            load_deadline=self._options.load_deadline_ms / 1000,
            store_deadline=self._options.store_deadline_ms / 1000,
            arena=PinnedArena(lambda: self._client.arena, partial(_pin, device)) if on_cuda else None,
            peers=self._peers.namespaces(self._layouts),
        )
        atexit.register(self.shutdown)
        for layout in self._layouts:
            logger.info("kvstore at %s: %s, %d bytes a page", self._options.url, layout.name, layout.page_bytes)

    def get_handshake_metadata(self) -> KVStoreHandshake | None:
        """This worker's layouts, for the scheduler; None: it has nothing to say."""
        if not self._layouts:
            return None
        return KVStoreHandshake([layout.to_json() for layout in self._layouts], socket.gethostname())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Gives up stores of blocks that this step overwrites."""
        assert isinstance(kv_connector_metadata, KVStoreMetadata)
        self._plan = StepPlan.from_bytes(kv_connector_metadata.plan)
        self._step = kv_connector_metadata.step
        if self._worker is not None:
            self._worker.handle_preemptions(self._plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begins the step's loads; waits for them where the step computes what it loads."""
        if self._worker is None or not self._plan.loads:
            return
        self._worker.start_load_kv(self._plan)
        if not self._async_load:
            self._worker.wait_for_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are over before the forward pass that needs them."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing yet: blocks are stored behind the forward pass."""

    def wait_for_save(self) -> None:
        """Begins the step's stores, and does not wait for them. Of ranks that hold the same, one stores."""
        if self._worker is not None:
            self._worker.start_save_kv(self._plan if self._writes else replace(self._plan, stores=()))
        self._plan = StepPlan()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks are read no longer, and requests whose loads are over."""
        if self._worker is None:
            return set(), set()
        sent, received = self._worker.get_finished()
        return sent, received if self._async_load else set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The same, and which loads failed where blocks can't be named (several cache groups)."""
        sent, received = self.get_finished(finished_req_ids)
        failed = self._worker.get_requests_with_load_errors() if self._worker is not None else set()
        return KVConnectorTransferResults(sent, received, failed if len(self._layouts) > 1 else set())

    def build_connector_worker_meta(self) -> KVStoreWorkerMetadata | None:
        """What the scheduler needs to know to choose between loading and computing."""
        timings = self._worker.take_load_timings() if self._worker is not None else []
        stored = self._worker.take_stored() if self._worker is not None and self._has_listeners else []
        step, self._step = self._step, 0
        return KVStoreWorkerMetadata(step, timings, stored) if step or timings or stored else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute."""
        errors = self._worker.get_block_ids_with_load_errors() if self._worker is not None else set()
        return errors if len(self._layouts) == 1 else set()

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers have told what their pages are: from now on there may be hits."""
        parallel = self._vllm_config.parallel_config
        told = [each for _, each in sorted(metadata.items()) if isinstance(each, KVStoreHandshake)]
        if len(told) != parallel.tensor_parallel_size * parallel.pipeline_parallel_size:
            logger.warning("vLLM runs without kvstore: not every worker could describe its pages")
            return
        away = {each.host for each in told} - {"", socket.gethostname()}
        if away and self._options.url.startswith("unix:"):
            logger.warning(
                "vLLM runs without kvstore: there are workers on %s, and %s is a socket of this machine alone;"
                " name one node by kv:// or kvs:// for all of them",
                ", ".join(sorted(away)),
                self._options.url,
            )
            return
        self._layouts = [Layout.from_json(text) for text in told[0].layouts]
        ranks = {text: Layout.from_json(text) for each in told for text in each.layouts}
        parts = [[ranks[text] for text in each] for each in dict.fromkeys(tuple(each.layouts) for each in told)]
        own, *others = map(self._namespaces, parts)
        self._scheduler = SchedulerConnector(
            self._client,
            own,
            other_ranks=others,
            lookup_budget=self._options.lookup_budget_ms / 1000,
            store_threshold=self._options.store_threshold,
            peers=self._peers.ranks(parts),
        )
        if self._has_listeners:
            self._announcements = Announcements(len(parts))
            self._vllm_hash_block = resolve_kv_cache_block_sizes(self._kv_cache_config, self._vllm_config)[1]
        if self._ticket_key is not None:
            self._handover = Handover(
                self._scheduler,
                self._ticket_key,
                self._options.node_id or default_node_id(self._options.url),
                [layout for of_rank in parts for layout in of_rank],
                self._peers.names,
                wait=self._options.load_deadline_ms / 1000,
            )
            self._peers.compare(self._layouts)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Which blocks a hit needs is vLLM's to say."""
        super().bind_kv_cache_manager(kv_cache_manager)
        managers = kv_cache_manager.coordinator.single_type_managers
        self._num_skipped = [manager.get_num_skipped_tokens for manager in managers]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens kvstore can add to what vLLM has; None: not known yet. Plans nothing."""
        if self._scheduler is not None and not self._hashes.ready(request):
            return None, False
        tracked = self._track(request)
        if (
            self._scheduler is None
            or tracked.chain is None
            or not tracked.may_load
            or request.skip_reading_prefix_cache
        ):
            return 0, False
        tracked.loading = False
        tracked.lets_pass &= {name for name, each in self._requests.items() if each.loading}
        if tracked.lets_pass:
            return None, False
        tracked.num_local = num_computed_tokens
        # An asynchronous load may cover the whole prompt: vLLM then computes its last token again.
        limit = request.num_tokens - (0 if self._async_load and self._keeps_all else 1)
        hashes = [
            of_group[: limit // size]
            for of_group, size in zip(tracked.hashes(self._hashes_a_block), self._block_sizes, strict=True)
        ]
        presence = self._scheduler.get_presence(request.request_id, hashes, num_computed_tokens)
        if presence is None:
            return None, False
        if self._announcements is not None and not tracked.looked_up:
            tiers = self._scheduler.offered_tiers(request.request_id)
            tracked.looked_up = bool(tiers)
            for group, (names, where) in enumerate(zip(hashes, tiers, strict=False)):
                for name, tier in zip(names, where, strict=False):
                    if tier is None:
                        self._announcements.miss(group, name)
        hit = longest_hit(list(presence.values()), self._block_sizes, self._num_skipped, num_computed_tokens, limit)
        if hit > num_computed_tokens:
            pages, size = self._pages(self._scheduler.offered_tiers(request.request_id), num_computed_tokens, hit)
            limit = num_computed_tokens + self._speeds.worth(pages, size) * size
            if pages and limit < hit:
                self._loads_declined += not tracked.declined
                tracked.declined = True
                hit = longest_hit(
                    list(presence.values()), self._block_sizes, self._num_skipped, num_computed_tokens, limit
                )
        if hit > num_computed_tokens and self._scheduler.partials_are_there(request.request_id):
            length = request.num_prompt_tokens
            if all(hit == length // size * size for size in self._block_sizes):
                hit = max(hit, length - 1)  # the last token is computed in any case
        matched = hit - num_computed_tokens
        return matched, matched > 0 and self._async_load

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has given the request blocks; those of the external tokens are to be filled."""
        if self._scheduler is None:
            return
        tracked = self._track(request)
        loads: dict[int, list[tuple[int, int]]] = {}
        if num_external_tokens:
            end = tracked.num_local + num_external_tokens
            for group, (size, block_ids) in enumerate(zip(self._block_sizes, blocks.get_block_ids(), strict=True)):
                places = range(tracked.num_local // size, -(-end // size))
                loads[group] = [(at, block_ids[at]) for at in places if block_ids[at] != NULL_BLOCK_ID]
                self._allocated(block_id for _, block_id in loads[group])
            tracked.loading = True
            tiers = self._scheduler.offered_tiers(request.request_id)
            self._seconds_saved += self._speeds.gain(*self._pages(tiers, tracked.num_local, end))
        self._scheduler.update_state_after_alloc(request.request_id, loads)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Where these tokens come from, as vLLM calls it: by the tier of the pages that reach furthest back."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        names = {"arena": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
        pages = self._scheduler.loading_tiers(request.request_id) if self._scheduler is not None else ()
        tokens: Counter[Any] = Counter()
        for group, _, tier in pages:
            if group == pages[0][0]:
                # The last page may be of a block that is not full.
                count = min(self._block_sizes[group], num_external_tokens - tokens.total())
                tokens[names.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
        unknown = num_external_tokens - tokens.total()
        if unknown:
            tokens[CacheHitSource.EXTERNAL_UNSPECIFIED] += unknown
        return {source: count for source, count in tokens.items() if count > 0}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVStoreMetadata:
        """Everything for the workers in this step."""
        if self._scheduler is None:
            return KVStoreMetadata(_NOTHING)
        for request_id in scheduler_output.preempted_req_ids or ():
            if (tracked := self._requests.get(request_id)) is not None:
                self._notice_preemption(tracked)
        if not self._keeps_all:
            self._allocated(new_blocks(scheduler_output, self._requests, self._block_sizes))
        state = scheduler_output.kv_connector_block_state
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            waits, tracked.loading = tracked.loading and not self._async_load, False
            if waits or tracked.chain is None or not tracked.may_store:
                continue  # a load in this step may fail: what it was to fill is looked at afterwards
            request = tracked.request
            # Where a step computes on blocks that it loads, what it computes counts once the load is known to be good.
            computed = (
                request.num_computed_tokens + scheduled
                if self._async_load
                else request.num_computed_tokens - request.num_in_flight_tokens
            )
            self._save(tracked, computed, partial(state.get_block_ids, request_id))
        plan = self._scheduler.build_connector_meta()
        if not self._keeps_all:  # blocks that may soon be given to others are stored first
            plan = replace(plan, stores=tuple(sorted(plan.stores, key=lambda store: self._keeps[store.group])))
        step = 0
        if scheduler_output.total_num_scheduled_tokens >= _TIMED_TOKENS:
            self._step = step = self._step + 1
            self._timed[step] = time.monotonic(), scheduler_output.total_num_scheduled_tokens
        return KVStoreMetadata(plan.to_bytes() if plan else _NOTHING, step)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished_all_groups`, for one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: its blocks are held until its stores are."""
        tracked = self._requests.pop(request.request_id, None)
        if self._scheduler is None or tracked is None:
            return False, None
        self._notice_preemption(tracked)
        if request.num_computed_tokens and not tracked.loading and tracked.may_store:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            self._save(tracked, computed, lambda: block_ids)
        params = self._ticket(tracked, block_ids)
        return self._scheduler.request_finished(request.request_id), params

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers have reported."""
        if isinstance(told := connector_output.kv_connector_worker_meta, KVStoreWorkerMetadata):
            self._note_timings(told)
        if self._scheduler is not None:
            self._scheduler.update_connector_output(
                connector_output.finished_sending or (),
                connector_output.finished_recving or (),
                connector_output.invalid_block_ids,
                connector_output.failed_recving,
            )
        # vLLM takes the blocks of a failed load back, and looks at nobody behind a request for which there are too few:
        # a window takes more to compute than to load. Who holds blocks must not wait behind it, or neither ever runs.
        loading = {name for name, tracked in self._requests.items() if tracked.loading}
        for request_id in connector_output.failed_recving:
            if (failed := self._requests.get(request_id)) is not None:
                failed.lets_pass = frozenset(loading - {request_id})

    def has_pending_block_frees(self) -> bool:
        """Whether stores hold blocks that come free without a preemption."""
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that kvstore has, under vLLM's names for them, and blocks that it has lost."""
        if self._announcements is None:
            return
        stored, removed = self._announcements.take()
        for block in stored:
            yield BlockStored(
                block_hashes=[block.name],
                parent_block_hash=block.parent,
                token_ids=list(block.token_ids),
                block_size=len(block.token_ids),
                lora_id=block.lora_id,
                lora_name=block.lora_name,
                medium=MEDIUM_CPU,
                group_idx=block.group,
                ownership="kvstore",
            )
        for block in removed:
            yield BlockRemoved(block_hashes=[block.name], medium=MEDIUM_CPU, group_idx=block.group, ownership="kvstore")

    def reset_cache(self) -> bool:
        """Nothing that was stored is found by this engine any more, whose weights may be others from now on. What it
        stores is found until it ends, by itself alone; the pages of others stay."""
        self._hashes.reset()
        for tracked in self._requests.values():
            tracked.chain = None
        return True

    def _namespaces(self, described: Iterable[Layout]) -> list[Namespace]:
        """Opened now if the node is there, or else as soon as it is."""
        namespaces = [self._client.namespace(layout, lazy=True) for layout in described]
        try:
            self._client.lookup([(namespace, ()) for namespace in namespaces])
        except KVStoreError as error:
            logger.warning("kvstore at %s is not there yet, vLLM starts without it: %s", self._options.url, error)
        return namespaces

    def _track(self, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            store, load = wishes(request.kv_transfer_params)
            tracked = Tracked(
                request,
                self._hashes.chain(request),
                len(self._block_sizes),
                request.num_preemptions,
                may_store=store and self._kv_transfer_config.is_kv_producer,
                may_load=load and self._kv_transfer_config.is_kv_consumer,
                hands_over=_asks(request, "do_remote_decode"),
            )
            self._requests[request.request_id] = tracked
            self._take_ticket(tracked)
        self._notice_preemption(tracked)
        return tracked

    def _take_ticket(self, tracked: Tracked) -> None:
        """A prefill instance may have computed this request's prompt."""
        request = tracked.request
        if not _asks(request, "do_remote_prefill") or tracked.chain is None or not tracked.may_load:
            return
        if self._hashes.private:
            return  # nothing that another instance has stored is found any more
        if self._handover is None:
            logger.warning_once("a request came with a ticket, and this instance has no ticket_key_file: it computes")
        elif not request.skip_reading_prefix_cache:
            self._handover.take(request.request_id, request.kv_transfer_params, self._prompt(tracked))

    def _ticket(self, tracked: Tracked, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """What a request is answered with that another instance goes on with."""
        request = tracked.request
        if not tracked.hands_over or tracked.chain is None or not tracked.may_store or self._hashes.private:
            return None
        if self._handover is None:
            logger.warning_once("a request asks for a ticket, and this instance has no ticket_key_file: it gets none")
            return None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if request.status not in _DONE or tracked.loading or computed < request.num_prompt_tokens:
            return None
        return self._handover.give(request.request_id, self._prompt(tracked), block_ids)

    def _prompt(self, tracked: Tracked) -> Prompt:
        assert tracked.chain is not None
        tracked.hashes(self._hashes_a_block)  # the chain has all blocks now
        request = tracked.request
        return Prompt(request.all_token_ids[: request.num_prompt_tokens], tracked.chain, self._hashes.block_size)

    def _notice_preemption(self, tracked: Tracked) -> None:
        if tracked.num_preemptions == tracked.request.num_preemptions:
            return
        tracked.restart(self._hashes.chain(tracked.request))
        if self._scheduler is not None:
            self._scheduler.request_preempted(tracked.request.request_id)

    def _save(self, tracked: Tracked, num_computed: int, block_ids: Callable[[], Any]) -> None:
        """Plans to store blocks that are full when the step is over."""
        assert self._scheduler is not None
        num_known = min(num_computed, tracked.request.num_tokens)
        if tracked.chain is None or all(
            num_known // size <= saved for size, saved in zip(self._block_sizes, tracked.num_saved, strict=True)
        ):
            return
        ids, hashes = block_ids(), tracked.hashes(self._hashes_a_block)
        for group, size in enumerate(self._block_sizes):
            full = min(num_known // size, len(ids[group]))
            # Where steps wait for their loads, vLLM shares blocks before it is known that they were filled: whoever
            # loads or computes a block stores it, and nobody who found it.
            found = 0 if self._async_load else min(full, tracked.num_local // size)
            self._scheduler.save_blocks(
                tracked.request.request_id,
                group,
                hashes[group][:full],
                [NULL_BLOCK_ID] * found + ids[group][found:full],
                wanted=tracked.hands_over,
            )
            if self._announcements is not None:
                self._plan_announcements(tracked, group, hashes[group], range(tracked.num_saved[group], full))
            tracked.num_saved[group] = full

    def _plan_announcements(self, tracked: Tracked, group: int, hashes: Sequence[bytes], blocks: range) -> None:
        """vLLM's names of blocks that are being stored: the last of its hashes in each."""
        assert self._announcements is not None
        request, size = tracked.request, self._block_sizes[group]
        hashes_a_block = size // self._vllm_hash_block
        names = [maybe_convert_block_hash(name) for name in request.block_hashes[hashes_a_block - 1 :: hashes_a_block]]
        lora = request.lora_request
        for index in blocks[: max(0, len(names) - blocks.start)]:
            block = Block(
                names[index],
                names[index - 1] if index else None,
                request.all_token_ids[index * size : (index + 1) * size],
                group,
                lora.adapter_id if lora is not None else None,
                lora.name if lora is not None else None,
            )
            self._announcements.plan(hashes[index], block)

    def _pages(self, tiers: Tiers, num_local: int, end: int) -> tuple[list[str], int]:
        """The tiers of the pages of these tokens, in the group whose pages are all needed, and tokens a page."""
        group = self._keeps.index(True) if True in self._keeps else 0
        size = self._block_sizes[group]
        return [tier or "" for tier in tiers[group][num_local // size : end // size]] if tiers else [], size

    def _note_timings(self, told: KVStoreWorkerMetadata) -> None:
        """A step is over, and loads were. A step that was queued behind another one began when that one ended."""
        if self._announcements is not None:
            for group, hashes in told.stored:
                self._announcements.store(group, hashes)
        for tier, pages, seconds in told.timings:
            self._speeds.note_load(tier, pages, seconds)
        if told.step in self._timed:
            now = time.monotonic()
            began, tokens = self._timed.pop(told.step)
            self._speeds.note_prefill(tokens, now - max(began, self._step_over))
            self._step_over = now
            self._timed = {step: timed for step, timed in self._timed.items() if step > told.step}

    def _allocated(self, block_ids: Iterable[int]) -> None:
        """Blocks that are overwritten from this step on; of windows they may come from a request that goes on."""
        if self._scheduler is not None and not self._keeps_all:
            self._scheduler.blocks_allocated(block_id for block_id in block_ids if block_id != NULL_BLOCK_ID)

    def _describe(self, group: Any, kv_caches: Mapping[str, torch.Tensor], views: list[torch.Tensor]) -> CacheGroup:
        spec = next(spec for _, spec in layers_of(group))
        names = [name for name, _ in layers_of(group)]
        context = self._vllm_config.compilation_config.static_forward_context
        details = [f"vllm-{vllm_version}"]
        details += [backend.get_name() for backend in get_current_attn_backends(self._vllm_config, names)]
        details.append(str(getattr(self._kv_cache_config, "kv_cache_layout", "")))
        for name, layer_spec in layers_of(group):
            inside = group_kernel_blocks(kv_caches[name], self._kv_cache_config.num_blocks)[0]
            isa = getattr(context.get(name), "isa", "")
            details.append(f"{name} {tuple(inside.shape)} {inside.stride()} {inside.dtype} {isa} {layer_spec!r}")
        return CacheGroup(
            block_size=spec.block_size,
            page_bytes=sum(view.shape[1] for view in views),
            dtype=str(getattr(spec, "dtype", "")).removeprefix("torch."),
            layers=len(names),
            kv_heads=getattr(spec, "num_kv_heads", 0),
            head_size=getattr(spec, "head_size", 0),
            details=details,
        )

    def _set_failure_policy(self) -> None:
        """vLLM fails a request whose load failed, unless told otherwise; it reads the policy after this connector."""
        transfer = self._kv_transfer_config
        if self._options.load_failure_policy == KEEP:
            logger.info("kvstore leaves kv_load_failure_policy as it is: %s", transfer.kv_load_failure_policy)
        elif transfer.kv_load_failure_policy != RECOMPUTE:
            transfer.kv_load_failure_policy = RECOMPUTE
            logger.info(
                "kvstore sets kv_load_failure_policy to 'recompute': what can't be loaded is computed"
                ' ("load_failure_policy": "keep" leaves vLLM\'s own)'
            )


_NOTHING = StepPlan().to_bytes()

_TIMED_TOKENS = 64
"""Fewest tokens of a step that tells how fast prefill is."""


_DONE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def _asks(request: Request, key: str) -> bool:
    """Whether a request's ``kv_transfer_params`` say so."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get(key))


def _log_as_vllm_does() -> None:
    """What the halves and the client have to say appears where vLLM's lines do."""
    ours = logging.getLogger("kvstore")
    if not ours.handlers:
        ours.handlers = list(logging.getLogger("vllm").handlers)
        ours.propagate = False


def _tp_rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def _place(config: VllmConfig, replicas: int) -> Place:
    """Which part of the model this worker has. Ranks that hold the same have the same place."""
    from vllm.distributed.parallel_state import get_pp_group

    parallel = config.parallel_config
    return Place(
        tp_size=parallel.tensor_parallel_size // replicas,
        tp_rank=_tp_rank() // replicas,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=get_pp_group().rank_in_group,
    )


_KINDS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Kinds of cache groups whose blocks are pages: what a block holds depends on the tokens up to its end alone."""


def _check_kinds(config: KVCacheConfig) -> None:
    specs = [spec for group in config.kv_cache_groups for _, spec in layers_of(group)]
    if unknown := sorted({type(spec).__name__ for spec in specs if type(spec) not in _KINDS}):
        raise ResourceError(f"layers of the kind {', '.join(unknown)} are not kept")
    everything = tuple(range(len(config.kv_cache_groups)))
    if config.prefix_cacheable_group_ids != everything or any(spec.prefix_replay_tokens for spec in specs):
        raise ResourceError("some cache groups of this model can't be found by prefix")


def _pin(device: torch.device, memory: Any) -> PinnedMapping:
    with torch.cuda.device(device):  # or this thread would begin to use the first one
        return PinnedMapping(memory)
