"""Counters of both halves as changes, under names that are known."""

from __future__ import annotations

from dataclasses import fields

from kvstore.connector.disagg.handover import HandoverStatistics
from kvstore.connector.engine.metrics import (
    METRICS,
    Increments,
    lookup_counts,
    ticket_counts,
    together,
    worker_counts,
)
from kvstore.connector.lookups import LookupStatistics
from kvstore.connector.worker_statistics import WorkerStatistics


def test_every_count_of_the_worker_half_is_told_once() -> None:
    numbers = {
        field.name: index for index, field in enumerate(fields(WorkerStatistics), 1) if field.name != "pages_loaded"
    }
    counts = worker_counts(WorkerStatistics(pages_loaded={"arena": 100, "redis": 200}, **numbers))
    assert sorted(counts.values()) == sorted([*numbers.values(), 100, 200])
    assert counts["pages_loaded|redis"] == 200


def test_each_name_has_a_metric_with_or_without_a_label() -> None:
    counts = worker_counts(WorkerStatistics(pages_loaded={"disk": 1})) | lookup_counts(LookupStatistics())
    counts |= ticket_counts(HandoverStatistics(refused={"forged": 1}))
    assert counts["tickets|forged"] == 1
    for name in counts:
        metric, _, label = name.partition("|")
        assert bool(METRICS[metric].label) == bool(label), name


def test_changes_are_told_once() -> None:
    increments = Increments()
    assert increments.take({"a": 3.0, "b": 0.0}) == {"a": 3.0}
    assert increments.take({"a": 3.0, "b": 0.0}) == {}
    assert increments.take({"a": 5.0, "b": 1.0}) == {"a": 2.0, "b": 1.0}


def test_counts_of_several_ranks_are_added() -> None:
    assert together({"a": 1.0, "b": 2.0}, {"b": 3.0, "c": 4.0}) == {"a": 1.0, "b": 5.0, "c": 4.0}
