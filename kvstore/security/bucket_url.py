"""URLs of buckets: which object storage, which bucket, which prefix; never who may use it."""

from __future__ import annotations

import re

from kvstore.errors import ConfigError

SCHEMES = ("s3", "gs", "az")


def check_bucket_url(url: str) -> None:
    """Refuse what is no URL of a bucket, and one with credentials in it.

    Raises:
        ConfigError: it is; the message does not repeat credentials.
    """
    scheme, separator, rest = url.partition("://")
    host = rest.partition("/")[0]
    shown = re.sub(r"(?<=://)[^/]*@", "***@", re.split("[?#]", url)[0])
    if not separator or scheme not in SCHEMES or not host:
        raise ConfigError(f"objects: a bucket is named as s3://BUCKET/PREFIX, gs:// or az://, got {shown!r}")
    if "@" in host or "?" in rest or "#" in rest:
        raise ConfigError(
            f"objects: {shown!r}: credentials, endpoint and region are the environment's (AWS_ACCESS_KEY_ID,"
            " AWS_ENDPOINT_URL, …), never the URL's"
        )
