import logging

from kvstore.connector.health import BACKOFF, LOG_INTERVAL, NodeHealth
from kvstore.errors import UnavailableError


def test_a_node_that_failed_is_left_alone_for_a_while(clock):
    health = NodeHealth("looking up", clock)
    assert health.available()
    health.failed(UnavailableError("gone"))
    assert not health.available()
    clock.advance(BACKOFF)
    assert health.available()


def test_an_answer_ends_the_wait(clock):
    health = NodeHealth("looking up", clock)
    health.failed(UnavailableError("gone"))
    health.succeeded()
    assert health.available()


def test_failures_are_logged_once_in_a_while_with_their_number(clock, caplog):
    health = NodeHealth("looking up", clock)
    with caplog.at_level(logging.WARNING, "kvstore.connector"):
        for _ in range(5):
            health.failed(UnavailableError("the socket is gone"))
        assert len(caplog.records) == 1
        clock.advance(LOG_INTERVAL)
        health.failed(UnavailableError("the socket is gone"))
    assert [record.args[:2] for record in caplog.records] == [("looking up", 1), ("looking up", 5)]
    assert "the socket is gone" in caplog.text
    assert health.failures == 6
