"""What C is told of layouts is what Python declares."""

from __future__ import annotations

from pathlib import Path

import core_layout
import pytest

from kvstore.core import choice
from kvstore.core.abi import ABI


@pytest.mark.parametrize("name", core_layout.FILES)
def test_what_is_made_from_the_declarations_is_up_to_date(name: str) -> None:
    assert (core_layout.CORE / name).read_text() == core_layout.FILES[name](), "make core-layout"


def test_a_build_says_the_number_that_it_was_made_for() -> None:
    assert core_layout.abi() == ABI
    if (core := choice.native()) is None:
        pytest.skip(choice.CHOSEN.reason)
    assert core.ABI == ABI


def test_every_constant_and_every_signature_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numbers = {ABI}
    with monkeypatch.context() as patch:
        patch.setattr(core_layout.fmt, "EDITION_OFFSET", 528)
        numbers.add(core_layout.abi())
    methods = tmp_path / "methods.h"
    methods.write_text(
        core_layout.METHODS.read_text().replace("namespace, length, hashes", "length, namespace, hashes")
    )
    monkeypatch.setattr(core_layout, "METHODS", methods)
    numbers.add(core_layout.abi())
    assert len(numbers) == 3
