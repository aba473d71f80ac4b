"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.units import format_size, parse_duration, parse_named, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("7B", 7),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        (" 64 GiB ", 64 << 30),
        ("2tib", 2 << 40),
        ("1.5GiB", 3 << 29),
        ("3kB", 3000),
        ("3MB", 3_000_000),
        ("3GB", 3 * 10**9),
        ("3TB", 3 * 10**12),
        ("0.1KiB", 102),
        ("123456789123456789", 123456789123456789),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", -1, "1e9", "1,5GiB", "12XB", "1 2", "0x10", "1.", ".5", "inf", True])
def test_what_is_no_size_is_refused_with_its_text(text: str | int) -> None:
    with pytest.raises(ConfigError, match="not a size: ") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536 << 20, "1.5 GiB"), (3 << 40, "3 TiB"), (5 << 50, "5120 TiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 1 << 52))
def test_what_is_written_can_be_read_again(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=1e-3)


def test_an_error_says_whose_value_it_is() -> None:
    assert parse_named("--for", parse_duration, "2m") == 120.0
    with pytest.raises(ConfigError, match=r"^--for: not a time: 'soon'; write it as 90s"):
        parse_named("--for", parse_duration, "soon")
