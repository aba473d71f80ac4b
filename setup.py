"""Refuses to build where links in ``kvstore/`` are none any more, as unpacked from a zip."""

from pathlib import Path

from setuptools import setup

for name in ("connector", "gpu", "docs", "deploy", "proto"):
    if not (Path(__file__).parent / "kvstore" / name).is_dir():
        raise SystemExit(
            f"kvstore/{name} does not lead to {name}/: it is a link, which zip archives lose. Take a checkout of git,"
            " or a tar archive"
        )
setup()
