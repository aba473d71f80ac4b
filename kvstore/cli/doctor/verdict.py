"""A verdict: what one check of ``kvstore doctor`` found."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one check found."""

    subject: str
    """What was checked."""
    level: str
    """``OK``, ``WARN`` (it works, and could be better) or ``FAIL`` (it can't work so)."""
    text: str
    advice: str = ""
    """What to do; empty where nothing is to be done."""
