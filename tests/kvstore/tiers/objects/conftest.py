from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from s3_server import URL, S3Server, running_s3

pytest.importorskip("obstore", reason="the extra `objects` is not installed")

from kvstore.tiers.objects import ObjectTier


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server of the test's own, empty at first."""
    with running_s3(monkeypatch) as running:
        yield running


@pytest.fixture
def open_objects(server: S3Server) -> Iterator[Callable[..., ObjectTier]]:
    """Opens tiers over the server's bucket; those that are still open are closed in the end."""
    with ExitStack() as stack:

        def open_tier(limit_bytes: int = 64 << 20, **settings: Any) -> ObjectTier:
            tier = ObjectTier(URL, limit_bytes, **{"interval": 0.1, "deadline": 20.0} | settings)
            stack.callback(tier.close)
            return tier

        yield open_tier
