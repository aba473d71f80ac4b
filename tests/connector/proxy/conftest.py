"""Where the proxy's tests keep responses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.close()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "responses.key"
    path.write_text("ab" * 32)
    path.chmod(0o600)
    return path
