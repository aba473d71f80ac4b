"""What SGLang's keys tell apart, by its own functions: what they don't, the namespace must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sglang.server import HERE

pytestmark = pytest.mark.timeout(300)

SAME = [
    {"adapter", "adapter again"},  # the files that lie there are not in it
    {"picture", "picture again"},
    {"picture by a caller's hash", "another picture by the same"},
]


def test_what_keys_tell_apart(tmp_path: Path) -> None:
    paths = [str(HERE / "shim"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sys.executable, str(HERE / "engine_keys.py")]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    keys = json.loads(run.stdout.splitlines()[-1])
    # What docs/sglang.md says to routers.
    assert keys.pop("of an event") == int.from_bytes(bytes.fromhex(keys["plain"])[:8], "big", signed=True)
    names: dict[str, set[str]] = {}
    for name, key in keys.items():
        names.setdefault(key, set()).add(name)
    assert [each for each in names.values() if len(each) > 1] == SAME
