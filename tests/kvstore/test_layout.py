"""What makes page bytes interchangeable."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequestError
from kvstore.layout import MAX_NAME_BYTES, Layout

PLAIN = Layout(model="m", block_size=16, page_bytes=4096)
OTHER = {
    "model": "n",
    "block_size": 32,
    "page_bytes": 8192,
    "revision": "r1",
    "dtype": "bfloat16",
    "layers": 2,
    "kv_heads": 2,
    "head_size": 64,
    "format": "hnd",
    "group": 1,
    "tp_size": 2,
    "pp_size": 2,
    "tenant": "t",
    "codec": "int8",
}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def test_the_fingerprint_is_written_in_files() -> None:
    """Another one would lose every page that is stored."""
    assert PLAIN.fingerprint.hex() == "d67461817f908b603de19e4411ff55bb6d504f6925f9e8f12f025ad45063d10e"


@pytest.mark.parametrize("field", OTHER)
def test_every_field_is_in_the_fingerprint(field: str) -> None:
    other = dataclasses.replace(PLAIN, **{field: OTHER[field]})
    assert other.fingerprint != PLAIN.fingerprint
    assert (other.identity == PLAIN.identity) == (field == "page_bytes")
    assert (other.name == PLAIN.name) == (field == "page_bytes")


def test_ranks_have_pages_of_their_own() -> None:
    ranks = [
        dataclasses.replace(PLAIN, tp_size=2, tp_rank=rank, pp_size=2, pp_rank=p) for rank in (0, 1) for p in (0, 1)
    ]
    assert len({layout.fingerprint for layout in ranks}) == len({layout.name for layout in ranks}) == 4


def test_the_name_is_for_people() -> None:
    assert PLAIN.name == "m · block 16 · group 0"
    full = Layout(**(OTHER | {"tp_rank": 1}))
    assert full.name == "n@r1 · block 32 · bfloat16 · 2x2x64 · hnd · group 1 · tp 1/2 · pp 0/2 · tenant t · codec int8"


def test_every_field_has_another_value_above() -> None:
    assert {field.name for field in dataclasses.fields(Layout)} == OTHER.keys() | {"tp_rank", "pp_rank"}


@given(model=texts.filter(bool), revision=texts, tenant=texts, page_bytes=st.integers(1, (1 << 31) - 1))
def test_json_there_and_back(model: str, revision: str, tenant: str, page_bytes: int) -> None:
    layout = Layout(model=model, block_size=1, page_bytes=page_bytes, revision=revision, tenant=tenant)
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.fingerprint == layout.fingerprint


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model", "", "model must not be empty"),
        ("model", 7, "model must be a string, got 7"),
        ("model", "é" * 513, f"model has 1026 bytes, the limit is {MAX_NAME_BYTES}"),
        ("tenant", "\ud800", "tenant can't be encoded"),
        ("block_size", 0, "block_size must lie between 1 and 2147483647, got 0"),
        ("block_size", True, "block_size must be an integer, got True"),
        ("page_bytes", 0, "page_bytes must lie between 1 and 2147483647, got 0"),
        ("page_bytes", 1 << 31, "page_bytes must lie between 1 and 2147483647, got 2147483648"),
        ("page_bytes", 4096.0, "page_bytes must be an integer, got 4096.0"),
        ("layers", -1, "layers must lie between 0 and 2147483647, got -1"),
        ("tp_size", 0, "tp_size must lie between 1"),
        ("tp_rank", 1, "rank must be below its size: tp 1 of 1"),
        ("pp_rank", 3, "pp 3 of 1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_limit(field: str, value: object, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        Layout(**({"model": "m", "block_size": 16, "page_bytes": 4096} | {field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"model": "m", "block_size": 16}', "field 'page_bytes' is missing"),
        ('{"model": "m", "block_size": 16, "page_bytes": 1, "blocksize": 1}', "unknown field 'blocksize'; known: "),
        ('{"model": "m", "block_size": "16", "page_bytes": 1}', "block_size must be an integer, got '16'"),
        (json.dumps({"model": "\ud800", "block_size": 1, "page_bytes": 1}), "can't be encoded"),
    ],
)
def test_json_that_is_no_layout_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        Layout.from_json(text)
