from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_servers import RedisServer

from kvstore.responses.open import open_store
from kvstore.responses.store import Limits, Store


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("responses-redis"))
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty store."""
    if request.param == "sqlite":
        return str(tmp_path / "of" / "its" / "own" / "responses.sqlite")
    server = request.getfixturevalue("redis_server")
    server.client.flushall()
    return str(server.url)


@pytest.fixture
def opened(where: str) -> Iterator[Callable[..., Store]]:
    """Open the store, as often as one likes."""
    stores: list[Store] = []

    def start(**limits: Any) -> Store:
        stores.append(open_store(where, Limits(**limits)))
        return stores[-1]

    yield start
    for each in stores:
        each.close()
