"""Declarations of settings fit the fields that carry them."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

from kvstore.config.node import SETTINGS, NodeConfig


def test_a_kind_makes_values_of_its_fields_type() -> None:
    samples = {int: "7", float: "7", bool: "true", str: "any", Path: "/any"}
    for key, hint in get_type_hints(NodeConfig).items():
        kind = SETTINGS[key].kind
        if not kind.file_only:
            [wanted] = {hint, *get_args(hint)} & samples.keys()
            assert isinstance(kind.parse(samples[wanted]), wanted), key


def test_a_default_is_one_that_can_be_given() -> None:
    for setting in SETTINGS.values():
        if setting.written_default:
            assert setting.kind.parse(setting.written_default) == setting.default(), setting.key
        assert not setting.zero or setting.default() == 0, setting.key
