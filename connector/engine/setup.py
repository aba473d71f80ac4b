"""Setup: the two halves of an engine's connector, made from a user's options and the layouts of its pages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.client.environment import connect_by_environment
from kvstore.connector.disagg.handover import Handover, default_node_id
from kvstore.connector.disagg.peers import Peers, clients_of
from kvstore.connector.engine.block_events import BlockEvents
from kvstore.connector.engine.groups import Group, fails_by_block, hash_block_size
from kvstore.connector.engine.load_admission import LoadAdmission
from kvstore.connector.engine.options import RECOMPUTE, Options
from kvstore.connector.engine.page_parts import Part
from kvstore.connector.engine.request_hashes import RequestHashes
from kvstore.connector.engine.request_tickets import RequestTickets
from kvstore.connector.engine.requests import EngineRequests
from kvstore.connector.prefix_pins import PrefixPins
from kvstore.connector.rank_nodes import NodeClient, RankNodes
from kvstore.connector.scheduler import SchedulerConnector
from kvstore.connector.worker import WorkerConnector
from kvstore.errors import KVStoreError
from kvstore.gpu.mixed import MixedKV
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.pinned import PinnedMapping
from kvstore.gpu.pinned_arena import PinnedArena
from kvstore.gpu.registered import Bytes
from kvstore.layout import Layout

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from kvstore import Namespace
    from kvstore.tracing import ClientSpans

_logger = logging.getLogger("kvstore.connector")

START_WAIT = 5.0
"""Seconds for which an engine's start waits for its node, however patient its calls are."""

_TRACES_SECONDS = 1.0
"""How long the end waits for the last spans to be sent."""


class NodeClients:
    """The engine's node, and the nodes that prefill instances may hand over from. ``environment`` has
    ``KVSTORE_CONNECT_*``; ``name`` is what nodes call this part of the engine, ``label`` what they call its model.

    Raises:
        ConfigError: a URL or a file that can't be used, or traces without OpenTelemetry.
    """

    def __init__(self, options: Options, environment: Mapping[str, str], name: str = "", label: str = "") -> None:
        self._options = options
        self._label = label
        self._traces = _open_traces(options.traces)
        timeout = options.call_timeout
        self._client = connect_by_environment(options.url, environment, self._traces, timeout, name)
        self._peers = Peers(options.peers, environment, self._traces, timeout, name, label)
        self._rank_clients = clients_of("rank_nodes", options.rank_nodes, environment, self._traces, timeout, name)
        self._rank_nodes: RankNodes | None = None
        self._ticket_key = options.ticket_key

    def worker_half(
        self,
        layouts: Sequence[Sequence[Layout]],
        pages: Sequence[Sequence[PagedKV | MixedKV]],
        pin: Callable[[Bytes], PinnedMapping] | None,
        *,
        by_layer: bool = False,
        touched_early: bool = False,
    ) -> WorkerConnector:
        """For one worker.

        Args:
            layouts: of its pages, by part and group.
            pages: the same.
            pin: registers a part of the arena with the worker's device; None: there is none.
            by_layer: the engine waits for single layers of what it loads.
            touched_early: the engine may write to blocks before it tells that it gives them out.
        """
        by_group = [layout for of_group in zip(*layouts, strict=True) for layout in of_group]
        (namespaces,) = self._namespaces([by_group])
        return WorkerConnector(
            namespaces,
            [kv for of_group in zip(*pages, strict=True) for kv in of_group],
            parts=len(layouts),
            load_deadline=self._options.load_deadline_ms / 1000,
            store_deadline=self._options.store_deadline_ms / 1000,
            arena=PinnedArena(lambda: self._client.arena_units, pin) if pin is not None else None,
            peers=self._peers.namespaces(by_group),
            spans=_spans(self._traces),
            by_layer=by_layer,
            touched_early=touched_early,
        )

    def scheduler_half(
        self,
        parts: Sequence[Part],
        groups: Sequence[Group],
        *,
        load_admission: LoadAdmission,
        async_load: bool,
        may_store: bool,
        may_load: bool,
        touched_early: bool,
        block_events: BlockEvents | None,
        event_block_size: int,
        has_siblings: bool = False,
        handed_over_by: str | None = None,
        waits: bool = True,
    ) -> EngineRequests:
        """For the scheduler; the arguments are those of :class:`EngineRequests`.

        Args:
            parts: that a page has (:func:`parts_of`).
            touched_early: as for :meth:`worker_half`.
            handed_over_by: the connector beside this one that hands prompts over to other engines; None: this one may.
            waits: for the node to answer, at an engine's start.
        """
        layouts = [part.layouts for part in parts]
        node: NodeClient = self._client
        if {part.host for part in parts} == {""}:
            own, *others = self._namespaces(layouts, waits)
        else:
            node = self._rank_nodes = RankNodes(self._client, self._rank_clients, self._label)
            own, *others = (self._rank_nodes.namespaces(part.host, part.layouts) for part in parts)
        states = [number for number, group in enumerate(groups) if group.is_state]
        scheduler = SchedulerConnector(
            node,
            own,
            other_ranks=others,
            lookup_budget=self._options.lookup_budget_ms / 1000,
            store_threshold=self._options.store_threshold,
            touched_early=touched_early,
            uncounted=states if len(states) < len(groups) else (),
            peers=self._peers.ranks(layouts),
        )
        hashes = RequestHashes(hash_block_size([group.block_size for group in groups]), self._options.prefixes)
        return EngineRequests(
            scheduler,
            groups,
            hashes,
            load_admission=load_admission,
            pins=PrefixPins([own, *others]),
            most_keep_minutes=self._options.most_keep_minutes,
            async_load=async_load,
            may_store=may_store,
            may_load=may_load,
            tickets=RequestTickets(self._handover(scheduler, layouts, groups, async_load, handed_over_by), hashes),
            block_events=block_events,
            event_block_size=event_block_size,
            has_siblings=has_siblings,
        )

    def close(self) -> None:
        """Ends all connections."""
        self._peers.close()
        self._client.close()
        for client in self._rank_clients.values():
            client.close()
        if self._rank_nodes is not None:
            self._rank_nodes.close()
        if self._traces is not None:  # sends what it has, to a collector that may hang
            sending = threading.Thread(target=self._traces.shutdown, name="kvstore-traces", daemon=True)
            sending.start()
            sending.join(_TRACES_SECONDS)

    def _handover(
        self,
        scheduler: SchedulerConnector,
        layouts: Sequence[Sequence[Layout]],
        groups: Sequence[Group],
        async_load: bool,
        handed_over_by: str | None,
    ) -> Handover | None:
        """Prefill and decode on different engines; None: there is no key for it."""
        if self._ticket_key is None:
            return None
        node_id: str | None = self._options.node_id or default_node_id(self._options.url)
        if self._rank_nodes is not None:
            _logger.warning("this instance takes tickets and gives none: a ticket names one node, its ranks have more")
            node_id = None
        if handed_over_by is not None:
            _logger.warning("this instance takes tickets and gives none: %s beside it does that", handed_over_by)
            node_id = None
        self._peers.compare(layouts[0])
        return Handover(
            scheduler,
            self._ticket_key,
            node_id,
            [layout for of_part in layouts for layout in of_part],
            self._peers.names,
            wait=self._options.load_deadline_ms / 1000,
            # What does not come is computed: where a step waits for its loads it would wait for it, and of several
            # groups all would be computed.
            early=async_load and fails_by_block(groups) and self._options.load_failure_policy == RECOMPUTE,
            has_partials=not any(group.is_state for group in groups),
            offered=[number for number, group in enumerate(groups) if group.is_offered],
        )

    def _namespaces(self, layouts: Sequence[Sequence[Layout]], waits: bool = True) -> list[list[Namespace]]:
        """By part: opened now if the node is there, or else as soon as it is. All of them wait once."""
        namespaces = [
            [self._client.namespace(layout, label=self._label, lazy=True) for layout in of_part] for of_part in layouts
        ]
        if not waits:
            return namespaces
        said = f"no answer in {START_WAIT:g} s"

        def ask() -> None:
            nonlocal said
            try:
                self._client.lookup([(namespace, ()) for of_part in namespaces for namespace in of_part])
                said = ""
            except KVStoreError as error:
                said = str(error)
            except Exception as error:  # noqa: BLE001 - told by this thread, or by nobody that looks for it
                said = f"{type(error).__name__}: {error}"

        asking = threading.Thread(target=ask, name="kvstore-open", daemon=True)
        asking.start()
        asking.join(START_WAIT)
        if said:
            _logger.warning("kvstore at %s is not there yet, vLLM starts without it: %s", self._options.url, said)
        return namespaces


def _open_traces(endpoint: str) -> TracerProvider | None:
    if not endpoint:
        return None
    from kvstore.tracing import open_provider  # OpenTelemetry, for who asks for it alone

    return open_provider(endpoint, "kvstore-connector")


def _spans(traces: TracerProvider | None) -> ClientSpans | None:
    if traces is None:
        return None
    from kvstore.tracing import ClientSpans

    return ClientSpans(traces)


def log_beside(engine: str) -> None:
    """What the halves and the client have to say appears where the lines of an engine's logger do."""
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger(engine)
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = False
    if theirs.getEffectiveLevel() <= logging.DEBUG:
        ours.setLevel(logging.DEBUG)
