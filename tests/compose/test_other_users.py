"""Engines that run as another user of the node's group, and that have socket and arena at other paths than the node."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("unix:///host/kvstore.sock", id="found beside the socket"),
        pytest.param("unix:///host/kvstore.sock?arena_dir=/memory/arena", id="named in the URL"),
    ],
)
def test_a_member_of_the_group_shares_the_memory_at_other_paths(
    url: str, docker: Any, clients: Any, page_client: Any, name: str
) -> None:
    guest = page_client("guest2", url)
    assert guest.ok(do="path")["path"] == "SharedPath"
    assert guest.store(f"{name}/here", 16)["stored"] == 16
    assert clients[1].load(f"{name}/here", 16)["tiers"] == {"arena": 16}
    assert clients[1].store(f"{name}/there", 16)["stored"] == 16
    assert guest.load(f"{name}/there", 16)["tiers"] == {"arena": 16}


def test_who_is_in_no_group_does_not_get_in(hosts: Any, docker: Any) -> None:
    volume = f"{hosts.project}_run2:/host"
    inside = ["docker", "run", "--rm", "--network", "none", "--volume", volume]
    stranger = [*inside, "--user", "3000:3000"]
    asked = [*stranger, "kvstore", "status", "--url", "unix:///host/kvstore.sock"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "can't be reached" in done.stderr
    listed = [*stranger, "--entrypoint", "ls", "kvstore", "/host"]
    assert "Permission denied" in subprocess.run(listed, capture_output=True, text=True, timeout=120).stderr


def test_each_hosts_memory_is_mapped(clients: Any) -> None:
    assert [client.ok(do="path")["path"] for client in clients] == ["SharedPath", "SharedPath"]
