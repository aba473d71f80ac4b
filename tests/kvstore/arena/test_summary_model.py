"""The protocol between node and reader by which a page is said to be nowhere, checked in all interleavings.

Beside ``test_protocol_model``, which is about the bytes of a slot, this model is about one page P and whether it is
said to be nowhere. It never is: P is written to disk, leaves the arena, is promoted, leaves the disk while the arena
has it, in any order. Another page Q has P's tag and its two buckets. At any moment the node may make the summary anew
in another file, or be killed; the next one may be of an older version, which knows of no summary. Each step touches
shared memory once; x86-64 keeps the order of each side's stores, and of its loads.

One promise is checked in every state: no reader says that P is nowhere.

The rules can be weakened one by one; each weakening must then break the promise, or the model would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

MOVES = 4
"""Most things that the node does; more than any weakening needs."""
DOWN, RUNNING, OLDER = "down", "running", "older"


class Rules(NamedTuple):
    """The protocol, and what can be left out of it."""

    added_before_evicted: bool = True
    """A page is in the summary before its word leaves the arena's index."""
    withdrawn_behind_row: bool = True
    """It is withdrawn from the summary when the disk has it no longer."""
    arena_before_summary: bool = True
    """A reader asks the arena first."""
    notice_withdrawals: bool = True
    """A reader says nothing where something was withdrawn while it looked."""
    count_first: bool = True
    """A withdrawal is counted before it is made."""
    notice_another_file: bool = True
    """Nor where the summary is another file by then."""
    notice_another_node: bool = True
    """Nor where the arena's edition is another one by then."""
    complete_before_named: bool = True
    """A file is named when it has every page."""
    tell_while_built: bool = True
    """What comes while a file is filled is told, too."""
    count_equal_tags: bool = True
    """Two pages with one tag take two places."""
    flag_unplaced: bool = True
    """A page for which the index has no place is said to be there."""
    flag_behind_withdrawals: bool = True
    """A reader looks whether there is such a page behind the count of withdrawals."""
    arena_again: bool = False
    """Instead of noticing withdrawals, a reader asks the arena a second time."""


class File(NamedTuple):
    """One file: the places with the tag of P and Q in their two buckets, and the count of withdrawals."""

    home: int = 0
    partner: int = 0
    withdrawals: int = 0


class Reader(NamedTuple):
    """A reader that looks for P."""

    at: int = 0
    edition: int = 0
    named: int = 0
    withdrawals: int = 0
    over: bool = False


class State(NamedTuple):
    """Everything: shared memory, what only the node knows, the reader."""

    word: bool = False
    """P is in the arena's index."""
    unplaced: bool = False
    """P is in the arena without a place in its index."""
    flag: str = "own"
    """Where pages may be besides: in a tier of the node's own; "unplaced": and in the arena; "untold": anywhere."""
    edition: int = 1
    named: int = 1
    files: tuple[File, File, File] = (File(), File(home=1), File())
    """By number; there is none of number 0."""
    row: bool = True
    """P is on disk."""
    row_of_q: bool = False
    file: int = 1
    """The one that the node writes; 0: none."""
    untold_p: bool = False
    untold_q: bool = False
    """Whether the page was on disk when the file was made, still is, and is not in the file yet."""
    node: str = RUNNING
    todo: tuple[str, ...] = ()
    moves: int = MOVES
    reader: Reader = Reader()
    broken: str = ""


# What the node does, as steps that each touch shared memory once at most. "row" and "no row" are the node's own.
def programs(state: State, rules: Rules) -> Iterator[tuple[str, tuple[str, ...]]]:
    knows = state.node == RUNNING
    add = ("add P",) if knows else ()
    here = state.word or state.unplaced
    if here and not state.row:
        if rules.added_before_evicted:
            yield "write back", ("row", *add)
        else:
            yield "write back and evict", ("row", "no word", *add)
    if here and state.row:
        yield "evict", ("no word",) if state.word else ("no place",)
        steps = withdrawal("P", rules) if knows and not state.untold_p else ()
        yield "reclaim", ("no row", *steps) if rules.withdrawn_behind_row else (*steps, "no row")
    if not here and state.row:
        yield "promote", ("word",)
        if knows:
            yield "promote, without a place", ("flag", "place") if rules.flag_unplaced else ("place",)
    if knows and not state.row_of_q:
        yield "Q comes", ("row of Q", "add Q")
    if knows and state.row_of_q:
        yield "Q leaves", ("no row of Q", *(withdrawal("Q", rules) if not state.untold_q else ()))
    if knows and state.file == 1:
        build = ("tell", "name") if rules.complete_before_named else ("name", "tell")
        yield "another file", ("not named", "new file", *build)
    if state.node == RUNNING and state.edition == 1:
        start = ("edition 0", "not named", "index cleared", "index rebuilt", "flag own", "edition 2", "new file")
        yield "restarted", (*start, "tell", "name") if rules.complete_before_named else (*start, "name", "tell")
        yield "older", ("edition 0", "index cleared", "index rebuilt", "older", "edition 2")


def withdrawal(page: str, rules: Rules) -> tuple[str, ...]:
    steps = ("count", f"withdraw {page}")
    return steps if rules.count_first else steps[::-1]


def steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    yield from reader_steps(state, rules)
    for name, after in node_steps(state, rules):
        if after.row or after.word or after.unplaced:  # else it is nowhere
            yield name, after


def node_steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    if state.todo:
        step, *rest = state.todo
        yield f"node: {step}", done(state, step, rules)._replace(todo=tuple(rest))
    if not state.moves:
        return
    for name, todo in programs(state, rules):
        if name in ("restarted", "older") or not state.todo:
            yield f"node: {name}", state._replace(todo=todo, moves=state.moves - 1)
        # A file is filled, and the disk reclaims, on threads of their own: other things happen in between.
        elif state.todo[0] == "tell" or (state.todo[0] == "no row" and name == "evict"):
            yield f"node: {name}", state._replace(todo=(*todo, *state.todo), moves=state.moves - 1)


def done(state: State, step: str, rules: Rules) -> State:
    file = state.files[state.file]
    match step:
        case "row" | "no row":
            return state._replace(row=step == "row", untold_p=False)
        case "row of Q" | "no row of Q":
            return state._replace(row_of_q=step == "row of Q", untold_q=False)
        case "word" | "no word":
            return state._replace(word=step == "word")
        case "place" | "no place":
            return state._replace(unplaced=step == "place")
        case "flag":
            return state._replace(flag="unplaced")
        case "flag own":
            return state._replace(flag="own", node=RUNNING)
        case "add P" | "add Q":
            untold = state.file == 2 and not state.named and not rules.tell_while_built
            return state if not state.file or untold else wrote(state, added(file, rules))
        case "count":
            return wrote(state, file._replace(withdrawals=file.withdrawals + 1)) if state.file else state
        case "withdraw P" | "withdraw Q":
            return wrote(state, withdrawn(file)) if state.file else state
        case "not named":
            return state._replace(named=0, file=0)
        case "new file":
            return state._replace(file=2, untold_p=state.row, untold_q=state.row_of_q)
        case "tell":
            for _ in range(state.untold_p + state.untold_q):
                file = added(file, rules)
            return wrote(state, file)._replace(untold_p=False, untold_q=False)
        case "name":
            return state._replace(named=2)
        case "edition 0":
            return state._replace(edition=0, file=0, node=DOWN, untold_p=False, untold_q=False)
        case "index cleared":  # whether the page is in the arena still: in its header
            return state._replace(word=False, unplaced=state.word or state.unplaced)
        case "index rebuilt":
            return state._replace(word=state.unplaced, unplaced=False)
        case "older":
            return state._replace(flag="untold", node=OLDER)
        case "edition 2":
            return state._replace(edition=2)
    raise AssertionError(step)


def added(file: File, rules: Rules) -> File:
    if not rules.count_equal_tags and (file.home or file.partner):
        return file
    return file._replace(home=file.home + 1) if file.home <= file.partner else file._replace(partner=file.partner + 1)


def withdrawn(file: File) -> File:
    if file.home:
        return file._replace(home=file.home - 1)
    return file._replace(partner=max(0, file.partner - 1))


def wrote(state: State, file: File) -> State:
    files = list(state.files)
    files[state.file] = file
    return state._replace(files=tuple(files))


def reader_steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    reader = state.reader
    if reader.over:
        return

    def to(at: int, **changes: int) -> State:
        return state._replace(reader=reader._replace(at=at, **changes))

    gone = state._replace(reader=reader._replace(over=True))  # found, or it asks the node
    file = state.files[reader.named]
    match reader.at:
        case 0:
            yield "reader: edition", to(1, edition=state.edition) if state.edition else gone
        case 1:
            yield "reader: which file", to(2, named=state.named) if state.named else gone
        case 2 | 3 if (reader.at == 2) == rules.flag_behind_withdrawals:
            yield "reader: withdrawals", to(reader.at + 1, withdrawals=file.withdrawals)
        case 2 | 3:
            yield "reader: where else", to(reader.at + 1) if state.flag == "own" else gone
        case 4 if rules.arena_before_summary:
            yield "reader: arena", gone if state.word else to(5)
        case 4 | 5:
            first = reader.at == 4 or rules.arena_before_summary
            yield "reader: a bucket", gone if (file.partner if first else file.home) else to(reader.at + 1)
        case 6 if rules.arena_before_summary:
            yield "reader: the other bucket", gone if file.home else to(7)
        case 6:
            yield "reader: arena", gone if state.word else to(7)
        case 7 if rules.arena_again:
            yield "reader: arena again", gone if state.word else to(8)
        case 7 if rules.notice_withdrawals:
            yield "reader: withdrawals again", gone if file.withdrawals != reader.withdrawals else to(8)
        case 7:
            yield "reader: goes on", to(8)
        case 8:
            another = state.named != reader.named and rules.notice_another_file
            yield "reader: which file, again", gone if another else to(9)
        case 9:
            another = state.edition != reader.edition and rules.notice_another_node
            broken = "" if another else "says that P is nowhere"
            yield "reader: says", gone._replace(broken=broken)


def check(rules: Rules, *without: str) -> tuple[list[str], int]:
    """Walk through every state, but for those behind steps ``without``. Returns the shortest way to the broken promise,
    empty when none can be broken; and how many states were seen."""
    on_disk, in_arena = State(), State(word=True, row=False, files=(File(), File(), File()))
    border = [on_disk, in_arena]
    came: dict[State, tuple[State, str] | None] = dict.fromkeys(border)
    while border:
        coming: list[State] = []
        for state in border:
            for name, after in steps(state, rules):
                if after in came or name in without:
                    continue
                came[after] = (state, name)
                if after.broken:
                    way, at = [after.broken], came[after]
                    while at is not None:
                        way.append(at[1])
                        at = came[at[0]]
                    return way[::-1], len(came)
                if not after.reader.over:
                    coming.append(after)
        border = coming
    return [], len(came)


def test_no_interleaving_makes_a_false_no() -> None:
    way, states = check(Rules())
    assert not way, "\n".join(way)
    assert states > 10_000


@pytest.mark.parametrize("rule", [name for name in Rules._fields if name != "arena_again"])
def test_every_rule_is_needed(rule: str) -> None:
    way, _ = check(Rules(**{rule: False}))
    assert way, "the model does not see what this rule is for"


def test_asking_the_arena_once_more_is_not_enough() -> None:
    """A page that was on disk, then in the arena alone, then on disk again is in neither where the reader looks."""
    way, _ = check(Rules(notice_withdrawals=False, arena_again=True), "node: promote, without a place", "node: Q comes")
    assert "node: evict" in way, "\n".join(way)
