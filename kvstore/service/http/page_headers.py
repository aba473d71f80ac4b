"""Headers of pages for people, which load nothing from elsewhere, run nothing that is not in a file of theirs, and are
not kept."""

from __future__ import annotations

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)
