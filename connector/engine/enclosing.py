"""A connector inside vLLM's ``MultiConnector``: whose configuration counts, and what workers tell without a handshake.

A ``MultiConnector`` gives each of its connectors a copy of the configuration, and the scheduler reads its own; and of
all the handshakes of a worker it hands on the first one alone, which the others have to let pass.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from kvstore.errors import ConfigError

PATIENCE = 5.0
"""Seconds for which the first request waits for the workers to tell what their pages are."""

_MODULE, _CLASS = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiConnector"

_HAND_OVER = ("Nixl", "MoRIIO")
"""Beginnings of the names of vLLM's connectors that answer a request which another engine is to go on with. What they
answer has keys that our tickets have, and where two connectors do, ``MultiConnector`` ends the engine."""

Told = TypeVar("Told")

_logger = logging.getLogger("kvstore.connector")


def enclosing_transfers() -> list[Any]:
    """The ``KVTransferConfig`` of each ``MultiConnector`` that is being made around the caller, the inner one first.

    No interface of vLLM's names it, so it is looked for on the stack.
    """
    multi: Any = getattr(sys.modules.get(_MODULE), _CLASS, None)
    if multi is None:
        return []
    made_by = vars(multi)["__init__"].__code__
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return [frame.f_locals["self"]._kv_transfer_config for frame in frames if frame.f_code is made_by]  # noqa: SLF001 - see above


def hands_over(connectors: Sequence[Any]) -> str | None:
    """The name of a connector that answers a request which another engine is to go on with; None: none of these does.

    Args:
        connectors: as a ``MultiConnector``'s configuration lists them, with those in a ``MultiConnector`` among them.
    """
    names = (str(each.get("kv_connector")) for each in _all_of(connectors))
    return next((name for name in names if name.startswith(_HAND_OVER)), None)


def check_ticket_givers(connectors: Sequence[Any]) -> None:
    """Whether at most one kvstore gives tickets: what two answer clashes as any other two answers do.

    Args:
        connectors: as of :func:`hands_over`.

    Raises:
        ConfigError: more than one does.
    """
    ours = (each for each in _all_of(connectors) if each.get("kv_connector") == "KVStoreConnector")
    givers = sum(bool((each.get("kv_connector_extra_config") or {}).get("ticket_key_file")) for each in ours)
    if givers > 1:
        raise ConfigError(
            f"ticket_key_file: {givers} KVStoreConnectors inside MultiConnector have one, at most 1 may: vLLM ends"
            " where two connectors answer a request that another engine is to go on with"
        )


def _all_of(connectors: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    for each in connectors:
        if isinstance(each, Mapping):
            yield each
            yield from _all_of((each.get("kv_connector_extra_config") or {}).get("connectors") or ())


def fails_requests(kept: bool, policy: str | None, is_inside: bool) -> bool:
    """Whether a page that is lost before it is loaded fails its request, and nobody may have meant that.

    Args:
        kept: whether kvstore is told to leave vLLM's policy as it is.
        policy: the ``kv_load_failure_policy`` that vLLM reads, ``MultiConnector``'s own; None: none is given.
        is_inside: whether kvstore is inside ``MultiConnector``, where what stands beside it does nothing.
    """
    return kept and is_inside and policy != "recompute"


class LateHandshake(Generic[Told]):
    """What each of a number of workers tells beside its steps, on the scheduler's thread.

    Args:
        workers: how many there are.
        clock: seconds, monotonic.
    """

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._clock = clock
        self._told: dict[tuple[int, int], Told] = {}
        self._until: float | None = None
        self._has_warned = False

    @property
    def asks(self) -> bool:
        """Whether workers are to tell: some have not."""
        return len(self._told) < self._workers

    def waits(self) -> bool:
        """Whether a request should ask again: they have not told, and were not waited for too long. The first one that
        is not to wait any more says so in the log."""
        if not self.asks:
            return False
        if self._until is None:
            self._until = self._clock() + PATIENCE
        if self._clock() < self._until:
            return True
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%d of %d workers have not told what their pages are, %g s behind the first request: vLLM runs without"
                " kvstore until they have",
                self._workers - len(self._told),
                self._workers,
                PATIENCE,
            )
        return False

    def take(self, told: Mapping[tuple[int, int], Told]) -> dict[tuple[int, int], Told] | None:
        """Some workers have told, each by its pipeline and tensor rank.

        Returns:
            What all have told, when the last one has; then never again.
        """
        if not self.asks:
            return None
        self._told.update(told)
        return None if self.asks else dict(self._told)
