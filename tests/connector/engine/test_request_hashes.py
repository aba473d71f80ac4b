"""Names of blocks, from plain objects that look like vLLM's requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="reads an engine's tensors")

from kvstore.connector.engine.request_hashes import Hashes  # noqa: E402

HASH = "ab" * 32


def request(**fields: Any) -> SimpleNamespace:
    plain: dict[str, Any] = {"lora_request": None, "prompt_embeds": None, "mm_features": [], "cache_salt": None}
    plain |= {"resumable": False, "request_id": "r", "all_token_ids": range(16)}
    return SimpleNamespace(**(plain | fields))


def picture(identifier: str) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=0, length=4))


def name_of(hashes: Hashes, **fields: Any) -> bytes | None:
    chain = hashes.chain(request(**fields))
    return None if chain is None else chain.hashes[0]


def test_a_request_with_what_is_no_token_has_no_names() -> None:
    assert name_of(Hashes(16)) is not None
    assert name_of(Hashes(16), all_token_ids=[*range(20), -1]) is None


def test_pictures_are_named_by_their_content_or_not_at_all() -> None:
    hashes = Hashes(16)
    assert name_of(hashes, mm_features=[picture(HASH)]) == name_of(hashes, mm_features=[picture(HASH)])
    assert name_of(hashes, mm_features=[picture("adapter:" + HASH)]) is not None
    for counted in ("renderer0-mm-1-image-0", "my-picture", HASH[:-1]):
        assert name_of(hashes, mm_features=[picture(counted)]) is None


def test_an_adapter_is_named_by_its_weights_which_are_read_in_the_background(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    def named(folder: Path, **fields: Any) -> bytes | None:
        lora = SimpleNamespace(lora_name="a", lora_path=str(folder), lora_int_id=1, **fields)
        hashes = Hashes(16)
        assert name_of(hashes, lora_request=lora) is None  # not looked at yet
        eventually(lambda: hashes.ready(request(lora_request=lora)))
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
    hashes = Hashes(16)
    before = name_of(hashes)
    hashes.reset()
    assert hashes.private
    assert name_of(hashes) not in (None, before)
