"""Runs several batches of one call in parallel, on threads that end with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from kvstore.host.cutting import doing, work_here

Answer = TypeVar("Answer")


def in_background(work: Callable[[], Answer]) -> Future[Answer]:
    """Do ``work`` in a thread of its own; here and now where no thread can be had."""
    future: Future[Answer] = Future()
    part_of = work_here()

    def run() -> None:
        try:
            with doing(part_of):
                answer = work()
            future.set_result(answer)
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="kvstore-bulk-batch", daemon=True).start()
    except RuntimeError:
        run()
    return future


def load_in_parallel(load: Callable[[int], tuple[list[str], bool]], batches: int, threads: int) -> list[str]:
    """Load batches, several at once, until one does not come whole. Returns when none is under way any more.

    Args:
        load: given a batch's place, the tiers of its leading pages that came, and whether these are all.
        batches: how many there are.
        threads: most of them at once.

    Returns:
        The tiers of all leading pages.

    Raises:
        Exception: what the first batch raised.
    """
    if batches == 1:
        return load(0)[0]
    places = iter(range(batches))
    lock = threading.Lock()
    came: dict[int, tuple[list[str], bool]] = {}
    failed: dict[int, Exception] = {}

    def work() -> None:
        while True:
            with lock:
                ended = failed or not all(whole for _, whole in came.values())
                place = None if ended else next(places, None)
            if place is None:
                return
            try:
                answer = load(place)
            except Exception as error:  # noqa: BLE001 - told below, or what came before it is
                with lock:
                    failed[place] = error
                return
            with lock:
                came[place] = answer

    others = [in_background(work) for _ in range(min(threads, batches) - 1)]
    work()
    wait(others)
    if 0 in failed:
        raise failed[0]
    tiers: list[str] = []
    for place in range(batches):
        some, whole = came.get(place, ([], False))
        tiers += some
        if not whole:
            break
    return tiers
