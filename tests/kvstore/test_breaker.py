"""The circuit breaker: its states, and what opens and closes it in each part that has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from disk_tiers import Clock

from kvstore.breaker import Breaker, State
from kvstore.connector.health import BACKOFF
from kvstore.segments.io_threads import LateError
from kvstore.tiers.disk import device_trust
from kvstore.tiers.disk.device_trust import Direction
from kvstore.tiers.redis.net import server


class Kind(NamedTuple):
    failures: int
    pause: float
    longest_pause: float
    single_trial: bool

    def breaker(self, clock: Callable[[], float]) -> Breaker:
        return Breaker(self.failures, self.pause, self.longest_pause, single_trial=self.single_trial, clock=clock)


DISK = Kind(device_trust.FAILURES, device_trust.FIRST_PAUSE, device_trust.LONGEST_PAUSE, single_trial=True)
REDIS = Kind(server.FAILURES, server.FIRST_PAUSE, server.LONGEST_PAUSE, single_trial=True)
NODE = Kind(1, BACKOFF, BACKOFF, single_trial=False)


def test_how_long_each_part_is_patient() -> None:
    assert DISK[:3] == (4, 1.0, 60.0)
    assert REDIS[:3] == (3, 0.1, 2.0)
    assert NODE[:3] == (1, 1.0, 1.0)


@pytest.mark.parametrize("kind", [DISK, REDIS, NODE])
def test_failures_in_a_row_open_it_and_no_others(kind: Kind) -> None:
    clock = Clock()
    breaker = kind.breaker(clock)
    for _ in range(kind.failures - 1):
        breaker.failed()
    breaker.succeeded()
    for _ in range(kind.failures):
        assert breaker.state is State.CLOSED
        assert breaker.allows()
        breaker.failed()
    assert breaker.state is State.OPEN
    assert not breaker.allows()


@pytest.mark.parametrize("kind", [DISK, REDIS, NODE])
def test_trials_come_after_pauses_that_double(kind: Kind) -> None:
    clock = Clock()
    breaker = kind.breaker(clock)
    for _ in range(kind.failures):
        breaker.failed()
    pause = kind.pause
    for _ in range(10):
        clock.now += 0.99 * pause
        assert breaker.state is State.OPEN
        assert not breaker.allows()
        clock.now += 0.02 * pause
        assert breaker.state is State.HALF_OPEN
        assert breaker.allows()
        assert breaker.allows() is not kind.single_trial
        breaker.failed()
        pause = min(2 * pause, kind.longest_pause)
    clock.now += 1.01 * pause
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.state is State.CLOSED
    for _ in range(kind.failures):
        assert breaker.allows(), "the count begins anew"
        breaker.failed()
    clock.now += 1.01 * kind.pause
    assert breaker.state is State.HALF_OPEN, "and so does the pause"


def test_a_trial_that_never_tells_is_followed_by_another() -> None:
    clock = Clock()
    breaker = DISK.breaker(clock)
    breaker.failed(at_once=True)
    for _ in range(3):
        clock.now += 0.99
        assert not breaker.allows()
        clock.now += 0.02
        assert breaker.allows()
        assert breaker.state is State.OPEN, "for all others"


def test_an_io_that_is_late_opens_a_disks_breaker_at_once() -> None:
    """And one that is refused does not: each that is late costs a deadline."""
    clock = Clock()
    refused, late = Direction(1, 1.0, clock), Direction(1, 1.0, clock)
    refused.failed(OSError())
    late.failed(LateError(1.0))
    assert (refused.resting, late.resting) == (False, True)
    assert (refused.may_try(), late.may_try()) == (True, False)
    clock.now += 1.01
    assert not late.resting
    assert late.may_try()
    refused.close()
    late.close()


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    breaker = DISK.breaker(Clock())
    breaker.failed(at_once=True)
    with breaker._lock:  # as another thread has it when the parent forks
        breaker.forked()
        assert breaker._lock.acquire(blocking=False)
    breaker._lock.release()
    assert breaker.state is State.OPEN
