"""``kvstore lookup``, ``evict``, ``pin`` and ``unpin``, against a node, and what ``clear`` has in common with them."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.cli import main as cli
from kvstore.config.node import NodeConfig
from kvstore.config.rules import NamespaceRule
from kvstore.hashing import hash_blocks
from kvstore.node.node import Node
from kvstore.security.grants import Grant
from kvstore.status import Status, TierHealth, seen_by
from kvstore.store.store import Store

LAYOUT = kvstore.Layout(model="acme/chat", block_size=16, page_bytes=4096)
HASHES = [bytes([number]) * 32 for number in range(1, 7)]
WORDS = [each.hex() for each in HASHES]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def node(short_folder: Path, shm_folder: Path) -> Iterator[Node]:
    config = NodeConfig(
        socket=short_folder / "s",
        arena=1 << 20,
        arena_dir=shm_folder / "arena",
        disk=short_folder / "disk",
        disk_limit=16 << 20,
    )
    node = Node(config)
    with kvstore.connect(f"unix://{config.socket}") as client:
        client.namespace(LAYOUT).store(HASHES[:4], b"".join(bytes([n]) * 4096 for n in range(4)))
    yield node
    node.stop()


@pytest.fixture
def run(node: Node, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main([arguments[0], "--url", f"unix://{node.config.socket}", *arguments[1:]])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def quota_node(short_folder: Path, shm_folder: Path) -> Iterator[Node]:
    """One whose arena has 64 frames, 8 of them for a namespace."""
    config = NodeConfig(
        socket=short_folder / "q",
        arena=64 * 4096,
        arena_dir=shm_folder / "q",
        disk=short_folder / "disk-q",
        disk_limit=16 << 20,
        namespace=(NamespaceRule(match="small*", arena=8 * 4096),),
    )
    node = Node(config)
    yield node
    node.stop()


def answer(done: tuple[int, str, str]) -> Any:
    code, out, _ = done
    assert code == 0
    return json.loads(out)


def test_lookup_says_the_tier_of_each_page(run: Run) -> None:
    code, out, _ = run("lookup", LAYOUT.name, *WORDS[2:5])
    assert code == 0
    assert out.splitlines() == [
        "3 asked, 2 present, 2 leading",
        f"{WORDS[2]}  arena",
        f"{WORDS[3]}  arena",
        f"{WORDS[4]}  -",
    ]


def test_a_namespace_is_known_by_its_fingerprint_too(run: Run) -> None:
    fingerprint = LAYOUT.fingerprint.hex()
    assert answer(run("lookup", fingerprint[:6], WORDS[0], "--json"))["present"] == 1
    code, _, err = run("lookup", fingerprint[:5], WORDS[0])
    assert code == 2 and fingerprint[:12] in err and LAYOUT.name in err


def test_a_model_that_one_namespace_has_is_its_name(run: Run, node: Node) -> None:
    assert answer(run("lookup", LAYOUT.model, WORDS[0], "--json"))["present"] == 1
    assert run("lookup", LAYOUT.model[:-1], WORDS[0])[0] == 2, "not the beginning of a model's name"
    with kvstore.connect(f"unix://{node.config.socket}") as client:
        client.namespace(dataclasses.replace(LAYOUT, group=1))
    code, _, err = run("clear", LAYOUT.model)
    assert code == 2 and "can be any of these" in err and "group 0" in err and "group 1" in err


def test_pages_are_named_by_their_prompt(run: Run, node: Node, tmp_path: Path) -> None:
    tokens = list(range(40))
    with kvstore.connect(f"unix://{node.config.socket}") as client:
        client.namespace(LAYOUT).store(hash_blocks(tokens, 16, ["salt"])[:1], bytes(4096))
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps({"tokens": tokens, "count": 40}))
    code, out, _ = run("lookup", LAYOUT.name, "--tokens", str(file), "--extra-key", "salt", "--json")
    said = json.loads(out)
    assert (code, said["asked"], said["leading"]) == (0, 2, 1)
    assert [each["hash"] for each in said["pages"]] == [each.hex() for each in hash_blocks(tokens, 16, ["salt"])]
    assert json.loads(run("lookup", LAYOUT.name, "--tokens", str(file), "--json")[1])["present"] == 0
    file.write_text(json.dumps({"tokens": tokens, "extra_keys": ["salt"]}))
    assert run("pin", LAYOUT.name, "--tokens", str(file), "--for", "1h")[:2] == (0, "2 asked, 1 pinned\n")
    assert run("unpin", LAYOUT.name, "--tokens", str(file))[:2] == (0, "2 asked, 1 unpinned\n")
    assert run("evict", LAYOUT.name, "--tokens", str(file))[:2] == (0, "2 asked, 1 evicted (4 KiB)\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either block hashes or --tokens FILE"),
        (["--tokens", "/none"], "/none can't be read: No such file"),
        ([WORDS[0], "--tokens", "/none"], "give either block hashes or --tokens FILE"),
        ([WORDS[0], "--extra-key", "salt"], "--extra-key goes with --tokens FILE"),
    ],
)
def test_pages_that_are_named_in_no_way_or_two(run: Run, arguments: list[str], words: str) -> None:
    code, _, err = run("lookup", LAYOUT.name, *arguments)
    assert (code, words in err) == (2, True)


def test_evict_drops_pages_and_says_their_bytes(run: Run) -> None:
    expected = {"asked": 3, "evicted": 1, "freed_bytes": 4096}
    assert answer(run("evict", LAYOUT.name, *WORDS[3:], "--json")) == expected
    assert run("evict", LAYOUT.name, *WORDS[:2]) == (0, "2 asked, 2 evicted (8 KiB)\n", "")


def test_evict_leaves_pinned_pages_unless_it_is_told_not_to(run: Run, node: Node) -> None:
    assert run("pin", LAYOUT.name, *WORDS[:2], "--for", "12h")[0] == 0
    code, out, err = run("evict", LAYOUT.name, *WORDS)
    assert (code, out) == (0, "6 asked, 2 evicted (8 KiB)\n")
    assert err == "kvstore evict: pinned pages stay (2 of 6); --pinned drops them\n"
    assert answer(run("lookup", LAYOUT.name, *WORDS, "--json"))["present"] == 2
    assert run("evict", "--pinned", LAYOUT.name, *WORDS) == (0, "6 asked, 2 evicted (8 KiB)\n", "")
    assert node.store.statistics().namespaces[0].pinned_pages == 0


@pytest.fixture
def older_node(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """It knows neither ``PageList.pinned`` nor ``TierStatus.health``."""
    evict = Store.evict

    def older_evict(store: Store, fingerprint: bytes, hashes: Sequence[bytes], *, pinned: bool) -> int:
        return evict(store, fingerprint, hashes, pinned=True)

    def older_status(status: Status, grant: Grant) -> Status:
        tiers = tuple(dataclasses.replace(tier, health=TierHealth()) for tier in status.tiers)
        return dataclasses.replace(seen_by(status, grant), tiers=tiers)

    monkeypatch.setattr(Store, "evict", older_evict)
    monkeypatch.setattr("kvstore.service.grpc.cache.seen_by", older_status)
    return node


def test_evict_drops_nothing_where_the_node_would_drop_pinned_pages(run: Run, older_node: Node) -> None:
    assert run("pin", LAYOUT.name, *WORDS[:2], "--for", "12h")[0] == 0
    code, out, err = run("evict", LAYOUT.name, *WORDS)
    assert (code, out) == (2, "")
    assert "of an older version" in err and "say --pinned to drop them" in err
    assert answer(run("lookup", LAYOUT.name, *WORDS, "--json"))["present"] == 4
    assert run("evict", "--pinned", LAYOUT.name, *WORDS) == (0, "6 asked, 4 evicted (16 KiB)\n", "")


@pytest.mark.parametrize("command", ["lookup", "evict", "pin", "unpin", "warm"])
@pytest.mark.parametrize("word", ["-", WORDS[0]])
@pytest.mark.parametrize("place", range(4))
def test_hashes_may_stand_before_behind_and_between_flags(
    run: Run, node: Node, monkeypatch: pytest.MonkeyPatch, command: str, word: str, place: int
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(WORDS[0]))
    flags = [["--for", "12h"] if command == "pin" else ["--url", f"unix://{node.config.socket}"], ["--json"]]
    given = [[LAYOUT.model], [word]]
    orders = [given + flags, flags + given, [given[0], *flags, given[1]], [flags[0], given[0], flags[1], given[1]]]
    code, out, err = run(command, *(each for part in orders[place] for each in part))
    assert (code, json.loads(out)["asked"]) == (0, 1), err


def test_pages_are_pinned_and_unpinned(run: Run, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(run("pin", LAYOUT.name, *WORDS[:2], "--for", "12h", "--json")) == {"asked": 2, "pinned": 2}
    code, out, err = run("pin", LAYOUT.name, *WORDS, "--for", "1d")
    assert (code, out) == (0, "6 asked, 4 pinned\n")
    assert err == "kvstore pin: page 5 of 6 is in no tier\n"
    assert node.store.statistics().namespaces[0].pinned_pages == 4
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(WORDS)))
    assert answer(run("unpin", LAYOUT.name, "-", "--json")) == {"asked": 6, "unpinned": 4}
    assert run("pin", LAYOUT.name, WORDS[5], "--for", "1d")[0] == 1, "nothing was pinned"


def test_what_limits_pins_is_said_with_its_numbers(quota_node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"unix://{quota_node.config.socket}"
    hashes = [number.to_bytes(32, "big") for number in range(20)]
    words = [each.hex() for each in hashes]
    small, large = (kvstore.Layout(model=name, block_size=16, page_bytes=4000) for name in ("small", "large"))
    with kvstore.connect(url) as client:
        for layout, count in ((small, 8), (large, 20)):
            assert client.namespace(layout).store(hashes[:count], bytes(count * 4000)).stored == count
        client.flush()
    assert cli.main(["pin", small.name, *words[:8], "--for", "1h", "--url", url]) == 0
    said = capsys.readouterr()
    assert said.out == "8 asked, 2 pinned\n"
    assert "page 3 of 8 (4 KiB) can't be pinned: pinned pages take 8 KiB of at most 64 KiB, a quarter of" in said.err
    assert "those of its namespace take 8 KiB of at most 8 KiB, a quarter of its quota there (32 KiB, of" in said.err
    assert cli.main(["pin", large.name, *words, "--for", "1h", "--url", url]) == 0
    said = capsys.readouterr()
    assert said.out == "20 asked, 14 pinned\n"
    assert "pinned pages take 64 KiB of at most 64 KiB, a quarter of the arena; they are 16 of" in said.err
    assert "quota" not in said.err
    assert cli.main(["pin", small.name, words[3], "--for", "1h", "--url", url]) == 1


@pytest.mark.parametrize("command", ["lookup", "evict", "clear", "pin", "unpin", "status"])
class TestWhichNode:
    def arguments(self, command: str) -> list[str]:
        hashes = {"status": [], "clear": [LAYOUT.name]}.get(command, [LAYOUT.name, WORDS[0]])
        flags = {"pin": ["--for", "1h"], "clear": ["--yes"]}.get(command, [])
        return [command, *hashes, *flags]

    def test_the_socket_of_the_environment(self, node: Node, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
        monkeypatch.setenv("KVSTORE_SOCKET", str(node.config.socket))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(node.config.socket / "none"))
        assert cli.main(self.arguments(command)) == 0

    def test_url_is_a_flag_of_all(self, run: Run, command: str) -> None:
        assert run(*self.arguments(command))[0] == 0

    def test_an_embedded_store_is_not_opened(
        self, short_folder: Path, capsys: pytest.CaptureFixture[str], command: str
    ) -> None:
        assert cli.main([*self.arguments(command), "--url", f"embedded://{short_folder}/e"]) == 2
        assert "answers its own process only" in capsys.readouterr().err
        assert not (short_folder / "e").exists()

    def test_no_abbreviations(self, run: Run, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            run(*self.arguments(command), "--js")
        assert "unrecognized arguments: --js" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pin", LAYOUT.name, WORDS[0], "--for", "soon"], "--for: not a time: 'soon'"),
        (["pin", LAYOUT.name, WORDS[0], "--for", "0s"], "366 days"),
        (["pin", LAYOUT.name, WORDS[0], "--for", "400d"], "366 days"),
        (["evict", LAYOUT.name, "abcd"], "64 hexadecimal digits, got 'abcd'"),
        (["lookup", "no such", WORDS[0]], "no namespace 'no such'"),
    ],
)
def test_what_cant_be_is_named(run: Run, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith(f"kvstore {arguments[0]}: ")


def test_a_node_that_is_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["clear", "anything", "--url", f"unix://{tmp_path}/none"]) == 1
    assert "none" in capsys.readouterr().err
