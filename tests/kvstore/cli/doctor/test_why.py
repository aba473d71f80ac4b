"""Why a prompt missed: the first block that is not there, and the field of its key that differs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.cli.doctor.why import Known, Why, compare, why_missed
from kvstore.cli.prompts import Prompt, read_prompt
from kvstore.errors import InvalidRequestError
from kvstore.hashing import hash_blocks
from kvstore.layout import Layout

LAYOUT = Layout(model="llama", dtype="bfloat16", block_size=4, page_bytes=4096)
TOKENS = tuple(range(100, 140))


class Node:
    """What a node would say: which pages it has, and which it knows to have left."""

    def __init__(self, *layouts: Layout) -> None:
        self.known = [Known(layout, layout.fingerprint) for layout in layouts]
        self.pages: set[tuple[bytes, bytes]] = set()
        self.left: set[tuple[bytes, bytes]] = set()

    def has(self, layout: Layout, hashes: Sequence[bytes]) -> None:
        self.pages |= {(layout.fingerprint, each) for each in hashes}

    def ask(self, fingerprint: bytes, hashes: Sequence[bytes]) -> list[tuple[str | None, bool]]:
        return [("arena" if (fingerprint, h) in self.pages else None, (fingerprint, h) in self.left) for h in hashes]

    def why(self, prompt: Prompt, layout: Layout | None = LAYOUT) -> Why:
        namespace = next((each for each in self.known if each.layout == layout), None)
        return why_missed(prompt, namespace, self.known, self.ask)


def other(**changed: object) -> Layout:
    return dataclasses.replace(LAYOUT, **changed)


def test_all_of_it_is_there() -> None:
    node = Node(LAYOUT)
    node.has(LAYOUT, hash_blocks(TOKENS, 4))
    why = node.why(Prompt(tokens=TOKENS))
    assert (why.asked, why.present, why.block, why.tiers) == (10, 10, None, {"arena": 10})


def test_a_prompt_without_a_full_block() -> None:
    assert "no full block of 4 tokens" in Node(LAYOUT).why(Prompt(tokens=(1, 2, 3))).reason


@pytest.mark.parametrize(
    ("changed", "asked", "stored"),
    [({"dtype": "float16"}, "bfloat16", "float16"), ({"tp_size": 2}, "1", "2"), ({"tenant": "b"}, "''", "'b'")],
)
def test_another_namespace_has_it(changed: dict, asked: str, stored: str) -> None:
    there = other(**changed)
    far = other(model="gpt", dtype="int8", revision="3")
    node = Node(LAYOUT, far, there)
    for layout in (far, there):
        node.has(layout, hash_blocks(TOKENS, 4))
    why = node.why(Prompt(tokens=TOKENS))
    assert (why.block, why.key_field) == (0, next(iter(changed)))
    assert asked in why.advice
    assert stored in why.advice


def test_it_left_to_make_room() -> None:
    node = Node(LAYOUT)
    hashes = hash_blocks(TOKENS, 4)
    node.has(LAYOUT, [*hashes[:3], *hashes[5:]])
    node.left = {(LAYOUT.fingerprint, hashes[3])}
    why = node.why(Prompt(tokens=TOKENS))
    assert (why.present, why.block, why.key_field) == (3, 3, "")
    assert "left to make room; 5 blocks behind it are there" in why.reason


def test_what_left_is_told_though_another_namespace_has_it() -> None:
    """Whatever differs there: this namespace had the page, so no engine's settings are wrong."""
    for there in (other(model="gpt"), other(dtype="float16")):
        node = Node(LAYOUT, there)
        hashes = hash_blocks(TOKENS, 4)
        node.has(there, hashes)
        node.has(LAYOUT, hashes[:2])
        node.left = {(LAYOUT.fingerprint, hashes[2])}
        why = node.why(Prompt(tokens=TOKENS))
        assert (why.present, why.block, why.key_field) == (2, 2, "")
        assert "left to make room" in why.reason
        assert "agree" not in why.advice
        for way in ("arena", "quota", "kvstore pin"):
            assert way in why.advice


def test_models_of_one_architecture_are_told_apart_by_what_they_are_called() -> None:
    """Their layouts differ in the fingerprint of their weights and settings alone."""
    kind = Layout(model="LlamaForCausalLM", revision="r1", block_size=4, page_bytes=4096)
    tuned, requantized = (dataclasses.replace(kind, revision=revision) for revision in ("r2", "r3"))
    narrow = dataclasses.replace(requantized, dtype="float16")
    node = Node()
    for layout, labels in ((kind, ("chat", "copy")), (tuned, ("tuned",)), (narrow, ("x", "copy"))):
        node.known.append(Known(layout, layout.fingerprint, layout.named(labels[0]), labels))
    for layout in (tuned, narrow):
        node.has(layout, hash_blocks(TOKENS, 4))
    why = node.why(Prompt(tokens=TOKENS), kind)
    assert why.key_field == "revision"
    assert why.reason.startswith("another namespace has it: 'x@r3 · block 4 · float16 · group 0', which differs in")
    node.known.pop()
    why = node.why(Prompt(tokens=TOKENS), kind)
    assert why.key_field == ""
    assert "the model 'tuned' has pages of the same tokens, which are of no use to another model" in why.reason


def test_another_model_has_pages_of_no_use() -> None:
    there = other(model="gpt")
    node = Node(LAYOUT, there)
    node.has(there, hash_blocks(TOKENS, 4))
    why = node.why(Prompt(tokens=TOKENS))
    assert why.key_field == ""
    assert "never stored, cleared, or gone too long ago" in why.reason
    assert "the model 'gpt' has pages of the same tokens, which are of no use to another model" in why.reason
    assert "agree" not in why.advice
    node.has(LAYOUT, hash_blocks(TOKENS, 4)[:3])
    why = node.why(Prompt(tokens=TOKENS))
    assert (why.block, why.key_field) == (3, "tokens")


def test_other_tokens() -> None:
    node = Node(LAYOUT)
    node.has(LAYOUT, hash_blocks(TOKENS, 4))
    why = node.why(Prompt(tokens=(*TOKENS[:9], 7, *TOKENS[10:])))
    assert (why.present, why.block, why.key_field) == (2, 2, "tokens")
    assert "from token 8 on (to 11)" in why.reason
    assert "never stored, cleared" in node.why(Prompt(tokens=(7, *TOKENS[1:]))).reason


def test_another_block_size() -> None:
    larger = other(block_size=8)
    node = Node(LAYOUT, larger)
    node.has(larger, hash_blocks(TOKENS, 8))
    why = node.why(Prompt(tokens=TOKENS))
    assert (why.block, why.key_field) == (0, "block_size")
    assert "5 of its blocks are there in blocks of 8 tokens" in why.reason


def test_extra_keys() -> None:
    node = Node(LAYOUT)
    node.has(LAYOUT, hash_blocks(TOKENS, 4))
    why = node.why(Prompt(tokens=TOKENS, extra_keys=("salt",)))
    assert (why.block, why.key_field) == (0, "extra_keys")
    assert "['salt'] are asked for" in why.reason


def test_a_namespace_that_the_node_does_not_know() -> None:
    node = Node(other(model="gpt", dtype="int8"), other(revision="1"))
    why = node.why(Prompt(layout=LAYOUT, tokens=TOKENS))
    assert (why.asked, why.present, why.block, why.key_field) == (10, 0, 0, "revision")
    assert "revision ('' asked, '1' there)" in why.reason
    # The one that has the prompt is nearer than the one with fewer differences.
    node.has(node.known[0].layout, hash_blocks(TOKENS, 4))
    assert node.why(Prompt(layout=LAYOUT, tokens=TOKENS)).key_field == "model"
    assert "no namespace at all" in Node().why(Prompt(layout=LAYOUT, tokens=TOKENS)).reason


class TestTwoPrompts:
    def test_the_first_token_that_differs(self) -> None:
        a = Prompt(LAYOUT, tokens=TOKENS)
        why = compare(a, Prompt(LAYOUT, tokens=(*TOKENS[:21], 7, *TOKENS[22:])))
        assert (why.present, why.block, why.key_field) == (5, 5, "tokens")
        assert why.reason == "token 21 differs: 121 is asked for, 7 was stored"

    def test_extra_keys_of_one_block(self) -> None:
        keys = ((), (), (), (("mm", "picture"),))
        why = compare(Prompt(LAYOUT, tokens=TOKENS, extra_keys=keys), Prompt(LAYOUT, tokens=TOKENS))
        assert (why.block, why.key_field) == (3, "extra_keys")
        assert "[('mm', 'picture')] is asked for, [] was stored" in why.reason

    def test_layouts(self) -> None:
        why = compare(Prompt(LAYOUT, tokens=TOKENS), Prompt(other(dtype="int8"), tokens=TOKENS))
        assert (why.block, why.key_field) == (0, "dtype")

    def test_hashes_alone(self) -> None:
        hashes = tuple(hash_blocks(TOKENS, 4))
        changed = (*hashes[:4], bytes(32), *hashes[5:])
        why = compare(Prompt(given_hashes=hashes), Prompt(given_hashes=changed))
        assert (why.block, why.key_field) == (4, "tokens or extra_keys")
        assert compare(Prompt(given_hashes=hashes), Prompt(given_hashes=hashes)).block is None

    def test_one_that_is_longer(self) -> None:
        why = compare(Prompt(LAYOUT, tokens=TOKENS), Prompt(LAYOUT, tokens=TOKENS[:20]))
        assert (why.present, why.block) == (5, 5)
        assert "the stored prompt ends there" in why.reason


class TestFiles:
    def read(self, tmp_path: Path, value: object, *keys: str) -> Prompt:
        path = tmp_path / "prompt.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return read_prompt(path, keys)

    def test_forms(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, [1, 2]).tokens == (1, 2)
        assert self.read(tmp_path, {"count": 2, "max_model_len": 8, "tokens": [1, 2]}).tokens == (1, 2)
        full = {"layout": json.loads(LAYOUT.to_json()), "hashes": ["00" * 32], "namespace": "a"}
        assert self.read(tmp_path, full) == Prompt(LAYOUT, "a", None, (bytes(32),))
        keys = self.read(tmp_path, {"tokens": [], "extra_keys": [[["lora", "a"], 1], []]}).extra_keys
        assert keys == ([("lora", "a"), 1], [])
        assert self.read(tmp_path, [1], "salt").extra_keys == ("salt",)

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("no", "is not JSON"),
            ({"a": 1}, "is not a JSON array of token ids"),
            ({"tokens": [True]}, "tokens must be an array of whole numbers"),
            ({"hashes": ["00"]}, "64 hexadecimal digits"),
            ({"tokens": [], "layout": {"model": "a"}}, "layout: field 'block_size' is missing"),
            ({"tokens": [], "extra_keys": 1}, "extra_keys must be an array"),
        ],
    )
    def test_what_cannot_be_read(self, tmp_path: Path, value: object, words: str) -> None:
        with pytest.raises(InvalidRequestError, match=words):
            self.read(tmp_path, value)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match="none can't be read: No such file"):
            read_prompt(tmp_path / "none")
