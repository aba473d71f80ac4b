"""The volume of a node's disk runs full below the node's limit, and has room again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

_FILL = """
import errno
with open("/disk/ballast", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(1 << 16))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
"""


@pytest.fixture
def fill(hosts: Any, docker: Any) -> Iterator[Callable[[], None]]:
    engine = hosts.container("engine2")
    yield lambda: docker("exec", engine, "python", "-c", _FILL)
    docker("exec", engine, "rm", "-f", "/disk/ballast")


def test_a_full_volume_makes_the_disk_tier_smaller(
    hosts: Any,
    docker: Any,
    fill: Callable[[], None],
    clients: Any,
    traffic: Any,
    eventually: Any,
    back_to_normal: Callable[[], None],
    counted_truly: Callable[[int], bool],
) -> None:
    def disk(counter: str) -> int:
        return int(clients[1].counters("disk")[counter])

    with traffic() as load:
        load.more(3)
        fill()
        failed = disk("errors") + disk("refused")
        eventually(lambda: disk("errors") + disk("refused") > failed, "what the disk did not take is counted")
        load.more(10)
        docker("exec", hosts.container("engine2"), "rm", "/disk/ballast")
        stored = disk("stored")
        eventually(lambda: disk("stored") > stored + 100, "the disk takes pages again")
        back_to_normal()
    assert disk("corrupt") == 0
    eventually(lambda: counted_truly(1), "what was stored is counted, and nothing else")
