"""What is in the node's image, and what a node's container may do."""

from __future__ import annotations

import json
from typing import Any

MOST_MIB = 450
"""Of the node's image, its base included."""


def test_the_nodes_image_is_small_and_runs_as_its_own_user(hosts: Any, docker: Any) -> None:
    image = json.loads(docker("image", "inspect", "kvstore"))[0]
    assert image["Config"]["User"] == "kvstore"
    print(f"the node's image: {image['Size'] >> 20} MiB", flush=True)
    assert image["Size"] >> 20 < MOST_MIB
    installed = "import importlib.metadata as m; print(*sorted(d.name for d in m.distributions()), sep='\\n')"
    names = hosts.compose("exec", "-T", "node1", "/opt/kvstore/bin/python", "-c", installed).split()
    assert "kvstore-offload" in names
    assert not {"torch", "pip", "setuptools", "pytest", "transformers"} & set(names)


def test_the_native_core_was_built_and_runs(hosts: Any) -> None:
    code = "from kvstore.core.choice import CHOSEN; print(CHOSEN.name, CHOSEN.reason)"
    assert hosts.compose("exec", "-T", "node1", "/opt/kvstore/bin/python", "-c", code).split() == ["native"]


def test_a_nodes_container_has_no_privilege_and_writes_to_its_volumes_only(hosts: Any, docker: Any) -> None:
    status = hosts.compose("exec", "-T", "node1", "cat", "/proc/1/status")
    told = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert told["Uid"].split() == ["1000"] * 4
    assert told["NoNewPrivs"] == "1"
    assert {told[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    files = docker("diff", hosts.container("node1")).splitlines()
    assert [
        line for line in files if line.startswith("A") and line.split()[1] not in ("/tests", "/other", "/clock")
    ] == []
