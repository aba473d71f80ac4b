"""What besides tokens a block depends on: each kind of key, their order, and where each of them counts."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connector.blocks import BlockHashChain, MultimodalInput, PrefixKeys, SharedPrefix
from kvstore.errors import InvalidRequestError


def image(identifier: str, offset: int, length: int) -> MultimodalInput:
    return MultimodalInput(identifier=identifier, offset=offset, length=length)


class TestKinds:
    def test_no_keys(self):
        keys = PrefixKeys()
        assert keys.of_block(0, 4) == ()
        assert keys.event_keys(0, 4) is None
        assert keys.is_uniform

    def test_an_adapter_counts_in_each_block_with_its_path(self):
        keys = PrefixKeys(lora_name="sql", lora_path="/adapters/sql")
        assert keys.of_block(0, 4) == keys.of_block(400, 404) == (("lora", "sql", "/adapters/sql"),)
        assert keys.event_keys(4, 8) == ("sql",)
        assert keys.is_uniform

    def test_a_salt_counts_in_the_first_block(self):
        keys = PrefixKeys(cache_salt="tenant-a")
        assert keys.of_block(0, 4) == (("salt", "tenant-a"),)
        assert keys.of_block(4, 8) == ()
        assert keys.event_keys(0, 4) == ("tenant-a",)
        assert keys.event_keys(4, 8) is None
        assert keys.is_uniform

    @pytest.mark.parametrize(("num_tokens", "salted"), [(3, 0), (4, 4), (7, 4), (8, 8), (11, 8)])
    def test_a_salt_counts_in_the_first_block_that_does_not_lie_in_a_shared_prefix(self, num_tokens, salted):
        keys = PrefixKeys(cache_salt="a", shared_prefix=SharedPrefix(identifier="p", num_tokens=num_tokens))
        expected = dict.fromkeys(range(0, 16, 4), ())
        if salted:
            expected[0] = (("shared", "p"),)
        expected[salted] = (("salt", "a"),)
        assert {start: keys.of_block(start, start + 4) for start in expected} == expected
        assert keys.event_keys(0, 4) == (("p",) if salted else ("a",))
        assert not keys.is_uniform

    def test_an_image_counts_in_each_block_that_it_touches_with_its_distance_from_the_blocks_start(self):
        keys = PrefixKeys(multimodal=(image("cat", 6, 7),))
        of_blocks = [keys.of_block(start, start + 4) for start in range(0, 20, 4)]
        assert of_blocks == [(), (("mm", "cat", 2),), (("mm", "cat", -2),), (("mm", "cat", -6),), ()]
        assert keys.event_keys(8, 12) == (("cat", -2),)
        assert not keys.is_uniform

    def test_an_image_that_fills_its_blocks_leaves_the_neighbours_alone(self):
        keys = PrefixKeys(multimodal=(image("cat", 4, 4),))
        assert [keys.of_block(start, start + 4) for start in (0, 4, 8)] == [(), (("mm", "cat", 0),), ()]

    def test_several_images_in_one_block(self):
        keys = PrefixKeys(multimodal=(image("a", 1, 1), image("b", 2, 1), image("a", 3, 9)))
        assert keys.of_block(0, 4) == (("mm", "a", 1), ("mm", "b", 2), ("mm", "a", 3))
        assert keys.of_block(4, 8) == (("mm", "a", -1),)

    def test_the_sound_of_a_video_lies_within_it(self):
        keys = PrefixKeys(multimodal=(image("video", 0, 16), image("sound", 2, 3), image("sound", 9, 2)))
        assert [keys.event_keys(start, start + 4) for start in (0, 4, 8, 12)] == [
            (("video", 0), ("sound", 2)),
            (("video", -4), ("sound", -2)),
            (("video", -8), ("sound", 1)),
            (("video", -12),),
        ]

    def test_embeddings_count_with_a_digest_of_the_blocks_own(self):
        embeds = np.arange(12, dtype=np.float32).reshape(6, 2)
        keys = PrefixKeys(prompt_embeds=embeds)
        digests = [hashlib.sha256(embeds[at : at + 4].tobytes()).digest() for at in (0, 4, 8)]
        assert [keys.of_block(at, at + 4) for at in (0, 4, 8)] == [(("embeds", digest),) for digest in digests]
        assert keys.event_keys(4, 8) == (digests[1],)
        assert digests[2] == hashlib.sha256().digest(), "tokens behind the embeddings"
        assert not keys.is_uniform

    def test_embeddings_count_as_they_read_not_as_they_lie(self):
        embeds = np.arange(12, dtype=np.float32).reshape(6, 2)
        columns_first = PrefixKeys(prompt_embeds=np.asfortranarray(embeds))
        assert columns_first.of_block(0, 4) == PrefixKeys(prompt_embeds=embeds).of_block(0, 4)

    def test_the_order_of_all_kinds(self):
        embeds = np.ones((8, 2), np.float16)
        keys = PrefixKeys(
            lora_name="sql",
            lora_path="/sql",
            multimodal=(image("cat", 1, 2), image("dog", 3, 2)),
            cache_salt="tenant-a",
            prompt_embeds=embeds,
        )
        digest = hashlib.sha256(embeds[:4].tobytes()).digest()
        lora = ("lora", "sql", "/sql")
        assert keys.of_block(0, 4) == (
            lora,
            ("mm", "cat", 1),
            ("mm", "dog", 3),
            ("salt", "tenant-a"),
            ("embeds", digest),
        )
        assert keys.event_keys(0, 4) == ("sql", ("cat", 1), ("dog", 3), "tenant-a", digest)
        assert keys.of_block(4, 8) == (lora, ("mm", "dog", -1), ("embeds", digest))


inputs = st.lists(
    st.builds(MultimodalInput, identifier=st.sampled_from("abc"), offset=st.integers(0, 30), length=st.integers(1, 12)),
    max_size=6,
).map(lambda items: tuple(sorted(items, key=lambda item: item.offset)))


@given(inputs, st.integers(1, 9), st.integers(0, 8))
def test_a_block_has_each_input_with_a_token_in_it(items, block_size, first):
    keys = PrefixKeys(multimodal=items)
    blocks = keys.from_block(first * block_size, block_size)
    for start in range(first * block_size, 48, block_size):
        tokens = set(range(start, start + block_size))
        expected = tuple(
            ("mm", item.identifier, item.offset - start)
            for item in items
            if tokens & set(range(item.offset, item.offset + item.length))
        )
        assert next(blocks) == keys.of_block(start, start + block_size) == expected


@pytest.mark.parametrize("piece", [4, 2000], ids=["block by block", "all at once"])
def test_many_inputs_are_not_looked_at_for_each_block(piece):
    reads = 0

    class Counting(list):
        def __getitem__(self, index):
            nonlocal reads
            reads += 1
            return super().__getitem__(index)

    many = 500
    keys = PrefixKeys(multimodal=tuple(image(f"{i}", 4 * i, 3) for i in range(many)))
    vars(keys)["_reach"] = Counting(keys._reach)
    chain = BlockHashChain(4, keys)
    for _ in range(0, 4 * many, piece):
        chain.extend([1] * piece)
    assert many <= reads <= 20 * many


def test_embeddings_are_hashed_once_for_hashes_and_events(monkeypatch):
    digests = []
    sha256 = hashlib.sha256

    def counting(data=b""):
        digests.append(data)
        return sha256(data)

    keys = PrefixKeys(prompt_embeds=np.ones((8, 2)))
    monkeypatch.setattr("kvstore.connector.blocks.extra_keys.hashlib.sha256", counting)
    assert keys.of_block(0, 4)[0][1] == keys.event_keys(0, 4)[0]
    assert len(digests) == 1


class TestEquality:
    def test_keys_are_compared_by_value(self):
        def make() -> PrefixKeys:
            return PrefixKeys(lora_name="a", multimodal=(image("cat", 0, 2),), prompt_embeds=np.ones((3, 2)))

        assert make() == make()
        assert hash(make()) == hash(make())

    @pytest.mark.parametrize(
        "other",
        [
            PrefixKeys(lora_name="b"),
            PrefixKeys(lora_name="a", lora_path="/a"),
            PrefixKeys(lora_name="a", cache_salt="s"),
            PrefixKeys(lora_name="a", shared_prefix=SharedPrefix(identifier="p", num_tokens=1)),
            PrefixKeys(lora_name="a", multimodal=(image("cat", 0, 2),)),
            PrefixKeys(lora_name="a", prompt_embeds=np.ones((3, 2))),
            "a",
        ],
    )
    def test_any_other_value_differs(self, other):
        assert PrefixKeys(lora_name="a") != other

    @pytest.mark.parametrize(
        "embeds", [np.zeros((3, 2)), np.ones((2, 2)), np.ones((3, 2), np.float32), -np.zeros((3, 2)), None]
    )
    def test_other_embeddings_differ(self, embeds):
        same = np.zeros((3, 2))
        is_same = embeds is not None and embeds.tobytes() == same.tobytes()
        assert (PrefixKeys(prompt_embeds=same) == PrefixKeys(prompt_embeds=embeds)) == is_same


class TestRefused:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"identifier": ""}, "identifier .* got ''"),
            ({"identifier": 7}, "identifier must be a str, got 7"),
            ({"identifier": "\ud800"}, "identifier .* can't be encoded"),
            ({"offset": -1}, "offset must be .* at least 0, got -1"),
            ({"offset": 1.5}, "offset must be an integer .* got 1.5"),
            ({"length": 0}, "length must be .* at least 1, got 0"),
            ({"length": True}, "length must be an integer .* got True"),
        ],
    )
    def test_inputs(self, values, message):
        with pytest.raises(InvalidRequestError, match=message):
            MultimodalInput(**({"identifier": "cat", "offset": 0, "length": 1} | values))

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"lora_name": None}, "lora_name must be a str, got None"),
            ({"lora_path": "/a"}, "lora_path needs a lora_name, got '/a'"),
            ({"lora_name": "a", "lora_path": b"/a"}, "lora_path must be a str, got b'/a'"),
            ({"cache_salt": 5}, "cache_salt must be a str, got 5"),
            ({"cache_salt": "\ud800"}, "cache_salt .* can't be encoded"),
            ({"multimodal": [image("cat", 0, 1)]}, "multimodal must be a tuple"),
            ({"multimodal": ("cat",)}, "MultimodalInput, got 'cat'"),
            ({"multimodal": (image("cat", 5, 1), image("dog", 4, 1))}, "order of offsets, got 5 before 4"),
            ({"prompt_embeds": [[1.0]]}, "array of NumPy, got list"),
            ({"prompt_embeds": np.ones(3)}, r"\(tokens, hidden size\), got float64 of \(3,\)"),
            ({"prompt_embeds": np.array([[None]])}, "got object"),
        ],
    )
    def test_keys(self, values, message):
        with pytest.raises(InvalidRequestError, match=message):
            PrefixKeys(**values)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"identifier": "", "num_tokens": 1}, "at least 1 character"),
            ({"identifier": b"p", "num_tokens": 1}, "identifier must be a str, got b'p'"),
            ({"identifier": "p", "num_tokens": 0}, "num_tokens must be an integer of at least 1, got 0"),
            ({"identifier": "p", "num_tokens": True}, "got True"),
        ],
    )
    def test_a_shared_prefix(self, values, message):
        with pytest.raises(InvalidRequestError, match=message):
            SharedPrefix(**values)
