"""What has to be there for what: an engine's side is imported where none of the node's own packages is."""

from __future__ import annotations

import os
import subprocess
import sys

ENGINE_SIDE = """
import sys

for name in ("redis", "lz4", "rich", "cryptography"):
    sys.modules[name] = None  # importing it raises

import connector.reference.engine, connector.scheduler, connector.worker, gpu.pages, gpu.pinned, kvstore.node
"""


def test_an_engines_side_needs_no_package_of_the_tiers_below_or_of_the_command() -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    run = subprocess.run([sys.executable, "-c", ENGINE_SIDE], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
