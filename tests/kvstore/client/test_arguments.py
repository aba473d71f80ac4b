"""Wrong arguments of the public interface, on every path: one kind of error, which names the value, before any call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import InvalidRequestError

HUGE = 10**30
NO_NUMBERS: list[Any] = ["12", None, b"1", [1], math.nan, True, np.True_, np.float32(math.nan)]
NO_SECONDS: list[Any] = [-1, 0, HUGE, math.inf, *NO_NUMBERS]
NOTHING: list[Any] = [-1, 0, HUGE, math.nan, "x", None, True, [1]]


def refused(call: Callable[[], object], value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert repr(value)[:20] in str(caught.value) or type(value).__name__ in str(caught.value), str(caught.value)


@pytest.mark.parametrize("value", [*NO_SECONDS, 1.5, 366 * 86400 + 1], ids=repr)
def test_a_pin_lasts_a_whole_number_of_seconds(place, pages, hashes, payload, value: Any) -> None:
    pages.store(hashes(1), payload(1))
    before = place.snapshot()
    with pytest.raises(InvalidRequestError, match=r"whole number of seconds from 1 to 31622400 \(366 days\), got "):
        pages.pin(hashes(1), value)
    refused(lambda: pages.pin(hashes(1), value), value)
    assert place.snapshot() == before
    assert pages.pin(hashes(1), 366 * 86400) == 1


@pytest.mark.parametrize("value", [*NO_SECONDS, 86401], ids=repr)
def test_timeouts_lie_between_0_and_a_day(place, client, pages, hashes, payload, value: Any) -> None:
    pages.store(hashes(1), payload(1))
    before, timeout = place.snapshot(), client.timeout
    with pytest.raises(InvalidRequestError, match=r"timeout must be above 0 and at most 86400 seconds, got "):
        client.timeout = value
    assert client.timeout == timeout
    if value is not None:
        refused(lambda: pages.clear(value), value)
    refused(lambda: kvstore.connect("unix:///nowhere/s", timeout=value), value)
    assert place.snapshot() == before


def test_numbers_of_numpy_are_numbers(place, client, pages, hashes, payload) -> None:
    pages.store(hashes(1), payload(1))
    assert pages.pin(hashes(1), np.int64(60)) == 1
    client.timeout = np.float32(20)
    assert client.status().namespaces[0].pinned_pages == 1
    with kvstore.connect("unix:///nowhere/s", timeout=np.float32(2)) as other:
        assert other.timeout == 2.0


@pytest.mark.parametrize("value", NOTHING, ids=repr)
def test_what_is_no_query_no_fingerprint_no_name(place, client, pages, hashes, payload, value: Any) -> None:
    pages.store(hashes(1), payload(1))
    before = place.snapshot()
    for look in (client.lookup, client.lookup_here):
        for queries in (value, [value], [(value, hashes(1))], [(pages, hashes(1), 1)]):
            if queries != []:
                with pytest.raises(InvalidRequestError):
                    look(queries)
    refused(lambda: client.explain(value, hashes(1)), value)
    refused(lambda: client.namespace(value), value)
    if value != "x":
        refused(lambda: client.namespace(pages.layout, durability=value), value)
    with pytest.raises(InvalidRequestError):
        client.namespace(pages.layout, durability=value)
    for call in (pages.lookup, pages.touch, pages.evict, pages.unpin, pages.prepare_store, pages.prepare_load):
        with pytest.raises(InvalidRequestError):
            call(value)
    for store in (pages.prepare_store, lambda names, parent: pages.store(names, payload(1), parent=parent)):
        with pytest.raises(InvalidRequestError):
            store(hashes(1), parent=value)
    assert place.snapshot() == before


@pytest.mark.parametrize("value", [-1, HUGE, math.nan, True, [1], b"file"], ids=repr)
def test_what_is_no_file_no_url_no_provider(value: Any) -> None:
    for name in ("ca", "cert", "key", "token_file", "traces"):
        refused(lambda name=name: kvstore.connect("kvs://localhost:1", **{name: value}), value)
    refused(lambda: kvstore.connect(value), value)


@pytest.mark.parametrize("value", [-1, 0, HUGE, math.nan, math.inf, "16", None, True, 1.5, b"x", [1]], ids=repr)
def test_numbers_of_layouts_and_hashes(value: Any) -> None:
    right: dict[str, Any] = {"model": "m", "block_size": 16, "page_bytes": 64}
    for name in ("block_size", "page_bytes", "tp_size"):
        refused(lambda name=name: kvstore.Layout(**(right | {name: value})), value)
    refused(lambda: kvstore.hash_blocks([1] * 32, value), value)
    if not isinstance(value, str | bytes | list):
        refused(lambda: kvstore.hash_blocks([1] * 32, 16, value), value)
        refused(lambda: kvstore.hash_blocks(value, 16), value)
