"""Which instance the proxy asks."""

from __future__ import annotations

import pytest

from kvstore.connector.proxy.instances import (
    FAILED_CHECKS,
    Instances,
    Role,
    may_retry,
)
from kvstore.errors import InvalidRequestError


@pytest.fixture
def instances() -> Instances:
    return Instances(["http://p1:1", "http://p2:1/"], ["http://d1:1", "http://d2:1"])


def names(instances: Instances, role: Role) -> list[str]:
    """Everybody who is asked for a request that fails everywhere, in order."""
    tried = []
    while (instance := instances.choose(role, tried)) is not None:
        tried.append(instance)
    return [instance.url[7:9] for instance in tried]


def test_the_one_with_the_fewest_requests_is_asked_and_of_equals_the_one_not_asked_for_longest(instances):
    p1, p2 = instances.all[:2]
    assert [instances.choose(Role.PREFILL, ()) for _ in range(3)] == [p1, p2, p1]
    with instances.busy(p2):
        assert [instances.choose(Role.PREFILL, ()) for _ in range(2)] == [p1, p1]
        with instances.busy(p1), instances.busy(p1):
            assert instances.choose(Role.PREFILL, ()) is p2
    assert (p1.in_flight, p2.in_flight) == (0, 0)


def test_a_request_that_fails_everywhere_was_asked_for_once_of_each(instances):
    assert names(instances, Role.PREFILL) == ["p1", "p2"]
    assert names(instances, Role.DECODE) == ["d1", "d2", "p1", "p2"]


def test_who_is_out_of_service_is_asked_last_and_for_prefill_never(instances):
    p1, _, d1, _ = instances.all
    assert instances.unreachable(p1)
    assert instances.unreachable(d1)
    assert not instances.unreachable(d1)
    assert names(instances, Role.PREFILL) == ["p2"]
    assert names(instances, Role.DECODE) == ["d2", "p2", "d1", "p1"]
    assert instances.check_passed(d1)
    assert not instances.check_passed(d1)
    assert names(instances, Role.DECODE) == ["d2", "d1", "p2", "p1"]


def test_checks_that_stay_unanswered_take_an_instance_out_of_service_when_they_are_several_in_a_row(instances):
    d1 = instances.all[2]
    assert [instances.check_failed(d1) for _ in range(FAILED_CHECKS - 1)] == [False] * (FAILED_CHECKS - 1)
    instances.check_passed(d1)
    assert [instances.check_failed(d1) for _ in range(FAILED_CHECKS + 1)] == [False, False, True, False]


def test_it_serves_as_long_as_anybody_does(instances):
    for instance in instances.all:
        assert instances.serving
        instances.unreachable(instance)
    assert not instances.serving


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_tells_of_the_instance_is_tried_elsewhere(status):
    assert may_retry(status)


@pytest.mark.parametrize("status", [200, 400, 401, 404, 413, 422])
def test_what_tells_of_the_request_is_not(status):
    assert not may_retry(status)


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ([], ["http://d:1"], "no prefill"),
        (["http://p:1"], [], "no decode"),
        (["http://a:1"], ["http://a:1/"], "twice"),
        (["a:1"], ["http://d:1"], "not the URL"),
        (["http://p:x"], ["http://d:1"], "not the URL"),
        (["http://p:1?x=1"], ["http://d:1"], "not the URL"),
        (["http://user:word@p:1"], ["http://d:1"], "not the URL"),
        (["http://p:1/v1"], ["http://d:1"], "without /v1"),
    ],
)
def test_urls_that_cannot_be_used_are_refused(prefill, decode, words):
    with pytest.raises(InvalidRequestError, match=words):
        Instances(prefill, decode)
