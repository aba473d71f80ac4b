"""Work that is done now and then."""

from __future__ import annotations

import threading

import pytest

from kvstore.tiers.redis.tier import Periodic


def test_a_round_that_fails_is_logged_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    rounds, came = [ValueError("unforeseen")], threading.Event()

    def work() -> None:
        if rounds:
            raise rounds.pop()
        came.set()

    periodic = Periodic(work, 0.01, "kvstore-test")
    assert came.wait(60)
    periodic.close()
    assert "kvstore-test: a round failed" in caplog.text
    assert "unforeseen" in caplog.text
