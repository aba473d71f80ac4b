"""What workers tell the scheduler half where no handshake does: each once, and a request waits for it for a while."""

from __future__ import annotations

import pytest

from kvstore.connector.engine.enclosing import (
    PATIENCE,
    LateHandshake,
    check_ticket_givers,
    enclosing_transfers,
    fails_requests,
    hands_over,
)
from kvstore.errors import ConfigError


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_all_have_to_tell() -> None:
    late = LateHandshake[str](2)
    assert late.asks
    assert late.take({(0, 0): "a"}) is None
    assert late.take({}) is None
    assert late.asks
    assert late.take({(0, 0): "a", (0, 1): "b"}) == {(0, 0): "a", (0, 1): "b"}
    assert not late.asks
    assert late.take({(0, 0): "a"}) is None


def test_a_request_waits_from_the_first_one_on_and_not_for_good() -> None:
    clock = Clock()
    late = LateHandshake[str](1, clock)
    clock.now += 100
    assert late.waits()
    clock.now += PATIENCE - 0.1
    assert late.waits()
    clock.now += 0.1
    assert not late.waits()
    assert late.asks  # who tells late is still listened to
    assert late.take({(0, 0): "a"}) == {(0, 0): "a"}


def test_when_nobody_waits_any_more_the_log_says_once_who_has_not_told(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    late = LateHandshake[str](3, clock)
    late.take({(0, 1): "b"})
    assert late.waits()
    assert caplog.messages == []
    clock.now += PATIENCE
    assert not late.waits()
    clock.now += PATIENCE
    assert not late.waits()
    expected = (
        "2 of 3 workers have not told what their pages are, 5 s behind the first request: vLLM runs without kvstore"
        " until they have"
    )
    assert caplog.messages == [expected]


def test_where_all_have_told_the_log_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    late = LateHandshake[str](1, clock)
    assert late.waits()
    late.take({(0, 0): "a"})
    clock.now += PATIENCE
    assert not late.waits()
    assert LateHandshake[str](0, clock).waits() is False
    assert caplog.messages == []


def test_where_a_handshake_tells_nobody_is_asked() -> None:
    late = LateHandshake[str](0)
    assert not late.asks
    assert not late.waits()


def test_without_vllms_class_nothing_encloses() -> None:
    assert enclosing_transfers() == []


def test_which_connector_beside_hands_prompts_over() -> None:
    connectors = [{"kv_connector": "KVStoreConnector"}, None, {"kv_connector": "ExampleConnector"}]
    assert hands_over(connectors) is None
    assert hands_over([*connectors, {"kv_connector": "NixlPullConnector"}]) == "NixlPullConnector"
    assert hands_over([*connectors, multi({"kv_connector": "MoRIIOConnector"})]) == "MoRIIOConnector"


def multi(*connectors: object) -> dict[str, object]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


def test_only_one_kvstore_gives_tickets() -> None:
    plain = {"kv_connector": "KVStoreConnector"}
    giver = plain | {"kv_connector_extra_config": {"ticket_key_file": "/etc/key"}}
    check_ticket_givers([plain, giver, multi(plain), {"kv_connector": "Other"}])
    for connectors in [giver, giver], [giver, multi(plain, multi(giver))]:
        with pytest.raises(ConfigError, match="2 KVStoreConnectors inside MultiConnector have one, at most 1 may"):
            check_ticket_givers(connectors)


def test_where_lost_pages_fail_requests() -> None:
    assert fails_requests(kept=True, policy="fail", is_inside=True)
    assert fails_requests(kept=True, policy=None, is_inside=True)
    assert not fails_requests(kept=True, policy="recompute", is_inside=True)
    assert not fails_requests(kept=False, policy="fail", is_inside=True)
    assert not fails_requests(kept=True, policy="fail", is_inside=False)  # it stands where it counts
