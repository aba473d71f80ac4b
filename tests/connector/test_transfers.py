"""The state table of transfers: which step leads from which state to which, with no thread and no clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.connector.plan import StorePlan
from kvstore.connector.transfers import State, Transfer, TransferTable

BLOCKS = (1, 2, 3)
DEADLINE = 5.0

Table = TransferTable[StorePlan]
Stores = Transfer[StorePlan]
Step = Callable[[Table, Stores], object]


def new_transfer(request_id: str = "a", blocks: tuple[int, ...] = BLOCKS) -> Stores:
    hashes = tuple(bytes([number]) * 32 for number in blocks)
    return Transfer(StorePlan(request_id, hashes, blocks), 0.0, DEADLINE)


def transfer_in(table: Table, state: State) -> Stores:
    """A transfer that has come to this state."""
    transfer = new_transfer()
    table.submit(transfer)
    if state is not State.QUEUED:
        assert table.take_up(0.0) is transfer
    if state is State.COPYING:
        assert table.begin_copy(transfer)
    elif state is State.UNCONFIRMED:
        table.put_down(transfer, unconfirmed=True)
    assert transfer.state is state
    return transfer


STEPS: dict[str, Step] = {
    "revoked": lambda table, transfer: table.revoke(["a"]),
    "withdrawn": lambda table, transfer: table.withdraw(BLOCKS),
    "late": lambda table, transfer: table.give_up_late(DEADLINE),
    "given up": lambda table, transfer: table.give_up(transfer),
    "stopped": lambda table, transfer: table.stop(),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", [State.QUEUED, State.CALLING, State.UNCONFIRMED])
def test_a_transfer_that_touches_no_block_ends_at_once(state: State, step: str) -> None:
    ended: list[None] = []
    table: Table = TransferTable(9, lambda: ended.append(None))
    transfer = transfer_in(table, state)
    STEPS[step](table, transfer)
    assert transfer.over
    assert len(ended) == 1
    assert not table.live()
    assert not table.begin_copy(transfer), "the thread would touch blocks that are others' now"
    table.put_down(transfer, unconfirmed=True)
    assert table.take_ended() == [transfer]


@pytest.mark.parametrize(
    ("step", "now", "behind_the_copy"),
    [
        ("revoked", State.OVER, State.OVER),
        ("withdrawn", State.OVER, State.OVER),
        ("late", State.COPYING, State.CALLING),
        ("given up", State.COPYING, State.OVER),
        ("stopped", State.COPYING, State.OVER),
    ],
)
def test_a_copy_is_waited_for_unless_its_blocks_are_given_away(step: str, now: State, behind_the_copy: State) -> None:
    table: Table = TransferTable(9, lambda: None)
    transfer = transfer_in(table, State.COPYING)
    STEPS[step](table, transfer)
    assert transfer.state is now
    assert table.is_copying, "the thread is at it, whatever its state"
    table.end_copy()
    assert transfer.state is behind_the_copy
    assert not table.is_copying


class UnderWay:
    """A copy on a device."""

    is_done = False

    def wait(self) -> None:
        raise AssertionError("nobody waits under the table's lock")

    end = wait


@pytest.mark.parametrize(
    ("step", "now", "behind_the_copies"),
    [
        ("revoked", State.OVER, State.OVER),
        ("withdrawn", State.OVER, State.OVER),
        ("late", State.COPYING, State.CALLING),
        ("given up", State.COPYING, State.OVER),
        ("stopped", State.COPYING, State.OVER),
    ],
)
def test_copies_that_go_on_while_the_thread_calls_are_waited_for_and_the_call_is_not(
    step: str, now: State, behind_the_copies: State
) -> None:
    table: Table = TransferTable(9, lambda: None)
    transfer = transfer_in(table, State.COPYING)
    first, second = UnderWay(), UnderWay()
    for copy in (first, second):
        table.add_copy(copy)
        table.end_copy()
        assert transfer.state is State.COPYING
        table.begin_copy(transfer)
    table.end_copy()
    STEPS[step](table, transfer)
    assert transfer.state is now
    assert table.is_copying
    assert table.copies_by_itself
    first.is_done = True
    table.look()
    assert transfer.state is now
    assert not table.begin_copy(transfer) or step == "late", "the thread would go on with it"
    table.end_copy()
    second.is_done = True
    assert not table.is_copying
    table.look()
    assert transfer.state is behind_the_copies
    assert table.advance(transfer, range(1), 0.0) == (step == "late"), (
        "pages that nobody wants any more count for nothing"
    )


@pytest.mark.parametrize("step", ["late", "given up", "stopped"])
def test_whoever_ends_a_transfer_finds_out_that_its_copies_are_done(step: str) -> None:
    table: Table = TransferTable(9, lambda: None)
    transfer = transfer_in(table, State.COPYING)
    copy = UnderWay()
    table.add_copy(copy)
    table.end_copy()
    copy.is_done = True
    assert transfer.state is State.COPYING
    STEPS[step](table, transfer)
    assert transfer.over


def test_what_is_left_of_a_transfer_takes_its_place() -> None:
    table: Table = TransferTable(9, lambda: None)
    first = transfer_in(table, State.COPYING)
    table.submit(new_transfer("b", (4, 5)))
    table.advance(first, range(1), 0.0)
    assert table.withdraw([1, 2]) == 1, "what was dealt with does not count"
    table.end_copy()
    assert first.over
    assert table.take_ended() == [], "the one that goes on is reported"
    assert [transfer.plan.block_ids for transfer in table.in_state(State.QUEUED)] == [(3,), (4, 5)]


def test_others_pass_one_that_was_postponed() -> None:
    table: Table = TransferTable(9, lambda: None)
    first, others = transfer_in(table, State.CALLING), [new_transfer("b"), new_transfer("c")]
    for transfer in others:
        table.submit(transfer)
    table.postpone(first, 1.0)
    table.put_down(first, unconfirmed=False)  # as the thread does behind each turn
    assert table.take_up(0.9) is others[0]
    assert table.take_up(1.0) is others[1]
    assert table.take_up(0.9) is None
    assert table.take_up(1.0) is first


def test_a_full_table_and_one_at_rest_take_nothing() -> None:
    table: Table = TransferTable(1, lambda: None)
    assert table.submit(new_transfer())
    refused = new_transfer("b")
    assert not table.submit(refused)
    assert table.take_up(0.0) is not None
    assert table.submit(new_transfer("c")), "one that was taken up does not wait"
    table.is_resting = True
    table.take_up(0.0)
    assert not table.submit(new_transfer("d"))
    assert table.take_ended()[0] is refused
