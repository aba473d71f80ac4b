"""What kvstore shows to the outside is what it showed before: ``tests/fixtures/outside/`` has it as text.

Where a change is meant, ``make outside`` writes those files anew; they are committed with it.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys

import pytest
from outside_snapshot.package import ROOT
from outside_snapshot.subjects import FOLDER, SUBJECTS

PATIENCE = 240.0


def shown(subject: str) -> str:
    """What the code shows now, in a process of its own: tests change defaults."""
    command = [sys.executable, "-m", "outside_snapshot", subject]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(FOLDER.parent), *sys.path]))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("subject", SUBJECTS)
def test_nothing_changed_for_the_outside(subject: str) -> None:
    if subject == "help":
        pytest.importorskip("torch", reason="kvstore demo says nothing without torch")
    path = FOLDER / f"{subject}.txt"
    name = str(path.relative_to(ROOT))
    before, now = path.read_text().splitlines(), shown(subject).splitlines()
    changes = "\n".join(difflib.unified_diff(before, now, name, "the code", lineterm=""))
    if changes:
        pytest.fail(f"{changes}\n\nIf this is meant: make outside, and commit {name}", pytrace=False)


def test_every_file_has_a_subject() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{subject}.txt" for subject in SUBJECTS}
