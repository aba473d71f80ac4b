"""vLLM's V1 connector: it translates vLLM's objects for the connector's two halves.

Only this file and ``vllm_plugin.py``, by which vLLM finds it, import vLLM.

::

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both"}'

Each worker describes its own pages (:meth:`KVStoreConnector.register_kv_caches`) and tells the scheduler by vLLM's
handshake at start, so that both speak of the same namespaces. Before that, and where a worker can't say what its bytes
mean, everything is a miss.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.version import __version__ as vllm_version

from kvstore.connector.engine.versions import check_version, run_in_part

check_version(vllm_version)  # before what another release may not have

from vllm.config import CUDAGraphMode
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
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import group_kernel_blocks

from kvstore.client_name import MOST_NAME
from kvstore.connector.engine.block_events import BlockEvents
from kvstore.connector.engine.enclosing import (
    LateHandshake,
    check_ticket_givers,
    enclosing_transfers,
    fails_requests,
    hands_over,
)
from kvstore.connector.engine.groups import fails_by_block, group_of, heads_in_common, layers_of, touches_early
from kvstore.connector.engine.identity import (
    CacheGroup,
    Place,
    cache_group,
    layouts_by_part,
    model_label,
    model_of,
    parts_a_rank,
)
from kvstore.connector.engine.load_admission import LoadAdmission
from kvstore.connector.engine.metrics import METRICS, Counts, Increments, together, worker_counts
from kvstore.connector.engine.options import KEEP, RECOMPUTE, Options
from kvstore.connector.engine.page_parts import check_urls, parts_of
from kvstore.connector.engine.page_rows import layout_in_page, rows_by_part
from kvstore.connector.engine.requests import EngineRequests
from kvstore.connector.engine.setup import NodeClients, log_beside
from kvstore.connector.engine.supported import check_groups, check_model, check_parallel
from kvstore.connector.plan import StepPlan
from kvstore.connector.worker import SHUTDOWN_WAIT, WorkerConnector
from kvstore.connector.worker_statistics import LoadTiming
from kvstore.errors import ConfigError, KVStoreError
from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.mixed import paged_kv
from kvstore.gpu.pinned import PinnedMapping
from kvstore.layout import Layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


logger = init_logger("vllm.kvstore")  # below vLLM's own logger, or nobody would see its lines


@dataclass
class KVStoreMetadata(KVConnectorMetadata):
    """One step's plan on its way to the workers, as :class:`kvstore.connector.plan.StepPlan` packs it."""

    plan: bytes
    step: int = 0
    """Not 0: the scheduler wants to know when this step is over."""
    storing: frozenset[int] = frozenset()
    """Which workers store. The others hold what one of these does, and have the same node."""
    asks: bool = False
    """Workers are to tell what their pages are, of which there was no handshake."""


@dataclass
class KVStoreWorkerMetadata(KVConnectorWorkerMetadata):
    """What workers tell the scheduler: a step that is over, and how long loads took."""

    step: int
    timings: list[LoadTiming]
    stored: list[tuple[int, tuple[bytes, ...]]]
    """Groups and hashes; empty where nobody listens to block events."""
    told: dict[tuple[int, int], KVStoreHandshake]
    """By pipeline and tensor rank, where the scheduler asks for it."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVStoreWorkerMetadata:
        """Of all ranks."""
        assert isinstance(other, KVStoreWorkerMetadata)
        return KVStoreWorkerMetadata(
            max(self.step, other.step),
            self.timings + other.timings,
            self.stored + other.stored,
            self.told | other.told,
        )


@dataclass
class KVStoreHandshake(KVConnectorHandshakeMetadata):
    """What a worker's pages are."""

    layouts: list[list[str]]
    """By part, mostly a single one, and cache group: :class:`kvstore.Layout` as JSON."""
    host: str = ""
    """The machine that it runs on."""
    url: str = ""
    """Of the node where they are."""


class KVStoreStats(KVConnectorStats):  # a dataclass, with ``data``: counts as ``engine/metrics.py`` names them
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
    """Keeps vLLM's KV blocks in kvstore. See :mod:`kvstore.connector.vllm`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_beside("vllm")
        self._options = Options.parse(self._kv_transfer_config.kv_connector_extra_config).located(os.environ)
        self._enclosing = enclosing_transfers()
        self._beside = [
            each for made in self._enclosing[-1:] for each in made.kv_connector_extra_config.get("connectors", ())
        ]
        check_ticket_givers(self._beside)
        self._label = model_label(vllm_config.model_config.model)
        self._connection = NodeClients(self._options, os.environ, _client_name(vllm_config, role), self._label)
        self._layouts: list[list[Layout]] = []  # by part and group
        self._increments = Increments()
        events = vllm_config.kv_events_config
        self._has_listeners = events is not None and events.enable_kv_cache_events
        self._fails_by_block = fails_by_block([group_of(group) for group in kv_cache_config.kv_cache_groups])
        # A load in the step that needs it must be told to have failed before anything is planned on top of that step.
        self._async_load = self._options.async_load or not self._fails_by_block or _steps_overlap(vllm_config)
        # The worker half's.
        self._worker: WorkerConnector | None = None
        self._plan = StepPlan()
        self._is_asked = False
        self._is_computed = False  # the plan's step, on a rank that may not be told that its saves end
        self._step = 0
        self._layers: dict[str, int] = {}  # by name the place in a page, where all of them ask before they read
        self._awaited_layers: Mapping[str, int] = {}  # in this step
        # The scheduler half's.
        self._requests: EngineRequests | None = None
        self._block_events: BlockEvents | None = None
        parallel = vllm_config.parallel_config
        self._num_workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._dcp_size = int(parallel.decode_context_parallel_size)
        self._late = LateHandshake[KVStoreHandshake](self._num_workers if self._enclosing else 0)
        self._is_reset = False
        self._storing: frozenset[int] = frozenset()
        self._managers: Sequence[Any] = ()
        if role is KVConnectorRole.SCHEDULER:
            if self._async_load and not self._options.async_load:
                logger.warning(
                    'kvstore loads asynchronously in spite of "async_load": false, %s',
                    "which needs --no-async-scheduling and one pipeline stage: vLLM keeps what it computes behind a"
                    " load that fails"
                    if self._fails_by_block
                    else "since not all layers of this model keep all tokens",
                )
            self._set_failure_policy()
            if run_in_part(vllm_version):
                logger.warning(
                    "kvstore was run with vLLM %s in part only: `kvstore docs vllm` says what was run", vllm_version
                )

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is given up is a miss later on."""
        return False

    def shutdown(self) -> None:
        """Ends what is under way, stores first; a second call changes nothing."""
        if self._worker is not None:
            atexit.unregister(self.shutdown)
            self._worker.wait_for_save(SHUTDOWN_WAIT)
            self._worker.shutdown()
        if self._requests is not None:
            self._requests.shutdown()
        self._connection.close()

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        """What this half has counted since it was last asked."""
        counts: Counts = {}
        if self._worker is not None:
            counts = worker_counts(self._worker.statistics())
        elif self._requests is not None:
            counts = self._requests.counts()
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
        try:
            self._layouts, views = self._describe(kv_caches)
            pages = [[paged_kv(tensors) for tensors in of_part] for of_part in zip(*views, strict=True)]
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - a model that kvstore does not know is no error of vLLM's
            self._layouts = []
            logger.warning("vLLM runs without kvstore: %s: %s", type(error).__name__, error)
            return
        device = views[0][0][0].device
        runtime = cuda_runtime(device)
        pin = partial(PinnedMapping, runtime=runtime) if device.type == "cuda" else None
        self._layers = {} if self._async_load else self._layers_that_wait(self._kv_cache_config.kv_cache_groups[0])
        self._worker = self._connection.worker_half(
            self._layouts, pages, pin, by_layer=bool(self._layers), touched_early=self._is_touched_early()
        )
        atexit.register(self.shutdown)
        for layout in (layout for of_part in self._layouts for layout in of_part):
            name = layout.named(self._label)
            logger.info("kvstore at %s: %s, %d bytes a page", self._options.url, name, layout.page_bytes)

    def unregister_kv_caches(self) -> None:
        """vLLM, from 0.33 on, is about to take the KV cache's memory away: nothing copies from or to it any more."""
        self._end_step(self._is_computed)  # what it waits for is still there, and is not when the next step begins
        self._is_computed = False
        if self._worker is not None:
            self._worker.rest()

    def restore_kv_caches(self) -> None:
        """The memory is back, at its old addresses, and holds nothing."""
        if self._worker is not None:
            self._worker.wake()

    def get_handshake_metadata(self) -> KVStoreHandshake | None:
        """This worker's layouts, for the scheduler; None: it has nothing to say, or says it beside its first step,
        since MultiConnector hands on one handshake alone."""
        return self._handshake() if self._layouts and not self._enclosing else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Gives up stores of blocks that this step overwrites, or has overwritten: vLLM's V2 model runner may zero them
        before it calls this. What was copied by then of other blocks may be found from now on."""
        assert isinstance(kv_connector_metadata, KVStoreMetadata)
        self._end_step(self._is_computed)  # where it drafts tokens, vLLM asks the last pipeline rank alone to save
        self._is_computed = False
        self._plan = StepPlan.from_bytes(kv_connector_metadata.plan)
        self._step = kv_connector_metadata.step
        self._is_asked = kv_connector_metadata.asks
        number = _pp_rank() * self._vllm_config.parallel_config.tensor_parallel_size + _tp_rank()
        if number not in kv_connector_metadata.storing:
            self._plan = replace(self._plan, stores=())
        if self._worker is not None:
            self._worker.handle_preemptions(self._plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begins the step's loads; where the step computes what it loads, it waits for them: by layer if it can."""
        if self._worker is None or not self._plan.loads:
            return
        self._worker.start_load_kv(self._plan)
        if self._async_load:
            return
        # A whole graph that is replayed asks for no layer, and may have no context.
        context = forward_context if self._layers else None
        if context and context.attn_metadata is not None and context.cudagraph_runtime_mode is not CUDAGraphMode.FULL:
            self._awaited_layers = self._layers
        else:
            self._worker.wait_for_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The layer is about to be computed, in a step that may load it."""
        if self._worker is not None and layer_name in self._awaited_layers:
            self._worker.wait_for_layer_load(self._awaited_layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a block's page is copied as a whole, behind the step that fills it."""

    def wait_for_save(self) -> None:
        """Begins the step's stores, and does not wait for them. vLLM calls it also when the forward pass has failed."""
        self._end_step(not _is_failing())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks are read no longer, and requests whose loads are over."""
        # The last rank may still draft, and is always asked to save when that is done.
        is_last = _pp_rank() == self._vllm_config.parallel_config.pipeline_parallel_size - 1
        self._is_computed = not is_last and not _is_failing()
        if self._worker is None:
            return set(), set()
        if not self._async_load:
            # vLLM believes what the step computed unless it is told now which of its blocks were not filled.
            self._worker.wait_for_load()
            self._awaited_layers = {}
        sent, received = self._worker.get_finished()
        return sent, received if self._async_load else set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The same, and which loads failed where blocks can't be named."""
        sent, received = self.get_finished(finished_req_ids)
        failed = self._worker.get_requests_with_load_errors() if self._worker is not None else set()
        return KVConnectorTransferResults(sent, received, set() if self._fails_by_block else failed)

    def build_connector_worker_meta(self) -> KVStoreWorkerMetadata | None:
        """What the scheduler needs to know to choose between loading and computing."""
        timings = self._worker.take_load_timings() if self._worker is not None else []
        stored = self._worker.take_stored() if self._worker is not None and self._has_listeners else []
        step, self._step = self._step, 0
        told = {(_pp_rank(), _tp_rank()): self._handshake()} if self._is_asked else {}
        return KVStoreWorkerMetadata(step, timings, stored, told) if step or timings or stored or told else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute."""
        errors = self._worker.get_block_ids_with_load_errors() if self._worker is not None else set()
        return errors if self._fails_by_block else set()

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers have told what their pages are: from now on there may be hits. When an engine wakes up they tell
        it again, and this half has to stay: it knows that the weights may be others than those that pages name."""
        if self._requests is None and not self._enclosing:  # there it is another connector's
            told = {rank: each for rank, each in metadata.items() if isinstance(each, KVStoreHandshake)}
            self._begin(told, waits=True)

    def _begin(self, told: Mapping[tuple[int, int], KVStoreHandshake], *, waits: bool) -> None:
        """The workers have told what their pages are; at a start the node is waited for."""
        workers = [(each.host, each.layouts) for _, each in sorted(told.items()) if each.layouts]
        try:
            here = socket.gethostname()
            check_urls([self._options.url, *(each.url for each in told.values() if each.host == here)])
            parts = parts_of(workers, self._num_workers, self._options.url, self._options.rank_nodes)
        except KVStoreError as error:
            logger.warning("vLLM runs without kvstore: %s", error)
            return
        self._storing = frozenset(part.worker for part in parts)
        self._block_events = BlockEvents(len(parts)) if self._has_listeners else None
        groups = [
            group_of(group, manager, self._dcp_size)
            for group, manager in zip(self._kv_cache_config.kv_cache_groups, self._managers, strict=True)
        ]
        guessed = self._vllm_config.num_speculative_tokens
        self._requests = self._connection.scheduler_half(
            parts,
            groups,
            load_admission=LoadAdmission(
                groups,
                self._kv_cache_config.num_blocks - 1,  # the null block
                1 + guessed + self._vllm_config.num_lookahead_tokens if guessed else 0,
            ),
            async_load=self._async_load,
            may_store=self._kv_transfer_config.is_kv_producer,
            may_load=self._kv_transfer_config.is_kv_consumer,
            touched_early=self._is_touched_early(),
            block_events=self._block_events,
            event_block_size=resolve_kv_cache_block_sizes(self._kv_cache_config, self._vllm_config)[1],
            has_siblings=bool(self._enclosing),
            handed_over_by=hands_over(self._beside),
            waits=waits,
        )
        if self._is_reset:
            self._requests.reset()

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Which blocks a hit needs is vLLM's to say."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._managers = kv_cache_manager.coordinator.single_type_managers

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens kvstore can add to what vLLM has; None: not known yet. Plans nothing."""
        requests = self._requests
        if requests is None:
            return (None if self._late.waits() else 0), False
        return requests.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has given the request blocks; those of the external tokens are to be filled."""
        if self._requests is not None:
            self._requests.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Where these tokens come from, as vLLM calls it: by the tier of the pages that reach furthest back."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        if self._requests is None:
            return {}
        names = {"arena": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
        tokens: Counter[Any] = Counter()
        for tier, count in self._requests.tokens_by_tier(request.request_id, num_external_tokens).items():
            tokens[names.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
        return dict(tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVStoreMetadata:
        """Everything for the workers in this step."""
        plan, step = (StepPlan(), 0) if self._requests is None else self._requests.plan_step(scheduler_output)
        return KVStoreMetadata(plan.to_bytes() if plan else _NOTHING, step, self._storing, self._late.asks)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished_all_groups`, for one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: its blocks are held until its stores are. Those of a load under way vLLM keeps by
        itself, until the workers say that it is over."""
        return (False, None) if self._requests is None else self._requests.request_finished(request, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers have reported."""
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, KVStoreWorkerMetadata) and (handshake := self._late.take(told.told)) is not None:
            self._begin(handshake, waits=False)  # the workers have waited for the node
        if self._requests is None:
            return
        if isinstance(told, KVStoreWorkerMetadata):
            self._requests.note(told.step, told.timings, told.stored)
        self._requests.update_connector_output(
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids,
            connector_output.failed_recving,
        )

    def has_pending_block_frees(self) -> bool:
        """Whether stores hold blocks that come free without a preemption."""
        return self._requests is not None and self._requests.has_pending_block_frees()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that kvstore has, under vLLM's names for them, and blocks that it has lost."""
        if self._block_events is None:
            return
        stored, removed = self._block_events.take()
        for block in stored:
            yield BlockStored(
                block_hashes=[maybe_convert_block_hash(block.name)],
                parent_block_hash=None if block.parent is None else maybe_convert_block_hash(block.parent),
                token_ids=list(block.token_ids),
                block_size=len(block.token_ids),
                lora_id=block.lora_id,
                lora_name=block.lora_name,
                medium=MEDIUM_CPU,
                group_idx=block.group,
                ownership="kvstore",
            )
        for block in removed:
            yield BlockRemoved(
                block_hashes=[maybe_convert_block_hash(block.name)],
                medium=MEDIUM_CPU,
                group_idx=block.group,
                ownership="kvstore",
            )

    def reset_cache(self) -> bool:
        """Nothing that was stored is found by this engine any more, whose weights may be others from now on."""
        self._is_reset = True
        if self._requests is not None:
            self._requests.reset()
        return True

    def _handshake(self) -> KVStoreHandshake:
        """What this worker's pages are; without layouts it has none."""
        told = [[layout.to_json() for layout in of_part] for of_part in self._layouts]
        return KVStoreHandshake(told, socket.gethostname(), self._options.url)

    def _end_step(self, is_computed: bool) -> None:
        """Begins the stores of what was computed. Requests that have ended give their blocks back in any case."""
        if self._worker is not None:
            self._worker.start_save_kv(self._plan if is_computed else replace(self._plan, stores=()))
        self._plan = StepPlan()

    def _is_touched_early(self) -> bool:
        _, hash_block_size = resolve_kv_cache_block_sizes(self._kv_cache_config, self._vllm_config)
        runner_is_v2 = getattr(self._vllm_config, "use_v2_model_runner", True)
        return touches_early(self._kv_cache_config, hash_block_size, runner_is_v2, self._dcp_size)

    def _describe(
        self, kv_caches: Mapping[str, torch.Tensor]
    ) -> tuple[list[list[Layout]], list[list[list[torch.Tensor]]]]:
        """This worker's layouts, by part and group, and its blocks as rows of bytes, by group, part and layer.

        Raises:
            ConfigError: ``kv_parts`` does not fit.
            ResourceError: these are no pages that kvstore keeps, or the weights can't be read.
        """
        config, groups = self._kv_cache_config, self._kv_cache_config.kv_cache_groups
        check_model(self._vllm_config.model_config)
        check_groups(config)
        check_parallel(self._vllm_config.parallel_config, config, bool(self._options.kv_parts))
        blocks = {n: group_kernel_blocks(kv_caches[n], config.num_blocks) for g in groups for n in g.layer_names}
        place = _place(self._vllm_config, config.kv_tp_replicas)
        parts = self._options.kv_parts
        cut = heads_in_common(groups) if isinstance(parts, str) else parts_a_rank(parts, place.tp_size)
        views = [rows_by_part(group, blocks, cut) for group in groups]
        described = [self._describe_group(group, blocks, of[0], cut) for group, of in zip(groups, views, strict=True)]
        model = model_of(self._vllm_config)
        return layouts_by_part(model, described, place, self._options.tenant, max(1, cut)), views

    def _describe_group(
        self, group: Any, blocks: Mapping[str, torch.Tensor], views: Sequence[torch.Tensor], cut: int
    ) -> CacheGroup:
        config, names = self._kv_cache_config, list(group.layer_names)
        context = self._vllm_config.compilation_config.static_forward_context
        backends = [backend.get_name() for backend in get_current_attn_backends(self._vllm_config, names)]
        details = [f"vllm-{vllm_version}", *backends, layout_in_page(str(getattr(config, "kv_cache_layout", "")))]
        if self._dcp_size > 1:  # which of a block's tokens a rank has
            turn = self._vllm_config.parallel_config.cp_kv_cache_interleave_size
            details.append(f"{turn} tokens in turn to each of {self._dcp_size} ranks")
        return cache_group(
            group,
            blocks,
            sum(view[0].numel() for view in views),
            details,
            lambda name: getattr(context.get(name), "isa", ""),
            cut,
            self._dcp_size,
        )

    def _layers_that_wait(self, group: Any) -> dict[str, int]:
        """The only group's layers, if vLLM calls :meth:`wait_for_layer_load` before it reads any of them: those of
        latent attention may be read without, and so may what an indexer keeps beside them."""
        context = self._vllm_config.compilation_config.static_forward_context
        names = [name for name, _ in layers_of(group)]
        all_wait = all(isinstance(context.get(name), Attention) for name in names)
        return {name: at for at, name in enumerate(names)} if all_wait else {}

    def _set_failure_policy(self) -> None:
        """vLLM fails a request whose load failed, unless told otherwise; it reads the policy after this connector was
        made, inside MultiConnector that one's own."""
        transfers = [self._kv_transfer_config, *self._enclosing]
        where = "MultiConnector's" if self._enclosing else "vLLM's"
        if self._options.load_failure_policy == KEEP:
            told = transfers[-1].kv_load_failure_policy
            if fails_requests(kept=True, policy=told, is_inside=bool(self._enclosing)):
                logger.warning(
                    "kvstore leaves %s kv_load_failure_policy as it is: %s; a page that is lost fails its request. What"
                    " stands beside kvstore inside it does nothing: write it beside MultiConnector, or leave"
                    ' "load_failure_policy": "keep" out',
                    where,
                    told,
                )
            else:
                logger.info("kvstore leaves %s kv_load_failure_policy as it is: %s", where, told)
            return
        if transfers[-1].kv_load_failure_policy != RECOMPUTE:
            logger.info(
                "kvstore sets %s kv_load_failure_policy to 'recompute'%s: what can't be loaded is computed"
                ' ("load_failure_policy": "keep" leaves it as it is)',
                where,
                ", for the loads of all its connectors" if self._enclosing else "",
            )
        for transfer in transfers:
            transfer.kv_load_failure_policy = RECOMPUTE


_NOTHING = StepPlan().to_bytes()


def _is_failing() -> bool:
    """Whether vLLM calls this while it handles a failure of the step."""
    return sys.exc_info()[0] is not None


def _tp_rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def _client_name(vllm_config: VllmConfig, role: KVConnectorRole) -> str:
    """What the node calls this half of the engine."""
    parallel = vllm_config.parallel_config
    half = "scheduler" if role is KVConnectorRole.SCHEDULER else f"worker rank {parallel.rank}"
    # vLLM takes the engines of a dense model for engines by themselves, of size 1 and rank 0: their index says more.
    number = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    replica = f" of replica {number}" if parallel.data_parallel_size > 1 or number else ""
    return f"vLLM {vllm_version} {half}{replica}"[:MOST_NAME]


def _steps_overlap(vllm_config: VllmConfig) -> bool:
    """Whether vLLM plans a request's next step before it knows how the last one went. Of a step that was planned on top
    of a load that failed vLLM 0.31 to 0.33 believe the tokens."""
    return bool(vllm_config.scheduler_config.async_scheduling) or vllm_config.parallel_config.pipeline_parallel_size > 1


def _pp_rank() -> int:
    from vllm.distributed.parallel_state import get_pp_group

    return int(get_pp_group().rank_in_group)


def _place(config: VllmConfig, replicas: int) -> Place:
    """Which part of the model this worker has. Ranks that hold the same have the same place."""
    parallel = config.parallel_config
    return Place(
        tp_size=parallel.tensor_parallel_size // replicas,
        tp_rank=_tp_rank() // replicas,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=_pp_rank(),
    )
