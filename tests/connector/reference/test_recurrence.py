from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvstore.connector.reference.batch import BatchedSequence
from kvstore.connector.reference.recurrence import PagedStates

BLOCK_SIZE = 4
CHANNELS = 6


def inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, CHANNELS, generator=generator), torch.randn(tokens, CHANNELS, generator=generator)


def in_closed_form(keep: torch.Tensor, brought: torch.Tensor) -> torch.Tensor:
    """Each token's share in each later state, in float64."""
    keep, brought = keep.double(), brought.double()
    states = []
    for end in range(1, len(keep) + 1):
        shares = [brought[start] * keep[start + 1 : end].prod(0) for start in range(end)]
        states.append(torch.stack(shares).sum(0))
    return torch.stack(states).float()


def run(states: torch.Tensor, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
    """Tokens ``start`` … ``end`` of one sequence."""
    keep, brought = inputs(30)
    batch = PagedStates([BatchedSequence(range(start, end), start, [blocks])], 0, BLOCK_SIZE)
    return batch(states, keep[start:end], brought[start:end])


@pytest.fixture
def states() -> torch.Tensor:
    return torch.full((20, CHANNELS), torch.nan)


def test_each_state_is_what_all_tokens_before_it_leave_behind(states: torch.Tensor) -> None:
    torch.testing.assert_close(run(states, range(1, 9), 0, 30), in_closed_form(*inputs(30)))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunks_change_nothing_to_the_last_bit(states: torch.Tensor, chunk: int) -> None:
    whole = run(states.clone(), range(1, 9), 0, 30)

    parts = [run(states, range(1, 9), start, min(30, start + chunk)) for start in range(0, 30, chunk)]

    assert torch.equal(torch.cat(parts), whole)


def test_a_block_holds_the_state_behind_its_last_token(states: torch.Tensor) -> None:
    outputs = run(states, [5, 3, 8], 0, 10)

    assert torch.equal(states[[5, 3, 8]], outputs[[3, 7, 9]])
    assert states[[0, 1, 2, 4, 6, 7]].isnan().all()


def test_a_request_goes_on_from_a_state_that_it_shares_and_leaves_it_as_it_is(states: torch.Tensor) -> None:
    whole = run(states, [1, 2, 3, 4], 0, 16)
    shared = states[2].clone()

    # The states before the hit are gone: nothing needs them.
    again = run(states, [0, 2, 7, 8], 8, 16)

    assert torch.equal(again, whole[8:])
    assert torch.equal(states[2], shared)
    assert torch.equal(states[[7, 8]], states[[3, 4]])


def test_no_state_is_kept_where_the_null_block_stands(states: torch.Tensor) -> None:
    run(states, [0, 0, 6], 0, 12)

    assert states[[0, 1, 2]].isnan().all()
    assert not states[6].isnan().any()


def test_a_state_that_is_gone_is_not_taken_for_one(states: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="the state behind token 8 is gone"):
        run(states, [1, 0, 3], 8, 12)


def test_sequences_of_a_batch_do_not_see_each_other(states: torch.Tensor) -> None:
    first, second = inputs(9), inputs(5, seed=1)
    batch = PagedStates(
        [BatchedSequence(range(9), 0, [(), (1, 2, 3)]), BatchedSequence(range(5), 0, [(), (4, 5)])], 1, BLOCK_SIZE
    )

    outputs = batch(states, torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]]))

    torch.testing.assert_close(outputs, torch.cat([in_closed_form(*first), in_closed_form(*second)]))
