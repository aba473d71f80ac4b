"""A scheduler half, and the ways to ask it. Blocks hold 4 tokens."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.connector.scheduler import SchedulerConnector

Answer = tuple[int | None, bool]

LATER: Answer = (None, False)
TOKENS = 47  # eleven full blocks and some


@pytest.fixture
def connector(client: Any, namespace: Any, clock: Any) -> Iterator[SchedulerConnector]:
    connector = SchedulerConnector(client, [namespace], clock=clock)
    yield connector
    client.gate.open()
    connector.shutdown()


@pytest.fixture
def ask(connector: SchedulerConnector, hashes: list[bytes]) -> Callable[..., Answer]:
    """Asks for a request's tokens beyond those computed, as the engine's scheduler does."""

    def run(
        request_id: str = "a",
        *,
        num_tokens: int = TOKENS,
        num_computed_tokens: int = 0,
        block_hashes: Sequence[bytes] | None = None,
    ) -> Answer:
        return connector.get_num_new_matched_tokens(
            request_id, hashes if block_hashes is None else block_hashes, num_tokens, num_computed_tokens
        )

    return run


@pytest.fixture
def settled(connector: SchedulerConnector) -> Callable[[], None]:
    """Waits until the lookup thread has nothing to do."""

    def run() -> None:
        state = connector._lookups
        with state._changed:
            assert state._changed.wait_for(lambda: not state._queue and state._call_started is None, 60)

    return run


@pytest.fixture
def answer(ask: Callable[..., Answer], settled: Callable[[], None]) -> Callable[..., Answer]:
    """Asks until there is an answer."""

    def run(request_id: str = "a", **arguments: Any) -> Answer:
        first = ask(request_id, **arguments)
        settled()
        return first if first != LATER else ask(request_id, **arguments)

    return run
