"""Names of blocks, from plain objects that look like vLLM's requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_objects import Feature, LoRARequest, Request

torch = pytest.importorskip("torch", reason="reads an engine's tensors")

from kvstore.connector.engine.request_hashes import RequestHashes  # noqa: E402

HASH = "ab" * 32


def name_of(hashes: RequestHashes, **fields: Any) -> bytes | None:
    chain = hashes.chain(Request(**fields))
    return None if chain is None else chain.hashes[0]


def test_a_request_with_what_is_no_token_has_no_names() -> None:
    assert name_of(RequestHashes(16)) is not None
    assert name_of(RequestHashes(16), all_token_ids=[*range(20), -1]) is None


def test_pictures_are_named_by_their_content_or_not_at_all() -> None:
    hashes = RequestHashes(16)
    assert name_of(hashes, mm_features=[Feature(HASH)]) == name_of(hashes, mm_features=[Feature(HASH)])
    assert name_of(hashes, mm_features=[Feature("adapter:" + HASH)]) is not None
    for counted in ("renderer0-mm-1-image-0", "my-picture", HASH[:-1]):
        assert name_of(hashes, mm_features=[Feature(counted)]) is None


def test_an_adapter_is_named_by_its_weights_which_are_read_in_the_background(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    def named(folder: Path, **fields: Any) -> bytes | None:
        lora = LoRARequest(str(folder), **fields)
        hashes = RequestHashes(16)
        assert name_of(hashes, lora_request=lora) is None  # not looked at yet
        eventually(lambda: hashes.ready(Request(lora_request=lora)))
        return name_of(hashes, lora_request=lora)

    folders = [tmp_path / name for name in ("one", "copy", "other")]
    for folder, data in zip(folders, (b"1", b"1", b"2"), strict=True):
        folder.mkdir()
        (folder / "adapter_model.bin").write_bytes(data)
    one, copy, other = map(named, folders)
    assert one is not None
    assert one == copy != other
    assert named(tmp_path / "nowhere") is None
    assert named(folders[0], load_inplace=True) is None


def test_a_reset_changes_every_name() -> None:
    hashes = RequestHashes(16)
    before = name_of(hashes)
    hashes.reset()
    assert hashes.private
    assert name_of(hashes) not in (None, before)
