"""Times of tiers' calls, in classes."""

from __future__ import annotations

import pytest

from kvstore.tiers import latencies as times
from kvstore.tiers.latencies import BOUNDS, TierLatencies


class Clock:
    def __init__(self, *readings: float) -> None:
        self.perf_counter = iter(readings).__next__


def test_each_call_is_in_the_first_class_that_holds_it(monkeypatch):
    measured = TierLatencies()
    monkeypatch.setattr(times, "time", Clock(0.0, 0.001, 1.0, 1.0011, 5.0, 50.0))
    for _ in range(3):
        with measured.measured("disk", "read"):
            pass
    [read] = measured.all()
    assert (read.tier, read.operation) == ("disk", "read")
    assert {bound: count for bound, count in zip([*BOUNDS, None], read.counts, strict=True) if count} == {
        0.001: 1,
        0.0025: 1,
        None: 1,
    }
    assert read.seconds == pytest.approx(45.0021)


def test_a_call_that_fails_took_time_too(monkeypatch):
    measured = TierLatencies()
    with pytest.raises(OSError, match="no"), measured.measured("redis", "write"):
        raise OSError("no")
    assert sum(measured.all()[0].counts) == 1
