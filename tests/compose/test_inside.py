"""The ``tests`` service: the tests that break nothing, from a container in the nodes' network."""

from __future__ import annotations

import re
from typing import Any


def test_the_tests_service_runs_what_breaks_nothing(hosts: Any, docker: Any) -> None:
    said = hosts.compose("--profile", "tests", "run", "--rm", "--no-deps", "tests")
    print(said, flush=True)
    (summary,) = re.findall(r"^=+ (\d+) passed, (\d+) skipped", said, re.MULTILINE)
    assert int(summary[0]) >= 6
