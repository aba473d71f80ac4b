from collections.abc import Callable

import pytest
from tier_contract import TierContract

from kvstore.tiers.tier import Tier

LIMIT = 16 << 20
KEY = bytes(range(32))


class TestContract(TierContract):
    @pytest.fixture(params=["plain", "encrypted"])
    def open_tier(self, request: pytest.FixtureRequest, open_objects: Callable[..., Tier]) -> Callable[[], Tier]:
        keys = [KEY] if request.param == "encrypted" else []
        return lambda: open_objects(LIMIT, keys=keys)
