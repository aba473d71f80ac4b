from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.free_queue import FreeKVCacheBlockQueue

COUNT = 6


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


@given(
    st.lists(
        st.tuples(st.sampled_from(["popleft_n", "remove", "append_n", "prepend_n"]), st.integers(0, COUNT - 1)),
        max_size=40,
    )
)
@settings(deadline=None)
def test_the_queue_behaves_like_a_list(operations):
    blocks = [KVCacheBlock(number) for number in range(COUNT)]
    queue, model = FreeKVCacheBlockQueue(blocks), list(range(COUNT))
    for name, number in operations:
        outside = [block for block in blocks if block.block_id not in model]
        if name == "popleft_n":
            count = min(number, len(model))
            assert ids(queue.popleft_n(count)) == model[:count]
            del model[:count]
        elif name == "remove" and number in model:
            queue.remove(blocks[number])
            model.remove(number)
        elif name == "append_n":
            queue.append_n(outside[:number])
            model.extend(ids(outside[:number]))
        elif name == "prepend_n":
            queue.prepend_n(outside[:number])
            model[:0] = ids(outside[:number])
        assert ids(queue) == model
        assert len(queue) == len(model)
        assert all(block.prev_free is block.next_free is None for block in blocks if block.block_id not in model)


@pytest.mark.parametrize(
    "misuse",
    [lambda queue, block: queue.remove(block), lambda queue, block: queue.popleft_n(1)],
    ids=["remove a block that is not in it", "take more than there are"],
)
def test_misuse_is_noticed(misuse: Callable[[FreeKVCacheBlockQueue, KVCacheBlock], None]):
    with pytest.raises(AssertionError):
        misuse(FreeKVCacheBlockQueue([]), KVCacheBlock(1))
