"""Names of blocks, from plain objects that look like vLLM's requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_objects import Feature, LoRARequest, Place, Request

torch = pytest.importorskip("torch", reason="reads an engine's tensors")

from kvstore.connector.blocks.extra_keys import SharedPrefix  # noqa: E402
from kvstore.connector.engine.request_hashes import RequestHashes  # noqa: E402
from kvstore.hashing import hash_blocks  # noqa: E402

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


class TestSharedPrefix:
    """Of 40 tokens, in requests of 48, with a hash for each 16."""

    TOKENS = range(48)
    IDENTIFIER = hash_blocks(range(40), 40)[0].hex()
    PREFIX = SharedPrefix(identifier=IDENTIFIER, num_tokens=40)

    @pytest.fixture
    def hashes(self) -> RequestHashes:
        return RequestHashes(16, {"assistant": self.PREFIX})

    def names(self, hashes: RequestHashes, salt: str, **fields: Any) -> list[bytes]:
        request = Request(all_token_ids=self.TOKENS, cache_salt=salt, **fields)
        chain = hashes.chain(request, hashes.shared_prefix(request, "assistant"))
        assert chain is not None
        return list(chain.hashes)

    def test_salts_part_behind_it(self, hashes: RequestHashes) -> None:
        mine, yours = self.names(hashes, "mine"), self.names(hashes, "yours")
        assert mine[:2] == yours[:2]
        assert mine[2] != yours[2]
        alone = hashes.chain(Request(all_token_ids=self.TOKENS, cache_salt="mine"))
        assert alone is not None
        assert not set(alone.hashes) & set(mine)

    @pytest.mark.parametrize("wrong", [0, 20, 39])
    def test_of_a_prompt_that_differs_in_a_token_nothing_is_shared(
        self, hashes: RequestHashes, wrong: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        tokens = list(self.TOKENS)
        tokens[wrong] += 1
        for name in ("a", "b"):
            assert hashes.shared_prefix(Request(name, tokens), "assistant") is None
        [line] = caplog.messages
        assert (
            line == "the prompt of request a does not begin with the shared prefix 'assistant': nothing of it is shared"
        )

    @pytest.mark.parametrize(
        "fields",
        [
            {"all_token_ids": range(39)},
            {"num_generated": 9},
            {"prompt_embeds": object()},
            {"mm_features": [Feature(HASH, Place(39, 4))]},
            {"all_token_ids": [*range(39), -1]},
        ],
        ids=["too short", "generated", "embeddings", "a picture across its end", "another last token"],
    )
    def test_what_is_not_the_prefix_alone_is_not_shared(self, hashes: RequestHashes, fields: dict[str, Any]) -> None:
        assert hashes.shared_prefix(Request(**({"all_token_ids": self.TOKENS} | fields)), "assistant") is None

    def test_a_picture_behind_it_is_the_requests_own(self, hashes: RequestHashes) -> None:
        picture = Feature(HASH, Place(40, 4))
        assert self.names(hashes, "mine", mm_features=[picture])[:2] == self.names(hashes, "yours")[:2]

    def test_after_a_reset_it_is_this_engines_own(self, hashes: RequestHashes) -> None:
        before = self.names(hashes, "mine")
        hashes.reset()
        mine, yours = self.names(hashes, "mine"), self.names(hashes, "yours")
        assert not set(mine) & set(before)
        assert mine[:2] == yours[:2]
        assert mine[2] != yours[2]
