"""Which namespaces are known, and what of them outlives the node."""

import dataclasses
import json
import logging
import threading
import time
from pathlib import Path

import pytest

from kvstore.errors import LayoutMismatchError, LimitExceededError, UnknownNamespaceError
from kvstore.layout import Layout
from kvstore.namespaces import registry as namespaces
from kvstore.namespaces.registry import KnownNamespace, NamespaceRegistry
from kvstore.store.formats import refuse_newer


def layout(model: str, page_bytes: int = 4096) -> Layout:
    return Layout(model=model, block_size=16, page_bytes=page_bytes)


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    (tmp_path / "arena").mkdir()
    return tmp_path / "arena"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def models(known: NamespaceRegistry) -> dict[int, str]:
    return {each.number: each.layout.model for each in known.known()}


def test_a_layout_has_one_number(arena: Path) -> None:
    known = NamespaceRegistry([arena])
    first = known.open(layout("a"))
    assert first == known.open(layout("a")) == known.get(layout("a").fingerprint)
    assert (first.number, first.layout, first.fingerprint) == (1, layout("a"), layout("a").fingerprint)
    assert known.open(layout("b")).number == 2
    assert known.get(layout("c").fingerprint) is None
    assert len(known) == 2


def test_numbers_outlive_the_node(arena: Path) -> None:
    known = NamespaceRegistry([arena])
    known.forget(known.open(layout("a")))
    known.open(layout("b"))
    again = NamespaceRegistry([arena])
    assert models(again) == {2: "b"}
    assert {number: each.layout for number, each in again.in_headers.items()} == {2: layout("b")}
    assert again.open(layout("c")).number == 3
    assert (arena / "namespaces.json").stat().st_mode & 0o777 == 0o600


def test_another_page_size_of_the_same_name_is_refused_and_changes_nothing(arena: Path) -> None:
    known = NamespaceRegistry([arena])
    known.open(layout("a"))
    before = (arena / "namespaces.json").read_bytes()
    with pytest.raises(LayoutMismatchError, match="'a · block 16 · group 0' exists with page_bytes 4096, not 8192"):
        known.open(layout("a", 8192))
    assert known.get(layout("a", 8192).fingerprint) is None
    assert known.get(layout("a").fingerprint) is not None
    assert (arena / "namespaces.json").read_bytes() == before
    known.open(dataclasses.replace(layout("a", 8192), revision="2"))


def test_a_cleared_name_takes_another_page_size(arena: Path) -> None:
    known = NamespaceRegistry([arena])
    old = known.open(layout("a"))
    assert known.is_open(old.number)
    known.forget(old)
    assert not known.is_open(old.number)
    assert known.get(old.fingerprint) is None
    assert known.open(layout("a", 8192)).number == 2, "a number is never used twice"
    with pytest.raises(UnknownNamespaceError):
        known.forget(old)


def test_there_are_not_more_than_the_limit(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "MOST_NAMESPACES", 2)
    known = NamespaceRegistry([arena])
    known.open(layout("a"))
    known.open(layout("b"))
    with pytest.raises(LimitExceededError, match="keeps 2 namespaces, the limit is 2"):
        known.open(layout("c"))
    assert known.open(layout("a")).number == 1
    known.forget(known.open(layout("b")))
    assert known.open(layout("c")).number == 3


def test_numbers_end_at_what_a_header_holds(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_LAST_NUMBER", 2)
    known = NamespaceRegistry([arena])
    known.forget(known.open(layout("a")))
    known.open(layout("b"))
    with pytest.raises(LimitExceededError):
        known.open(layout("c"))


def test_numbers_that_nobody_has_are_given_again_after_a_restart(
    arena: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has opened very many namespaces in its life, and cleared them, must not end without any."""
    monkeypatch.setattr(namespaces, "_LAST_NUMBER", 3)
    known = NamespaceRegistry([arena])
    first, _, last = (known.open(layout(name)) for name in "abc")
    known.forget(first)
    with pytest.raises(LimitExceededError, match="restart"):
        known.open(layout("d"))
    NamespaceRegistry([disk]).open(layout("e"))
    again = NamespaceRegistry([arena, disk])
    assert {name: again.open(layout(name)).number for name in "bce"} == {"b": 2, "c": last.number, "e": 1}
    assert again.in_headers.keys() == {2, 3}
    with pytest.raises(LimitExceededError):
        again.open(layout("d"))


@pytest.mark.parametrize("number", [0xFFFF, 0xFFFE])
def test_a_register_with_the_last_number_takes_more_namespaces(arena: Path, number: int) -> None:
    NamespaceRegistry([arena]).open(layout("a"))
    path = arena / "namespaces.json"
    register = json.loads(path.read_text())
    register["namespaces"][0]["number"] = number
    path.write_text(json.dumps(register))
    known = NamespaceRegistry([arena])
    numbers = [known.open(layout(name)).number for name in "abc"]
    assert numbers[0] == number
    assert len({*numbers}) == 3
    assert all(0 < each <= 0xFFFF for each in numbers)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e300, -5, "soon", None, [], 2**64 - 1])
@pytest.mark.parametrize("field", ["created", "idle"])
def test_a_time_that_can_not_be_costs_no_page(arena: Path, field: str, value: object) -> None:
    number = NamespaceRegistry([arena]).open(layout("a")).number
    path = arena / "namespaces.json"
    register = json.loads(path.read_text())
    register["namespaces"][0][field] = value
    path.write_text(json.dumps(register))
    [known] = (again := NamespaceRegistry([arena])).known()
    assert known.number == number
    assert abs(known.created - time.time()) < 1000
    assert again.idle_seconds(known) < 1000


def test_a_register_nested_too_deep_is_one_that_can_not_be_read(
    arena: Path, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    NamespaceRegistry([arena]).open(layout("a"))
    (disk / "namespaces.json").write_text("[" * 200_000)
    refuse_newer(disk)
    assert list(models(NamespaceRegistry([arena, disk])).values()) == ["a"]
    assert str(disk / "namespaces.json") in caplog.text


def test_namespaces_of_the_disk_come_back_with_a_new_arena(arena: Path, disk: Path) -> None:
    known = NamespaceRegistry([arena, disk])
    known.open(layout("a"))
    known.open(layout("b"))
    (arena / "namespaces.json").unlink()
    again = NamespaceRegistry([arena, disk])
    assert sorted(models(again).values()) == ["a", "b"]
    again.save()
    assert models(NamespaceRegistry([arena])) == models(again)


def test_only_the_arenas_register_says_what_is_in_its_headers(arena: Path, disk: Path) -> None:
    """Numbers that are counted anew may be other namespaces' in old headers: pages would be found in a wrong one."""
    known = NamespaceRegistry([arena, disk])
    first = known.open(layout("a"))
    known.open(layout("b"))
    known.open(layout("c"))
    known.forget(first)
    (arena / "namespaces.json").write_text("{}")
    again = NamespaceRegistry([arena, disk])
    assert again.in_headers == {}
    assert models(again) != models(known), "this test shows nothing if numbers happen to be the same"


def test_of_two_registers_that_disagree_the_arenas_holds(arena: Path, disk: Path) -> None:
    NamespaceRegistry([disk]).open(layout("a", 8192))
    NamespaceRegistry([arena]).open(layout("a", 4096))
    known = NamespaceRegistry([arena, disk])
    assert [each.layout.page_bytes for each in known.known()] == [4096]
    with pytest.raises(LayoutMismatchError):
        known.open(layout("a", 8192))
    known.forget(known.open(layout("a", 4096)))
    assert len(known) == 0


ENTRY = {"number": 1, "layout": json.loads(layout("a").to_json())}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"namespaces": 3}',
        b'{"namespaces": [7]}',
        json.dumps({"namespaces": [{"number": 1}]}).encode(),
        json.dumps({"namespaces": [{"number": 1, "layout": {"model": "a"}}]}).encode(),
        json.dumps({"namespaces": [ENTRY | {"number": 0}]}).encode(),
        json.dumps({"namespaces": [ENTRY | {"number": 65536}]}).encode(),
        json.dumps({"namespaces": [ENTRY, ENTRY | {"number": 2}]}).encode(),
        json.dumps({"namespaces": [ENTRY, {"number": 1, "layout": json.loads(layout("b").to_json())}]}).encode(),
    ],
)
def test_a_damaged_register_is_empty_and_said(arena: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (arena / "namespaces.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        known = NamespaceRegistry([arena])
    assert len(known) == 0
    assert "can't be read" in caplog.text
    assert known.open(layout("a")).number == 1


def test_one_bad_record_takes_no_other_along_and_the_file_is_kept(
    arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = NamespaceRegistry([arena])
    known.forget(known.open(layout("gone")))
    for model in "abcde":
        known.open(layout(model))
    known.forget(known.open(layout("gone as well")))
    path = arena / "namespaces.json"
    register = json.loads(path.read_text())
    entries, leaving = register["namespaces"], register["leaving"]
    entries[0]["layout"] = {"model": "a"}
    entries[1]["number"] = float("inf")
    entries[2]["number"] = entries[3]["number"]
    leaving[0]["fingerprint"] = leaving[0]["fingerprint"][:-2]
    text = json.dumps(register)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        again = NamespaceRegistry([arena])
    assert "5 records of" in caplog.text
    assert models(again) == {6: "e"}
    assert [each.name for each in again.leaving()] == [layout("gone as well").name]
    again.save()
    assert (arena / "namespaces.json.damaged").read_text() == text
    caplog.clear()
    assert models(NamespaceRegistry([arena])) == {6: "e"}
    assert not caplog.records


def test_what_is_leaving_being_damaged_takes_no_namespace_along(arena: Path) -> None:
    (arena / "namespaces.json").write_text(json.dumps({"namespaces": [ENTRY], "leaving": 3}))
    assert models(NamespaceRegistry([arena])) == {1: "a"}


def test_a_register_that_cannot_be_read_is_kept(arena: Path) -> None:
    (arena / "namespaces.json").write_text("{damaged")
    NamespaceRegistry([arena]).save()
    assert (arena / "namespaces.json.damaged").read_text() == "{damaged"
    assert models(NamespaceRegistry([arena])) == {}


def test_layouts_without_a_tenant_have_a_share_once_a_tenant_asks(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "MOST_NAMESPACES", 16)
    known = NamespaceRegistry([arena])
    for model in "abcd":
        known.open(layout(model))
    assert not known.is_crowded("")
    with pytest.raises(LimitExceededError, match="layouts without a tenant have 4 namespaces"):
        known.open(layout("e"), of_tenant=True)
    assert known.is_crowded("")
    assert not known.is_crowded("another")


def test_a_register_that_cannot_be_written_is_said_and_the_namespace_works(
    arena: Path, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (arena / "namespaces.new").mkdir()
    known = NamespaceRegistry([arena, disk])
    with caplog.at_level(logging.WARNING):
        assert known.open(layout("a")).number == 1
    assert "can't be written" in caplog.text
    assert models(NamespaceRegistry([disk])) == {1: "a"}


def test_many_threads_open_one_layout_once(arena: Path) -> None:
    known = NamespaceRegistry([arena])
    start = threading.Barrier(8)
    numbers: list[int] = []

    def run() -> None:
        start.wait()
        numbers.extend(known.open(layout(f"m{each}")).number for each in range(20))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == sorted(list(range(1, 21)) * 8)
    assert models(NamespaceRegistry([arena])) == models(known)


def test_what_counts_for_all_counts_for_one_that_is_being_opened(arena: Path) -> None:
    known = NamespaceRegistry([arena])
    counts = "before"
    applied: dict[str, str] = {}

    def apply(to: KnownNamespace) -> None:
        applied[to.layout.model] = counts

    everyone = threading.Thread(target=known.apply_to_all, args=(apply,), daemon=True)

    def apply_while_that_changes(to: KnownNamespace) -> None:
        nonlocal counts
        apply(to)
        counts = "behind"
        everyone.start()
        everyone.join(0.2)  # it has to wait, and must not be over

    known.open(layout("a"), apply_rules=apply_while_that_changes)
    everyone.join(60)
    assert applied == {"a": "behind"}


def test_a_namespace_keeps_its_first_label_and_those_that_were_used_last(arena: Path) -> None:
    known = NamespaceRegistry([arena])
    assert known.open(layout("a")).name == layout("a").name
    for number in range(20):
        known.open(layout("a"), label=f"label {number}")
    named = known.open(layout("a"), label="label 15")
    assert named.labels == ("label 0", "label 15", *(f"label {number}" for number in (19, 18, 17, 16, 14, 13)))
    assert known.open(layout("a"), label="label 0").labels == known.open(layout("a")).labels == named.labels
    assert named.name == layout("a").named("label 0") == "label 0 · block 16 · group 0"


def test_labels_outlive_the_node_in_each_folder(arena: Path, disk: Path) -> None:
    known = NamespaceRegistry([arena, disk])
    for label in ("one", "two"):
        known.open(layout("a"), label=label)
    assert NamespaceRegistry([arena, disk]).open(layout("a")).labels == ("one", "two")
    (arena / "namespaces.json").unlink()
    assert NamespaceRegistry([arena, disk]).open(layout("a")).labels == ("one", "two")


def test_no_file_is_written_for_a_label_that_is_known(arena: Path) -> None:
    known = NamespaceRegistry([arena])
    for label in ("one", "two", "three"):
        known.open(layout("a"), label=label)
    before = (arena / "namespaces.json").stat().st_ino
    assert known.open(layout("a"), label="two").labels == ("one", "two", "three")
    assert (arena / "namespaces.json").stat().st_ino == before


def test_what_can_not_be_a_label_in_a_register_costs_no_page(arena: Path) -> None:
    known = NamespaceRegistry([arena])
    known.open(layout("a"), label="one")
    path = arena / "namespaces.json"
    register = json.loads(path.read_text())
    for labels, left in (
        (["a\nb", 7, "", "x" * 300, "two", "two"], ("two",)),
        (3, ()),
        ([f"{number}" for number in range(99)], tuple("01234567")),
    ):
        register["namespaces"][0]["labels"] = labels
        path.write_text(json.dumps(register))
        assert NamespaceRegistry([arena]).open(layout("a")).labels == left


def test_a_label_is_not_taken_from_a_layout_that_is_refused(arena: Path) -> None:
    known = NamespaceRegistry([arena])
    known.open(layout("a"), label="one")
    with pytest.raises(LayoutMismatchError, match="namespace 'one · block 16"):
        known.open(layout("a", 8192), label="two")
    assert known.open(layout("a")).labels == ("one",)
