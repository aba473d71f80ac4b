from collections.abc import Callable

import pytest
from tier_contract import TierContract

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.tier import Tier

LIMIT = 16 << 20


class TestContract(TierContract):
    @pytest.fixture(params=["tcp", "unix", "cluster"])
    def open_tier(self, request: pytest.FixtureRequest, open_redis: Callable[..., RedisTier]) -> Callable[[], Tier]:
        if request.param == "cluster":
            url = request.getfixturevalue("cluster").url
        else:
            server = request.getfixturevalue("server")
            url = server.url if request.param == "tcp" else f"unix://{server.socket}"
        return lambda: open_redis(url, LIMIT)
