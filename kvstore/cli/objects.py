"""``kvstore objects``: what object storage itself should do with the pages that nodes keep there."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvstore.errors import ConfigError, InvalidRequestError
from kvstore.security.bucket_url import check_bucket_url

_HELP = """\
A lifecycle rule is a backstop: nodes delete what leaves by themselves, but what a fleet that is gone left behind stays,
and costs. The rule deletes what is older than so many days, whether it is used or not: to a node, that is a miss.

  kvstore objects policy s3://bucket/prefix --days 90 > policy.json
  aws s3api put-bucket-lifecycle-configuration --bucket bucket --lifecycle-configuration file://policy.json

The second command replaces all rules that the bucket has: put them together first, where there are others.
"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    objects = commands.add_parser("objects", help="a lifecycle rule for object storage")
    group = objects.add_subparsers(dest="objects_command", required=True, metavar="WHAT")
    policy = group.add_parser(
        "policy",
        help="print a lifecycle rule (S3) that deletes old packs",
        description="Print a lifecycle rule for a bucket (S3), as JSON.",
        epilog=_HELP,
    )
    policy.add_argument("bucket", metavar="URL", help="as the setting objects names it: s3://bucket/prefix")
    policy.add_argument("--days", type=int, default=90, metavar="N", help="age from which on objects go (default: 90)")
    policy.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print, and return the exit code."""
    check_bucket_url(options.bucket)
    if not options.bucket.startswith("s3://"):
        raise ConfigError(f"{options.bucket!r}: lifecycle rules are printed for S3 (s3://) alone")
    if not 1 <= options.days <= 36500:
        raise InvalidRequestError(f"--days must lie between 1 and 36500, got {options.days}")
    prefix = options.bucket.removeprefix("s3://").partition("/")[2].strip("/")
    rule = {
        "ID": f"kvstore {prefix}".strip(),
        "Status": "Enabled",
        "Filter": {"Prefix": f"{prefix}/" if prefix else ""},
        "Expiration": {"Days": options.days},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }
    print(json.dumps({"Rules": [rule]}, indent=2))
    return 0
