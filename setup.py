"""Refuses to build where ``kvstore/connector`` and ``kvstore/gpu`` are no links any more, as unpacked from a zip."""

from pathlib import Path

from setuptools import setup

for name in ("connector", "gpu"):
    if not (Path(__file__).parent / "kvstore" / name / "__init__.py").exists():
        raise SystemExit(
            f"kvstore/{name} does not lead to {name}/: it is a link, which zip archives lose. Take a checkout of git,"
            " or a tar archive"
        )
setup()
