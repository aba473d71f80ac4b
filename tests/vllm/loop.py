"""vLLM's real scheduler and both halves of its connector, around a model that is made up.

The model's KV of a token is a number that depends on all tokens up to it; so does the token that follows. A step looks
at the KV of everything that it attends to before it adds its own: a block that was loaded, cached or given away wrongly
is found in that step, and the right answer to a prompt is known without computing anything (:func:`right_answer`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from made_models import LAYERS
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.network_utils import get_open_port
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

try:  # releases that plan in a module of its own group the layers apart, too
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None

BLOCK_SIZE = 32
WINDOW = 96
"""Tokens that layers with a window see."""
_KV_HEADS = 1
_HEAD_SIZE = 32
_VOCAB = 1000
_NUMBERS = 1 << 20
PATIENCE = 300.0
"""Seconds that something may take on a busy machine before it counts as what does not happen."""
_PREPARING = 0.02
"""Seconds that V2 prepares a step's inputs for, at most: stores end meanwhile."""


def numbers_of(tokens: Sequence[int]) -> list[int]:
    """The KV of each token: a number below 2**20 that depends on it and all before it."""
    state = b""
    numbers = []
    for token in tokens:
        state = hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=8).digest()
        numbers.append(int.from_bytes(state, "little") % _NUMBERS)
    return numbers


def right_answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(2 + numbers_of(tokens)[-1] % _VOCAB)
    return tokens[len(prompt) :]


class Loop:
    """One engine, step by step.

    Args:
        model: a folder of :mod:`made_models`: only its configuration is read.
        transfer: ``kv_transfer_config``; None is vLLM without a connector.
        num_blocks: of the KV cache, the null block included.
        kind: of the layers: "full"; "mla", full with one latent head; "unlike", full with one head or
            two, in turn; "hybrid", every other one with a window; "mixed", these in another type; "window", all of
            them; "states", every other one recurrent; "recurrent", all of them.
        runner: whose order of calls a step has: "V1" tells the connector of a step and then zeroes and copies blocks,
            "V2" does that first.
        overlap: a step is planned before the one in front of it has ended, as vLLM does it by default.
        arguments: others of ``EngineArgs``, such as ``max_num_batched_tokens``.
    """

    def __init__(
        self,
        model: Path,
        transfer: Mapping[str, Any] | None,
        *,
        num_blocks: int = 64,
        kind: str = "full",
        overlap: bool = False,
        runner: str = "V1",
        **arguments: Any,
    ) -> None:
        self.overlap = overlap
        self.runner = runner
        self.ends_saves = True
        """False: steps end without ``wait_for_save``, as on pipeline ranks before the last one that drafts tokens."""
        self._in_flight: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
        self._tables: dict[str, tuple[list[int], ...]] = {}  # of the step that is planned
        arguments["async_scheduling"] = overlap
        if kind in ("states", "recurrent"):
            arguments.setdefault("prefix_cache_retention_interval", None)  # each block's state, not the prompt's alone
        self.config = _engine_config(model, transfer, num_blocks, arguments)
        if kind in ("states", "recurrent"):
            self.config.cache_config.mamba_cache_mode = "align"
        self.kv_cache_config, scheduler_kv_cache_config = _kv_cache_configs(self.config, _specs(kind))
        block_size, hash_block_size = resolve_kv_cache_block_sizes(scheduler_kv_cache_config, self.config)
        with self._current():
            _one_worker()
            self.config.scheduler_config.async_scheduling = overlap  # vLLM turns it off on processors without a GPU
            scheduler = self.config.scheduler_config.get_scheduler_cls()
            self.scheduler = scheduler(
                vllm_config=self.config,
                kv_cache_config=scheduler_kv_cache_config,
                structured_output_manager=StructuredOutputManager(self.config),
                include_finished_set=False,
                log_stats=True,
                block_size=block_size,
                hash_block_size=hash_block_size,
            )
            self.caches = kv_caches(self.kv_cache_config)
            self.worker: Any = self._start_worker() if transfer is not None else None
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hash_block_size, hash_function)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        """What each request was answered so far."""
        self.finished: dict[str, str] = {}
        """Why each request ended."""
        self.params: dict[str, Any] = {}
        """The ``kv_transfer_params`` that came with its end."""
        self.computed: dict[str, int] = {}
        """Tokens that the model computed for each request, again after a preemption."""
        self._doubtful: dict[str, list[str]] = {}
        self._discarded: set[str] = set()
        self.stats: list[SchedulerStats] = []
        """What vLLM's metrics are made of, step by step."""
        self.load_failures = 0
        """Blocks, or requests, that the worker half reported as not loaded."""

    def _start_worker(self) -> Any:
        """The worker half, which has described its pages."""
        worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.kv_cache_config)
        worker.register_kv_caches(self.caches)
        if (metadata := worker.get_handshake_metadata()) is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        return worker

    @property
    def connector(self) -> Any:
        """The scheduler half."""
        return self.scheduler.connector

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        params: Mapping[str, Any] | None = None,
        prompt_logprobs: int | None = None,
        priority: int = 0,
        salt: str | None = None,
    ) -> Request:
        """A new request. With ``prompt_logprobs`` vLLM throws away what the connector answers for it; the lower its
        ``priority``, the sooner it comes, where ``scheduling_policy`` is "priority"."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            prompt_logprobs=prompt_logprobs,
            extra_args={"kv_transfer_params": dict(params)} if params is not None else None,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            priority=priority,
            cache_salt=salt,
        )
        self.requests[request_id] = request
        self.tokens[request_id] = []
        self.computed[request_id] = 0
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finished[request_id] = "abort"

    def status(self, request_id: str) -> str:
        """``"WAITING"``, ``"WAITING_FOR_REMOTE_KVS"``, ``"RUNNING"``, ``"PREEMPTED"``, ``"FINISHED_..."``."""
        return self.requests[request_id].status.name

    def blocks_of(self, request_id: str) -> tuple[list[int], ...]:
        blocks: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return blocks

    def schedule(self) -> SchedulerOutput:
        """The first half of a step."""
        with self._current():
            step = self.scheduler.schedule()
        # Whoever ends while this step is in flight has blocks no more.
        self._tables = {name: tuple(map(list, self.blocks_of(name))) for name in step.num_scheduled_tokens}
        return step

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """What a worker does in a step, in vLLM's order."""
        with self._current():
            return self._execute(step)

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """The last part of a step."""
        with self._current():
            results = self.scheduler.update_from_output(step, output)
        for outputs in results.values():
            if outputs.scheduler_stats is not None:
                self.stats.append(outputs.scheduler_stats)
            for each in outputs.outputs:
                self.tokens[each.request_id].extend(each.new_token_ids)
                if each.finish_reason is not None:
                    self.finished[each.request_id] = str(each.finish_reason)
                    self.params[each.request_id] = each.kv_transfer_params

    def step(self) -> SchedulerOutput:
        step = self.schedule()
        if not self.overlap:
            self.update(step, self.execute(step))
            return step
        self.catch_up()
        self._in_flight = step, self.execute(step)
        return step

    def catch_up(self) -> None:
        """The step in flight ends."""
        if self._in_flight is not None:
            step, output = self._in_flight
            self._in_flight = None
            self.update(step, output)

    def reset_prefix_cache(self) -> None:
        """Forget the engine's own cached blocks."""
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()
        self.scheduler.shutdown()

    def left_over(self) -> list[str]:
        """What is still held though no request is there: nothing, or there is a leak."""
        found = self.left_in_scheduler()
        for half in (self.connector, self.worker):
            found += [f"{path} names {name}" for path, name in _mentions(half, set(self.requests))]
        return found

    def left_in_scheduler(self) -> list[str]:
        """The same, but for the connector, whose threads may hang in a call that no block waits for any more."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        found = [
            f"scheduler.{name}: {list(value)}"
            for name in (
                "requests",
                "running",
                "waiting",
                "kv_holding_waiting",
                "deferred_waiting",
                "finished_recving_kv_req_ids",
                "failed_recving_kv_req_ids",
                "deferred_frees",
                "deferred_loads",
                "_inflight_prefills",
            )
            if (value := getattr(scheduler, name, ()))
        ]
        pool = manager.block_pool
        if (in_use := pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) != 0:
            found.append(f"{in_use} blocks are in use")
        found += [f"{block} is referenced" for block in pool.blocks[1:] if block.ref_cnt]
        for group, single in enumerate(manager.coordinator.single_type_managers):
            found += [f"group {group} has blocks of {name}" for name in single.req_to_blocks]
        return found

    @contextmanager
    def _current(self) -> Iterator[None]:
        with _current(self.config), _runner(self.runner):
            yield

    def _touch(self, step: SchedulerOutput) -> None:
        """What vLLM does to blocks before a step's forward pass."""
        if zeroed := step.new_block_ids_to_zero:
            for group in self.kv_cache_config.kv_cache_groups:
                specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
                for layer in group.layer_names:
                    if isinstance(specs.get(layer, group.kv_cache_spec), AttentionSpec):
                        self.caches[layer][zeroed] = 0.0
        for source, target in step.kv_cache_block_copies or ():
            for cache in self.caches.values():
                cache[target] = cache[source]
        started = _started(step)
        for group, spec in enumerate(self.kv_cache_config.kv_cache_groups):
            if not isinstance(spec.kv_cache_spec, MambaSpec):
                continue
            for name, count in step.num_scheduled_tokens.items():
                table, first = self._tables[name][group], started[name]
                if first and table[(first - 1) // BLOCK_SIZE]:
                    for layer in spec.layer_names:  # a state moves on to the block that it is written to
                        self._state(layer, table, first + count)[:] = self._state(layer, table, first)

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        scheduled = list(step.num_scheduled_tokens)
        transfer: KVConnectorOutput | None = None
        sampled: list[list[int]] = []
        if self.runner == "V2":
            self._touch(step)
            for each in getattr(self.worker, "sub_connectors", [self.worker]):
                if (half := getattr(each, "_worker", None)) is not None:
                    half.wait_for_save(_PREPARING)
        if self.worker is not None:
            self.worker.handle_preemptions(step.kv_connector_metadata)
        if self.runner == "V1":
            self._touch(step)
        if self.worker is None:
            sampled = self._forward(step)
        else:
            worker = self.worker
            worker.bind_connector_metadata(step.kv_connector_metadata)
            before = step.has_sync_kv_loads
            if before:
                worker.start_load_kv(SimpleNamespace())
            try:
                for layer, cache in self.caches.items() if scheduled else ():
                    worker.wait_for_layer_load(layer)
                    if layer == next(reversed(self.caches)):
                        sampled = self._forward(step)
                    worker.save_kv_layer(layer, cache, None)
            finally:
                if not before:
                    worker.start_load_kv(SimpleNamespace())
                if self.ends_saves:
                    worker.wait_for_save()
                results = worker.get_transfer_results(step.finished_req_ids)
            transfer = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_stats=worker.get_kv_connector_stats(),
                kv_cache_events=worker.get_kv_connector_kv_cache_events(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            self.load_failures += len(transfer.invalid_block_ids) + len(transfer.failed_recving)
            if self.ends_saves:
                worker.clear_connector_metadata()
        self._check_doubtful(transfer)
        return ModelRunnerOutput(
            req_ids=scheduled,
            req_id_to_index={name: index for index, name in enumerate(scheduled)},
            sampled_token_ids=sampled,
            kv_connector_output=transfer,
        )

    def _forward(self, step: SchedulerOutput) -> list[list[int]]:
        """Compute the step's tokens. Returns those that follow, for requests whose prompt is done."""
        started = _started(step)
        sampled = []
        for name, count in step.num_scheduled_tokens.items():
            tokens = list(self.requests[name].all_token_ids)
            first, end = started[name], started[name] + count
            tokens += [0] * (end - len(tokens))  # planned before its load was known to have failed
            self.computed[name] += count
            numbers = numbers_of(tokens[:end])
            if wrong := list(self._wrong(name, numbers, first)):
                self._doubtful[name] = wrong
                numbers = [-1] * end  # as in a real model: what attends to rubbish is rubbish
            for group, spec in enumerate(self.kv_cache_config.kv_cache_groups):
                table = self._tables[name][group]
                for layer in spec.layer_names:
                    if isinstance(spec.kv_cache_spec, MambaSpec):
                        self._state(layer, table, end)[:] = float(numbers[-1])
                        continue
                    for position in range(first, end):
                        self._slot(layer, table, position)[:] = float(numbers[position])
            sampled.append([2 + numbers[-1] % _VOCAB] if end == len(tokens) else [])
        return sampled

    def _wrong(self, name: str, numbers: Sequence[int], first: int) -> Iterator[str]:
        """Where tokens from ``first`` on attend to KV that is not that of their prefix."""
        for group, spec in enumerate(self.kv_cache_config.kv_cache_groups):
            sees = WINDOW if isinstance(spec.kv_cache_spec, SlidingWindowSpec) else None
            table = self._tables[name][group]
            for layer in spec.layer_names:
                if isinstance(spec.kv_cache_spec, MambaSpec):
                    if first and not bool((self._state(layer, table, first) == float(numbers[first - 1])).all()):
                        yield f"{layer}, the state behind token {first}, blocks {table}"
                    continue
                for position in range(0 if sees is None else max(0, first - sees + 1), first):
                    if not bool((self._slot(layer, table, position) == float(numbers[position])).all()):
                        yield f"{layer}, token {position} of {first}, blocks {table}"

    def _check_doubtful(self, transfer: KVConnectorOutput | None) -> None:
        """Rubbish is no fault where the connector says in the same step that its load has failed."""
        for name, wrong in self._doubtful.items():
            blocks = {block for group in self._tables[name] for block in group}
            told = transfer is not None and (name in transfer.failed_recving or blocks & transfer.invalid_block_ids)
            # A step that was planned before vLLM was told: what it computes for the request is thrown away.
            assert told or name in self._discarded, f"{name} attends to wrong KV: {wrong[0]}, and {len(wrong) - 1} more"
        self._discarded = set(self._doubtful) if self.overlap else set()
        self._doubtful = {}

    def _state(self, layer: str, table: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Behind so many tokens: the state moves on from block to block."""
        block = table[(num_tokens - 1) // BLOCK_SIZE]
        assert block != 0, f"the state behind token {num_tokens} has no block: {list(table)}"
        return self.caches[layer][block]

    def _slot(self, layer: str, table: Sequence[int], position: int) -> torch.Tensor:
        block, offset = divmod(position, BLOCK_SIZE)
        assert table[block] != 0, f"position {position} has no block: {list(table)}"
        return self.caches[layer][table[block], :, offset]


def _started(step: SchedulerOutput) -> dict[str, int]:
    """Where a step goes on, by request."""
    cached = step.scheduled_cached_reqs
    started = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    return started | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def run_until(loop: Loop, condition: Any, *, seconds: float = PATIENCE) -> None:
    """Step until a condition holds.

    Raises:
        AssertionError: it did not come true in time.
    """
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen; {loop.finished}, {loop.left_over()}"
        loop.step()
        time.sleep(0.0005)
    loop.catch_up()


def run_all(loop: Loop, *, seconds: float = PATIENCE) -> None:
    """Step until every request has ended and nothing of it is left in the scheduler."""
    run_until(loop, lambda: not loop.scheduler.has_requests(), seconds=seconds)


def _engine_config(
    model: Path, transfer: Mapping[str, Any] | None, num_blocks: int, arguments: Mapping[str, Any]
) -> VllmConfig:
    defaults: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "block_size": BLOCK_SIZE,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": num_blocks,
        "prefix_caching_hash_algo": "sha256",
    }
    if transfer is not None:
        defaults["kv_transfer_config"] = KVTransferConfig(**transfer)
    return EngineArgs(**(defaults | dict(arguments))).create_engine_config()


def _one_worker() -> None:
    """What workers know of each other, where there is one."""
    if model_parallel_is_initialized():
        return
    rendezvous = f"tcp://127.0.0.1:{get_open_port()}"
    init_distributed_environment(1, 0, distributed_init_method=rendezvous, local_rank=0, backend="gloo")
    ensure_model_parallel_initialized(1, 1)


def _specs(kind: str) -> dict[str, KVCacheSpec]:
    size = {"block_size": BLOCK_SIZE, "num_kv_heads": _KV_HEADS, "head_size": _HEAD_SIZE, "dtype": torch.float32}
    full = FullAttentionSpec(**size)
    latent = MLAAttentionSpec(**(size | {"head_size": 2 * _HEAD_SIZE}))  # keys and values in one
    wider = FullAttentionSpec(**(size | {"num_kv_heads": 2 * _KV_HEADS}))
    window = SlidingWindowSpec(**size, sliding_window=WINDOW)
    smaller = SlidingWindowSpec(**(size | {"head_size": 2 * _HEAD_SIZE, "dtype": torch.float16}), sliding_window=WINDOW)
    state = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((_HEAD_SIZE,), (2, _HEAD_SIZE)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align",
        page_size_padded=full.page_size_bytes,
    )
    of = {
        "full": (full, full),
        "mla": (latent, latent),
        "unlike": (full, wider),
        "mixed": (full, smaller),
        "hybrid": (full, window),
        "window": (window, window),
        "states": (full, state),
        "recurrent": (state, state),
    }
    return {f"model.layers.{layer}.self_attn.attn": of[kind][layer % 2] for layer in range(LAYERS)}


def _kv_cache_configs(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> tuple[KVCacheConfig, KVCacheConfig]:
    """The worker's and the scheduler's, as vLLM's engine core makes them."""
    config.cache_config.kv_cache_layout = "LBHNC"
    with _current(config):
        groups = () if get_global_kv_cache_groups is None else (get_global_kv_cache_groups(config, [specs]),)
        (worker,) = get_kv_cache_configs(config, [specs], [1 << 30], *groups)
        worker.kv_cache_layout = config.cache_config.kv_cache_layout
        scheduler = generate_scheduler_kv_cache_config([worker])
    config.cache_config.num_gpu_blocks = scheduler.num_blocks
    return worker, scheduler


def kv_caches(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """By layer a tensor ``(blocks, heads, tokens, 2 * head size)``, where vLLM's plan for its memory puts it."""
    caches = {}
    memory: dict[int, torch.Tensor] = {}
    states = {
        layer
        for group in config.kv_cache_groups
        if isinstance(group.kv_cache_spec, MambaSpec)
        for layer in group.layer_names
    }
    wider = {
        layer
        for group in config.kv_cache_groups
        for layer, spec in getattr(group.kv_cache_spec, "kv_cache_specs", {}).items()
        if spec.num_kv_heads > _KV_HEADS
    }
    row = 2 * _HEAD_SIZE
    for place in config.kv_cache_tensors:
        storage = memory.setdefault(place.size, torch.zeros(place.size // 4))
        heads = 2 * _KV_HEADS if wider.intersection(place.layers) else _KV_HEADS
        shape = (config.num_blocks, heads, BLOCK_SIZE, row)
        strides = (place.block_stride // 4, BLOCK_SIZE * row, row, 1)
        if states.intersection(place.layers):
            shape, strides = (config.num_blocks, 1, 1, 3 * _HEAD_SIZE), (place.block_stride // 4, row, row, 1)
        for index, layer in enumerate(place.layers):
            caches[layer] = storage.as_strided(shape, strides, (place.offset + index * place.layer_stride) // 4)
    return {layer: caches[layer] for group in config.kv_cache_groups for layer in group.layer_names}


@contextmanager
def _runner(name: str) -> Iterator[None]:
    """Who asks vLLM for its model runner finds this one. A configuration is made outside: it wants Triton for V2."""
    before = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(name == "V2"))
    try:
        yield
    finally:
        del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
        if before is not None:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = before


@contextmanager
def _current(config: VllmConfig) -> Iterator[None]:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        yield


def _mentions(root: Any, names: set[str]) -> Iterable[tuple[str, str]]:
    """Where an object, or anything of the connector that it holds, still names one of the requests."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [(type(root).__name__, root)]
    while stack:
        path, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, str):
            if value in names:
                yield path, value
        elif isinstance(value, Mapping):
            stack += [(f"{path} key", key) for key in list(value)]
            stack += [(f"{path}[{str(key)[:20]}]", item) for key, item in list(value.items())]
        elif isinstance(value, list | tuple | set | frozenset):
            stack += [(f"{path}[]", item) for item in list(value)]
        elif type(value).__module__.startswith("connector") or type(value).__name__ == "deque":
            if type(value).__name__ == "deque":
                stack += [(f"{path}[]", item) for item in list(value)]
            fields = list(getattr(value, "__dict__", {})) + [
                name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
            ]
            stack += [(f"{path}.{name}", getattr(value, name, None)) for name in fields]
