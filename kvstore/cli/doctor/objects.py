"""Checks of the object storage that nodes share."""

from __future__ import annotations

import secrets
import time

from kvstore.cli.doctor.verdict import FAIL, OK, WARN, Verdict
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError
from kvstore.status import Status

_SECONDS = 5.0
_SLOW_SECONDS = 0.5


def check_objects(config: NodeConfig, status: Status | None = None) -> list[Verdict]:
    """Whether a small object can be written, listed, read and deleted from here, and how long that takes.

    A running node (``status``) does not say where its object storage is: the settings do.
    """
    if not config.objects:
        there = status is not None and any(tier.name == "objects" for tier in status.tiers)
        text = "not asked from here: these settings don't name the node's bucket" if there else "no object tier"
        return [Verdict("objects", OK, text)]
    from kvstore.tiers.objects.bucket import Bucket

    path = f"doctor/{secrets.token_hex(8)}"
    body = secrets.token_bytes(64)
    step = "opened"
    try:
        bucket = Bucket(config.objects, _SECONDS)
        try:
            step = "written to"
            began = time.monotonic()
            bucket.put(path, body, quick=True)
            took = time.monotonic() - began
            step = "read"
            whole = bucket.get(path) == body
            step = "listed"
            listed = any(each.path == path for each in bucket.list("doctor/"))
            step = "deleted from"
            bucket.delete([path])
        finally:
            bucket.close()
    except ConfigError as error:
        return [Verdict("objects", FAIL, str(error), "write the URL as `kvstore docs configuration` says")]
    except OSError as error:
        advice = (
            "may these credentials read, write, list and delete below the prefix? The node takes them, endpoint and"
            " region from its environment (AWS_…), or from the machine's role"
        )
        return [Verdict("objects", FAIL, f"{config.objects} can't be {step}: {error.strerror or error}", advice)]
    if not whole:
        return [Verdict("objects", FAIL, "something else came than was written", "no node should use this server")]
    if not listed:
        text = "what was written is in no list yet: nodes learn of each other's pages later"
        return [Verdict("objects", WARN, text)]
    text = f"{config.objects} can be read and written; writing a small object took {1e3 * took:.0f} ms"
    if took > _SLOW_SECONDS:
        return [Verdict("objects", WARN, text, "use a bucket that is nearer, or computing will be faster than loading")]
    return [Verdict("objects", OK, text)]
