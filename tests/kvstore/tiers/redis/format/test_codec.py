import random
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from faulty_proxy import Proxy
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pages import make_page, read_pages
from redis_recount import Recount
from redis_servers import RedisServer

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.format.codec import (
    FIRST_SAMPLES,
    MOST_NAMESPACES,
    SAMPLE_EVERY,
    CodecChoice,
    compress,
    decompress,
)
from kvstore.tiers.tier import PageBytes, PageWrite

NAMESPACE = bytes(32)


def kv_page(number: int, length: int) -> PageWrite:
    """Normal numbers as 16-bit floats (bf16), as KV pages have them."""
    values = np.random.default_rng(number).standard_normal(length // 2, dtype=np.float32)
    payload: PageBytes = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return PageWrite(number.to_bytes(64, "big"), xxhash.xxh3_64_intdigest(payload.data), payload)


def test_kv_pages_become_a_quarter_shorter() -> None:
    for number, length in enumerate([4096, 200_000, 1 << 20]):
        page = kv_page(number, length).payload
        packed = compress(page)
        assert packed is not None
        assert len(packed) < 0.82 * length
        into = np.empty_like(page)
        assert decompress(np.frombuffer(packed, np.uint8), into)
        assert np.array_equal(into, page)


@given(st.binary(max_size=300), st.integers(1, 40))
def test_what_is_packed_is_unpacked(data: bytes, times: int) -> None:
    page = np.frombuffer(data * times, np.uint8)
    packed = compress(page)
    if packed is not None:
        assert len(packed) < len(page)
        into = np.empty_like(page)
        assert decompress(np.frombuffer(packed, np.uint8), into)
        assert np.array_equal(into, page)


def test_noise_is_not_packed() -> None:
    assert compress(make_page(1, 4096).payload) is None
    assert compress(np.empty(0, np.uint8)) is None


@settings(max_examples=200)
@given(st.integers(0, 1 << 30), st.sampled_from(["flip", "cut", "longer", "noise"]))
def test_damage_is_noticed_or_left_to_the_checksum(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    page = kv_page(1, 4096).payload
    packed = bytearray(compress(page) or b"")
    match kind:
        case "flip":
            packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
        case "cut":
            del packed[rng.randrange(len(packed)) :]
        case "longer":
            packed += rng.randbytes(rng.randint(1, 50))
        case "noise":
            packed = bytearray(rng.randbytes(len(packed)))
    into = np.empty_like(page)
    whole = decompress(np.frombuffer(packed, np.uint8), into)
    assert not whole or kind in ("flip", "noise")
    assert not (whole and np.array_equal(into, page)) or kind == "flip"


def choice_with(kept: float, codec_seconds: float, wire_seconds: float) -> CodecChoice:
    choice = CodecChoice()
    choice.sent(1000, 1000 * wire_seconds)
    for _ in range(FIRST_SAMPLES):
        assert choice.wants_sample(NAMESPACE)
        assert not choice.pays(NAMESPACE)
        choice.sampled(NAMESPACE, 1000, int(1000 * kept), 1000 * codec_seconds)
    assert not choice.wants_sample(NAMESPACE)
    return choice


def test_it_pays_on_a_slow_network_only() -> None:
    assert choice_with(0.75, codec_seconds=2e-9, wire_seconds=10e-9).pays(NAMESPACE)
    assert not choice_with(0.75, codec_seconds=2e-9, wire_seconds=1e-9).pays(NAMESPACE)
    assert not choice_with(1.0, codec_seconds=0.0, wire_seconds=1.0).pays(NAMESPACE)
    assert not CodecChoice().pays(NAMESPACE)


def test_it_changes_its_mind() -> None:
    choice = choice_with(0.75, codec_seconds=2e-9, wire_seconds=10e-9)
    for _ in range(30):
        choice.sent(1000, 1000 * 1e-9)
    assert not choice.pays(NAMESPACE)
    assert sum(choice.wants_sample(NAMESPACE) for _ in range(10 * SAMPLE_EVERY)) == 10


def test_namespaces_are_judged_by_themselves_and_are_bounded() -> None:
    choice = choice_with(0.75, codec_seconds=2e-9, wire_seconds=10e-9)
    assert not choice.pays(b"other")
    for number in range(MOST_NAMESPACES):
        choice.wants_sample(b"%d" % number)
    assert not choice.pays(NAMESPACE), "forgotten"


def test_over_a_slow_way_pages_are_stored_packed(
    server: RedisServer,
    open_redis: Callable[..., RedisTier],
    start_proxy: Callable[[int], Proxy],
    recount: Callable[..., Recount],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = CodecChoice.sampled

    def sampled(choice: CodecChoice, namespace: bytes, size: int, compressed: int, seconds: float) -> None:
        """However busy this machine is, its processor is not what is slow here."""
        real(choice, namespace, size, compressed, min(seconds, 5e-9 * size))

    monkeypatch.setattr(CodecChoice, "sampled", sampled)
    proxy = start_proxy(server.port)
    slow, fast = open_redis(proxy.url), open_redis(server.url)
    proxy.delay = 0.003  # for each 64 KiB
    pages = [kv_page(n, 200_000) for n in range(120)]
    for at in range(0, 120, 10):
        assert all(slow.write(pages[at : at + 10]))
    proxy.heal()
    values = list(server.client.scan_iter(match="kvstore:{*}:chunk:*"))
    assert sum(map(server.client.strlen, values)) < 0.88 * 120 * 200_000
    recount(server, budget=64 << 20).check_entries()
    for tier in (slow, fast):
        assert all(read_pages(tier, pages))
        assert all(read_pages(tier, pages[7:33:3]))
    [name, *_] = sorted(server.client.scan_iter(match="kvstore:{*}:chunk:*:0"), key=server.client.strlen)
    value = bytearray(server.client.get(name))
    for at in (len(value) - 1, len(value) // 2, len(value) // 3):
        value[at] ^= 0xFF
    server.client.set(name, bytes(value))
    found = read_pages(fast, pages)
    assert 0 < found.count(False) == fast.statistics().corrupt <= 3


@pytest.mark.parametrize("length", [1, 15, 17, 4095])
def test_odd_lengths_stay_as_they_are(length: int) -> None:
    assert compress(np.zeros(length, np.uint8)) is None
    assert not decompress(np.zeros(100, np.uint8), np.zeros(length, np.uint8))
