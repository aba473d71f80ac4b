"""What requests to object storage cost, about: by the prices that Amazon and Google name for their standard classes.

Where a server is one's own, or another provider's, they are a measure of how much is asked, and no bill. Bytes that are
stored, and bytes that leave a region, are not in them.
"""

from __future__ import annotations

from collections.abc import Mapping

DOLLARS = {"get": 4e-7, "put": 5e-6, "list": 5e-6, "delete": 0.0}
"""For one request of each class: S3 in us-east-1 and Google Cloud Storage in its regions, 2025, in US dollars."""


def dollars_of(requests: Mapping[str, int]) -> dict[str, float]:
    """What so many requests of each class cost, in US dollars."""
    return {request: count * DOLLARS[request] for request, count in requests.items()}
