"""Which core runs, and what is said where the wrong one would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvstore
from kvstore.config.load import load_config
from kvstore.core import choice
from kvstore.core.abi import ABI
from kvstore.core.choice import Choice, choose
from kvstore.errors import ConfigError

ROOT = Path(__file__).parents[3]
BUILT: Any = SimpleNamespace(ABI=ABI)


def missing() -> Any:
    raise ImportError("No module named 'kvstore._core'")


@pytest.mark.parametrize("wanted", ["", "native"])
def test_one_that_was_built_from_these_sources_runs(wanted: str) -> None:
    assert choose(wanted, lambda: BUILT) == Choice(BUILT, "")
    assert choose(wanted, lambda: BUILT).name == "native"


def test_python_runs_where_it_is_wanted_and_nothing_is_imported() -> None:
    chosen = choose("python", missing)
    assert (chosen.name, chosen.reason, chosen.wrong) == ("python", "KVSTORE_CORE says so", False)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (missing, "kvstore._core can't be loaded, built without a C compiler perhaps (No module named"),
        (lambda: SimpleNamespace(ABI=ABI ^ 1), f"kvstore._core was built from other sources (ABI {ABI ^ 1:#x}, these"),
        (lambda: SimpleNamespace(), "kvstore._core was built from other sources (ABI None, these"),
    ],
    ids=["missing", "stale", "none of ours"],
)
def test_what_can_not_be_used_is_python_with_a_reason_and_wrong_where_it_was_wanted(load: Any, reason: str) -> None:
    chosen = choose("", load)
    assert (chosen.native, chosen.wrong) == (None, False)
    assert chosen.reason.startswith(reason)
    wanted = choose("native", load)
    assert (wanted.native, wanted.wrong) == (None, True)
    assert wanted.reason.startswith(f"KVSTORE_CORE is native, and {reason}")


def test_another_word_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose("nativ", lambda: BUILT)
    assert chosen == Choice(None, "KVSTORE_CORE must be native, python or empty, got 'nativ'", wrong=True)
    monkeypatch.setattr(choice, "CHOSEN", chosen)
    with pytest.raises(ConfigError, match="got 'nativ'"):
        kvstore.connect("unix:///nowhere")


def test_the_environment_says_which(caplog: pytest.LogCaptureFixture) -> None:
    code = "from kvstore.core import choice; print(choice.CHOSEN.name)"
    environment = os.environ | {"KVSTORE_CORE": "python", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "python\n", done.stderr
    load_config(None, {"KVSTORE_CORE": "python"})
    assert not caplog.records, "it is no setting of a node, and no word is wrong about it"
