"""What a cache of answers has done, for people: how many were told, what that saved, and how similar prompts do."""

from __future__ import annotations

from typing import Any

from kvstore.responses.metrics import ResponseMetrics
from kvstore.responses.similar import Similar


def report(metrics: ResponseMetrics, similar: Similar | None) -> dict[str, Any]:
    """Counts since the start, as JSON has them.

    Args:
        metrics: what was counted.
        similar: how similar prompts are answered; None: they are not.
    """
    return {
        **{name: metrics.by_label(name) for name in ("lookups", "passed_by", "kept")},
        **{name: metrics.value(f"{name}_total") for name in ("shared", "saved_seconds", "saved_tokens")},
        "similar": None if similar is None else _similar(metrics, similar),
    }


def _similar(metrics: ResponseMetrics, similar: Similar) -> dict[str, Any]:
    outcomes, shadows = (
        {"right": 0.0, "wrong": 0.0, "undecided": 0.0} | metrics.by_label(f"similar_{what}")
        for what in ("outcomes", "shadows")
    )
    ends = {end: metrics.value("similar_disagreement", end=end) for end in ("lower", "upper")}
    return {
        "open": bool(metrics.value("similar_open")),
        "why": _why_shut(metrics, similar, ends["lower"]),
        "bound": similar.bound,
        "hits": metrics.value("similar_hits_total"),
        "refusals": metrics.by_label("similar_refusals"),
        "outcomes": outcomes,
        "shadows": shadows,
        **ends,
    }


def _why_shut(metrics: ResponseMetrics, similar: Similar, at_least: float) -> str:
    if similar.compare is None:
        return "nothing compares answers (--responses-compare): nothing is learnt, and nothing told"
    if metrics.value("similar_open"):
        return ""
    return (
        f"of the answers that were told to them, at least {100 * at_least:.1f} % were wrong (95 %), and the bound is"
        f" {100 * similar.bound:g} %: find out why, then send the proxy SIGUSR1, or start it again"
    )
