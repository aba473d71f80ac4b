import random
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from faulty_proxy import Proxy
from made_pages import make_page, read_pages
from redis_recount import Recount
from redis_servers import Cluster, RedisServer, hurry, servers_of, set_timeout

from kvstore.breaker import State
from kvstore.errors import ResourceError
from kvstore.status import TierState
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.format.chunk import decode_header
from kvstore.tiers.tier import PageWrite

MIB = 1 << 20
LIMIT = 64 * MIB
PAGES = [make_page(n, 50_000) for n in range(20)]
MORE = [make_page(n, 50_000) for n in range(100, 120)]
Open = Callable[..., RedisTier]
PATIENT = 20.0


def nothing(tier: RedisTier, pages: list[PageWrite]) -> None:
    """Every call answers with misses and refusals, and counts them."""
    before = tier.statistics()
    keys = [page.key for page in pages]
    assert tier.contains(keys) == [False] * len(pages)
    assert read_pages(tier, pages) == [False] * len(pages)
    assert tier.write(pages) == [False] * len(pages)
    with pytest.raises(ResourceError, match=f"{len(keys)} of {len(keys)} pages may still be there"):
        tier.remove(keys)
    after = tier.statistics()
    assert after.missed == before.missed + len(pages)
    assert after.refused == before.refused + len(pages)


def recovers(tier: RedisTier, pages: list[PageWrite], eventually: Callable[..., None]) -> None:
    """Without being opened again."""
    hurry(tier, PATIENT)
    eventually(lambda: all(tier.write(pages)))
    eventually(lambda: all(read_pages(tier, pages)))


# --- servers that are away


def test_a_tier_opens_and_waits_for_its_server(
    start_server: Callable[..., RedisServer], open_redis: Open, eventually: Callable[..., None]
) -> None:
    server = start_server()
    server.kill()
    tier = open_redis(server.url, LIMIT)
    nothing(tier, PAGES)
    server.start()
    recovers(tier, PAGES, eventually)


def test_a_server_that_is_killed_and_comes_back_empty(
    start_server: Callable[..., RedisServer], open_redis: Open, eventually: Callable[..., None]
) -> None:
    server = start_server()
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(PAGES))
    server.kill()
    nothing(tier, PAGES)
    server.start()
    eventually(lambda: tier.statistics().pages == 0)
    recovers(tier, PAGES, eventually)


def test_a_server_that_hangs_costs_few_deadlines_and_then_none(
    start_server: Callable[..., RedisServer], open_redis: Open, eventually: Callable[..., None]
) -> None:
    server = start_server()
    tier = open_redis(server.url, LIMIT, pause=1000.0)
    assert all(tier.write(PAGES))
    tier._refresher.close()  # it asks the server as well
    [node] = servers_of(tier)
    server.pause()
    tier._lookup_timeout = 0.1

    def left_alone() -> bool:
        assert not any(tier.contains([page.key for page in PAGES]))
        return node.breaker.state is not State.CLOSED

    eventually(left_alone)
    set_timeout(tier, 1000.0)  # who waits now waits for the test to fail
    tier._lookup_timeout = 1000.0
    nothing(tier, PAGES)
    server.resume()


def test_a_server_that_hangs_and_goes_on(
    start_server: Callable[..., RedisServer], open_redis: Open, eventually: Callable[..., None]
) -> None:
    server = start_server()
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(PAGES))
    hurry(tier, 0.2, 0.1)
    server.pause()
    nothing(tier, PAGES)
    server.resume()
    hurry(tier, PATIENT)
    eventually(lambda: all(read_pages(tier, PAGES)))


def test_a_full_server_refuses_writes_and_still_answers(
    start_server: Callable[..., RedisServer],
    open_redis: Open,
    eventually: Callable[..., None],
    recount: Callable[..., Recount],
) -> None:
    server = start_server()
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(PAGES))
    server.client.config_set("maxmemory", 1 * MIB)
    for at in range(0, 20, 4):
        assert tier.write(MORE[at : at + 4]) == [False] * 4
        assert all(read_pages(tier, PAGES))
    assert tier.statistics().refused == 20
    recount(server, budget=LIMIT).check_entries()
    assert tier.remove([page.key for page in PAGES[:7]]) == 7
    recount(server, budget=LIMIT).check_entries()
    server.client.config_set("maxmemory", 0)
    recovers(tier, MORE, eventually)
    assert read_pages(tier, PAGES) == [False] * 7 + [True] * 13


def test_a_server_that_becomes_full_keeps_no_empty_places(
    start_server: Callable[..., RedisServer], open_redis: Open, recount: Callable[..., Recount]
) -> None:
    """It takes some chunks of a write, makes places for others, and then refuses their bytes."""
    server = start_server()
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(PAGES))
    server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] + 6 * MIB)
    large = [make_page(n, 1_500_000) for n in range(200, 220)]
    answers = tier.write(large)
    assert 0 < answers.count(True) < 20
    found = recount(server, budget=LIMIT)
    found.check_entries()
    assert sorted(found.chunks.values()) == [1] * answers.count(True) + [20]


def test_a_full_server_is_not_asked_to_write_again_and_again(
    start_server: Callable[..., RedisServer], open_redis: Open
) -> None:
    server = start_server()
    tier = open_redis(server.url, LIMIT, pause=1000.0)
    assert all(tier.write(PAGES))
    server.client.config_set("maxmemory", 1 * MIB)
    for _ in range(3):
        assert not any(tier.write(MORE))
    server.client.config_set("maxmemory", 0)
    before = server.client.info("stats")["total_net_input_bytes"]
    assert not any(tier.write(MORE)), "left alone for a while"
    assert all(read_pages(tier, PAGES)), "but for reads"
    assert server.client.info("stats")["total_net_input_bytes"] - before < 50_000, "no page was sent"


def test_a_full_server_whose_bucket_is_full_as_well(
    start_server: Callable[..., RedisServer], open_redis: Open, recount: Callable[..., Recount]
) -> None:
    server = start_server()
    tier = open_redis(server.url, 9 * MIB)
    assert any(tier.write([make_page(n, 300_000) for n in range(40)]))
    server.client.config_set("maxmemory", 1 * MIB)
    before = recount(server, budget=9 * MIB)
    assert not any(tier.write(MORE))
    after = recount(server, budget=9 * MIB)
    assert (after.used_bytes, after.chunks) == (before.used_bytes, before.chunks), "all or nothing"


def test_a_read_only_server_still_answers(
    start_server: Callable[..., RedisServer], open_redis: Open, eventually: Callable[..., None]
) -> None:
    server = start_server()
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(PAGES))
    server.client.replicaof("127.0.0.1", "1")
    for at in range(0, 20, 4):
        assert tier.write(MORE[at : at + 4]) == [False] * 4
    assert all(read_pages(tier, PAGES))
    server.client.replicaof("NO", "ONE")
    recovers(tier, MORE, eventually)


def test_scripts_that_somebody_flushes_are_loaded_again(
    server: RedisServer, open_redis: Open, eventually: Callable[..., None]
) -> None:
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(PAGES[:10]))
    server.client.script_flush()
    recovers(tier, PAGES, eventually)


def test_a_login_that_changes(
    start_server: Callable[..., RedisServer], open_redis: Open, eventually: Callable[..., None]
) -> None:
    server = start_server()
    server.client.config_set("requirepass", "right secret")
    good = open_redis(f"redis://:right%20secret@127.0.0.1:{server.port}", LIMIT)
    bad = open_redis(f"redis://:wrong@127.0.0.1:{server.port}", LIMIT)
    assert all(good.write(PAGES))
    nothing(bad, PAGES)
    assert all(read_pages(good, PAGES))


# --- connections that are harmed


@pytest.mark.parametrize("fault", ["drop", "refuse", "delay", "cut", "cut at once"])
def test_a_fault_on_the_way_is_a_miss_and_passes(
    server: RedisServer,
    open_redis: Open,
    start_proxy: Callable[[int], Proxy],
    eventually: Callable[..., None],
    fault: str,
) -> None:
    proxy = start_proxy(server.port)
    tier = open_redis(proxy.url, LIMIT)
    assert all(tier.write(PAGES))
    if fault in ("drop", "delay"):  # the others are noticed at once
        hurry(tier, 0.4, 0.2)
    match fault:
        case "drop":
            proxy.drop = True
            nothing(tier, PAGES)
        case "refuse":
            proxy.refuse = True
            proxy.cut_after = 1
            tier.contains([page.key for page in PAGES])
            nothing(tier, PAGES)
        case "delay":
            proxy.delay = 0.5
            nothing(tier, PAGES)
        case "cut":
            for after in (1, 5, 100, 1200, 5000, 60_000, 300_000):
                proxy.cut_after = after
                read_pages(tier, PAGES)
                proxy.heal()
                eventually(lambda: all(read_pages(tier, PAGES)))
        case "cut at once":
            proxy.cut_after = 1
            assert not any(read_pages(tier, PAGES))
    proxy.heal()
    recovers(tier, PAGES, eventually)


def test_garbled_replies_never_become_pages(
    server: RedisServer,
    open_redis: Open,
    start_proxy: Callable[[int], Proxy],
    eventually: Callable[..., None],
    recount: Callable[..., Recount],
) -> None:
    rng = random.Random(7)
    proxy = start_proxy(server.port)
    tier = open_redis(proxy.url, LIMIT, timeout=0.3, lookup_timeout=0.3, pause=0.001)
    plain = open_redis(server.url, LIMIT)

    def garble(data: bytearray) -> None:
        for _ in range(rng.randint(0, 2)):
            data[rng.randrange(min(len(data), rng.choice([4, 100, 70_000])))] ^= 1 << rng.randrange(8)

    for round_ in range(60):
        pages = [make_page(1000 + round_ * 10 + n, 30_000) for n in range(6)]
        proxy.garble = garble
        tier.contains([page.key for page in pages])
        tier.write(pages)
        read_pages(tier, pages)  # compares all bytes
        with suppress(ResourceError):  # not every answer could be read
            tier.keys(bytes(32))
        proxy.heal()
        read_pages(plain, pages)
        recount(server, budget=LIMIT)
    recovers(tier, PAGES, eventually)


@pytest.mark.parametrize(
    "greeting", [b"", b"-ERR go away\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$99999999999\r\n", b"*-7\r\n"]
)
def test_a_peer_that_is_no_redis(open_redis: Open, start_peer: Callable[[bytes], int], greeting: bytes) -> None:
    tier = open_redis(f"redis://127.0.0.1:{start_peer(greeting)}", LIMIT, timeout=0.3, lookup_timeout=0.2)
    nothing(tier, PAGES)


# --- what stands under our names and is not ours


def chunk_names(server: RedisServer) -> list[bytes]:
    return sorted(server.client.scan_iter(match="kvstore:{*}:chunk:*:0"))


def newer_version(value: bytes) -> bytes:
    return value[:4] + struct.pack(">H", 2) + value[6:]


FOREIGN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda value: b"",
    "text": lambda value: b"hello",
    "cut short": lambda value: value[: len(value) // 2],
    "one byte short": lambda value: value[:-1],
    "header only": lambda value: value[:100],
    "zeros": lambda value: bytes(len(value)),
    "newer version": newer_version,
    "other magic": lambda value: b"x" + value[1:],
    "random": lambda value: random.Random(1).randbytes(len(value)),
    "flipped in header": lambda value: value[:40] + bytes([value[40] ^ 1]) + value[41:],
    "flipped in prefix": lambda value: value[:9] + bytes([value[9] ^ 1]) + value[10:],
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_chunk_is_a_counted_miss(server: RedisServer, open_redis: Open, kind: str) -> None:
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(PAGES))
    for name in chunk_names(server):
        server.client.set(name, FOREIGN[kind](server.client.get(name)))
    found = read_pages(tier, PAGES)
    assert not any(found) or kind == "one byte short"
    counts = tier.statistics()
    assert counts.missed == found.count(False)
    assert counts.corrupt == (0 if kind == "empty" else counts.missed)
    assert tier.contains([page.key for page in PAGES]) == found
    assert all(tier.write(PAGES)), "it can be stored again"
    assert all(read_pages(tier, PAGES))


def test_any_flipped_byte_of_a_chunk_is_a_miss(server: RedisServer, open_redis: Open) -> None:
    tier = open_redis(server.url, LIMIT)
    pages = PAGES[:3]
    assert all(tier.write(pages))
    [name] = chunk_names(server)
    value = server.client.get(name)
    header = len(value) - 150_000
    rng = random.Random(3)
    for at in [*range(0, header, 7), *(rng.randrange(header, len(value)) for _ in range(30)), len(value) - 1]:
        [name] = chunk_names(server)
        value = bytearray(server.client.get(name))
        value[at] ^= 0x10
        server.client.set(name, bytes(value))
        found = read_pages(tier, pages)
        assert found == [at >= header and (at - header) // 50_000 != n for n in range(3)], f"byte {at}"
        tier.remove([page.key for page in pages])
        assert all(tier.write(pages))


def test_another_chunk_under_a_chunks_name_is_a_miss(server: RedisServer, open_redis: Open) -> None:
    tier = open_redis(server.url, LIMIT)
    first = [make_page(n, 50_000) for n in range(4)]
    second = [make_page(n, 50_000) for n in range(4, 8)]
    tier.write(first)
    [name] = chunk_names(server)
    tier.write(second)
    other = next(found for found in chunk_names(server) if found != name)
    server.client.rename(other, name)
    assert not any(read_pages(tier, first + second))
    assert tier.statistics().corrupt == 4


@pytest.mark.parametrize("kind", ["text", "list", "newer version", "older version", "of another page"])
def test_a_foreign_entry_is_a_miss_and_gives_way(server: RedisServer, open_redis: Open, kind: str) -> None:
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(PAGES))
    entries = {page.key: server.client.get(b"kvstore:page:" + page.key) for page in PAGES}
    for page in PAGES:
        name = b"kvstore:page:" + page.key
        entry = entries[page.key]
        server.client.delete(name)
        match kind:
            case "text":
                server.client.set(name, "hello")
            case "list":
                server.client.rpush(name, "hello")
            case "newer version":
                server.client.set(name, b"\x02" + entry[1:] + b"more")
            case "older version":
                server.client.set(name, b"\x00" + entry[1:])
            case "of another page":
                server.client.set(name, entries[PAGES[0 if page is not PAGES[0] else 1].key])
    assert not any(read_pages(tier, PAGES))
    answers = tier.write(PAGES)
    assert answers == read_pages(tier, PAGES)
    assert all(answers) or kind == "list", "what is no string is never replaced, and refused"


@pytest.mark.parametrize("what", ["order", "chunks", "books"])
def test_a_buckets_foreign_keys_refuse_writes(server: RedisServer, open_redis: Open, what: str) -> None:
    tier = open_redis(server.url, 16 * MIB)
    assert all(tier.write(PAGES[:10]))
    server.client.delete(f"kvstore:{{0}}:{what}")
    server.client.set(f"kvstore:{{0}}:{what}", "hello")
    assert tier.write(PAGES[10:]) == [False] * 10
    assert all(read_pages(tier, PAGES[:10]))
    tier.remove([page.key for page in PAGES])
    tier.statistics()


def test_a_foreign_number_of_buckets(server: RedisServer, open_redis: Open) -> None:
    for number in ("hello", "0", "99999999999999", "-1"):
        server.client.set("kvstore:buckets", number)
        tier = open_redis(server.url, LIMIT)
        assert all(tier.write(PAGES))
        assert all(read_pages(tier, PAGES))


def test_a_newer_format_is_left_alone_with_words(server: RedisServer, open_redis: Open, caplog) -> None:
    """A node that is downgraded, or not upgraded yet: neither a page nor a key of the newer one goes."""
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(PAGES[:10]))
    assert server.client.get("kvstore:format") == b"1"
    server.client.set("kvstore:format", "2")
    for page in PAGES[:5]:  # what this version can't read
        name = b"kvstore:page:" + page.key
        server.client.set(name, b"\x02" + server.client.get(name)[1:])
    strings = [key for key in server.client.scan_iter() if server.client.type(key) == b"string"]
    lasting = [key for key in strings if b":claim:" not in key and b":summary:" not in key]  # these end in a moment
    before = {key: server.client.dump(key) for key in lasting}
    with caplog.at_level("ERROR"):
        later = open_redis(server.url, LIMIT)
        assert later.write(PAGES) == [False] * len(PAGES)
    assert "Redis has pages of format 2; this version of kvstore reads up to 1" in caplog.text
    assert read_pages(later, PAGES[:10]) == [False] * 5 + [True] * 5, "what is as before is read as before"
    with pytest.raises(ResourceError, match="pages of format 2, which this version does not change"):
        later.remove([page.key for page in PAGES])
    assert {key: server.client.dump(key) for key in before} == before
    server.client.set("kvstore:format", "1")
    assert all(later.write(PAGES[10:])), "and when that is over it goes on by itself"


def test_namespaces_do_not_see_each_other(server: RedisServer, open_redis: Open) -> None:
    tier = open_redis(server.url, LIMIT)
    page = make_page(1, 1000)
    keys = [bytes([namespace]) * 32 + page.key[32:] for namespace in (1, 2)]
    assert tier.write([page._replace(key=keys[0])]) == [True]
    assert tier.contains(keys) == [True, False]
    assert tier.read(keys, [np.empty(1000, np.uint8) for _ in keys]) == [page.checksum, None]
    [name] = chunk_names(server)
    assert decode_header(server.client.get(name)).namespace == bytes([1]) * 32


# --- other ways to reach it


def test_tls(start_server: Callable[..., RedisServer], open_redis: Open, short_folder: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: sudo apt-get install openssl")
    key, certificate = short_folder / "key.pem", short_folder / "cert.pem"
    subprocess.run(
        [
            *["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"],
            *["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        ],
        check=True,
        capture_output=True,
    )
    server = start_server()
    server.client.config_set("tls-cert-file", str(certificate))
    server.client.config_set("tls-key-file", str(key))
    server.client.config_set("tls-ca-cert-file", str(certificate))
    server.client.config_set("tls-auth-clients", "no")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server.client.config_set("tls-port", port)
    tier = open_redis(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}", LIMIT)
    pages = [make_page(n, length) for n, length in enumerate([1, 5000, 65_536, MIB, 3 * MIB])]
    assert all(tier.write(pages))
    assert all(read_pages(tier, pages))
    untrusting = open_redis(f"rediss://127.0.0.1:{port}", LIMIT)
    nothing(untrusting, pages)


def test_a_primary_of_the_cluster_dies_and_its_replica_takes_over(
    start_cluster: Callable[..., Cluster], open_redis: Open, eventually: Callable[..., None]
) -> None:
    cluster = start_cluster(node_timeout=1000)
    tier = open_redis(cluster.url, LIMIT)
    assert all(tier.write(PAGES))
    victim = cluster.primaries()[0]
    victim.client.wait(1, 5000)
    victim.kill()
    read_pages(tier, PAGES)
    recovers(tier, PAGES + MORE, eventually)


def test_a_cluster_says_how_many_of_its_servers_are_away(
    steady_cluster: Cluster, open_redis: Open, eventually: Callable[..., None]
) -> None:
    tier = open_redis(steady_cluster.url, LIMIT)
    assert all(tier.write(PAGES))
    assert tier.health().state == TierState.OK
    hurry(tier, 0.05)
    victims = steady_cluster.primaries()

    def state() -> TierState:
        tier.contains([page.key for page in PAGES])  # asks all of them
        return tier.health().state

    victims[0].pause()
    eventually(lambda: state() == TierState.DEGRADED)
    first = tier.health()
    assert first.reason == f"1 of 3 servers don't serve: 127.0.0.1:{victims[0].port} does not answer in time"
    for victim in victims[1:]:
        victim.pause()
    eventually(lambda: state() == TierState.DOWN)
    assert tier.health().since > first.since
    assert tier.health().reason.startswith("3 of 3 servers don't serve: ")
    for victim in victims:
        victim.resume()
    hurry(tier, PATIENT)
    eventually(lambda: state() == TierState.OK)


def test_slots_that_move_are_found_again(cluster: Cluster, open_redis: Open, eventually: Callable[..., None]) -> None:
    tier = open_redis(cluster.url, LIMIT)
    assert all(tier.write(PAGES))
    slot = cluster.client.keyslot(b"kvstore:page:" + PAGES[0].key)
    owner = next(s for s in cluster.primaries() if s.client.cluster("countkeysinslot", slot))
    other = next(s for s in cluster.primaries() if s is not owner)
    ids = {s: s.client.execute_command("CLUSTER MYID").decode() for s in (owner, other)}
    other.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[owner])
    owner.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[other])
    names = owner.client.execute_command("CLUSTER GETKEYSINSLOT", slot, 100)
    owner.client.execute_command("MIGRATE", "127.0.0.1", other.port, "", 0, 5000, "KEYS", *names)
    for server in (other, owner):
        server.client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[other])
    eventually(lambda: all(read_pages(tier, PAGES)))
    assert all(tier.write(PAGES + MORE))


def test_sentinels_lead_to_the_new_master(
    start_server: Callable[..., RedisServer], open_redis: Open, eventually: Callable[..., None]
) -> None:
    master = start_server()
    replica = start_server("--replicaof", "127.0.0.1", str(master.port))
    sentinel = start_server(
        kind="sentinel",
        config=f"sentinel monitor ours 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds ours 300\nsentinel failover-timeout ours 2000\n",
    )
    tier = open_redis(f"redis+sentinel://127.0.0.1:{sentinel.port}/ours", LIMIT)
    eventually(lambda: all(tier.write(PAGES)))
    eventually(lambda: replica.client.info("replication")["master_link_status"] == "up")
    eventually(lambda: sentinel.client.execute_command("SENTINEL REPLICAS", "ours"))
    master.client.wait(1, 5000)
    master.kill()
    eventually(lambda: replica.client.info("replication")["role"] == "master")
    recovers(tier, PAGES + MORE, eventually)
