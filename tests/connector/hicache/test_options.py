"""What users write into SGLang's configuration, and what they are told when it is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.connector.hicache.options import SGLANGS, Options
from kvstore.connector.hicache.supported import check_pool, check_side_pool
from kvstore.connector.hicache.versions import check_version
from kvstore.errors import ConfigError, ResourceError

URL = "unix:///run/kvstore.sock"
GIVEN = {"backend_name": "kvstore", "module_path": "kvstore.connector.sglang", "interface_v1": 1, "url": URL}


def test_nothing_of_ours_is_needed() -> None:
    assert Options.parse({key: value for key, value in GIVEN.items() if key != "url"}) == Options()
    assert Options.parse(GIVEN) == Options(url=URL, tenant="")
    assert Options.parse(GIVEN | dict.fromkeys(SGLANGS, 1) | {"tenant": "a"}) == Options(url=URL, tenant="a")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tennant": "a"}, "did you mean 'tenant'"),
        ({"zzz": 1}, "known: url, tenant, backend_name"),
        ({"url": 5}, "url must be a string, got 5"),
        ({"interface_v1": 0}, "'interface_v1' must be 1, got 0"),
        ({"url": "embedded:///var/lib/kvstore"}, "start a node with 'kvstore serve'"),
        ({"url": "run/kvstore.sock"}, "url must be as unix:///run/kvstore.sock, .* got 'run/kvstore.sock'"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"hicache-storage-backend-extra-config.*{says}"):
        Options.parse(GIVEN | given)


def test_other_releases_are_refused() -> None:
    check_version("0.5.23")
    check_version("0.5.23+cpu")
    with pytest.raises(ConfigError, match=r"supports SGLang 0\.5\.23, this is SGLang 0\.5\.24"):
        check_version("0.5.24")


class MHATokenToKVPoolHost:
    """As SGLang's, as far as it is looked at."""

    def __init__(self, **values: Any) -> None:
        self.layout = "page_first_direct"
        self.__dict__.update(values)


class MambaPoolHost(MHATokenToKVPoolHost):
    """Of a recurrent model."""


def test_pools_that_nobody_has_tried_are_refused_in_words() -> None:
    check_pool(MHATokenToKVPoolHost())
    for pool, says in (
        (MambaPoolHost(), "MambaPoolHost"),
        (MHATokenToKVPoolHost(layout="page_head"), "page_head"),
        (MHATokenToKVPoolHost(shared_allocation_domain=object()), "share"),
        (MHATokenToKVPoolHost(stores_page_envelope=True), "share"),
        (MHATokenToKVPoolHost(dcp_size=2), "dcp_size 2"),
    ):
        with pytest.raises(ResourceError, match=says):
            check_pool(pool)
    check_side_pool("kv")
    with pytest.raises(ResourceError, match="a pool 'swa' beside"):
        check_side_pool("swa")
