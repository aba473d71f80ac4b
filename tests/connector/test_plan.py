import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan
from kvstore.errors import FormatError, InvalidRequestError

names = st.text(max_size=8)
pairs = st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.integers(0, 2**31)), max_size=4)


def plans(kind, *others):
    """With strategies for what a kind has besides pages and their group."""
    return st.lists(
        st.builds(
            lambda name, blocks, group, *rest: kind(
                name, tuple(key for key, _ in blocks), tuple(number for _, number in blocks), group, *rest
            ),
            names,
            pairs,
            st.integers(0, 8),
            *others,
        ),
        max_size=3,
    ).map(tuple)


@given(
    st.builds(
        StepPlan,
        plans(LoadPlan, names, st.booleans(), st.floats(0, 60), st.booleans()),
        plans(StorePlan, st.binary(min_size=32, max_size=32)),
        st.lists(names).map(tuple),
        st.lists(names).map(tuple),
        st.lists(st.lists(st.integers(0, 2**31)).map(tuple)).map(tuple),
        st.lists(st.integers(0, 2**31)).map(tuple),
        st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 2**31))).map(tuple),
    )
)
def test_a_plan_crosses_processes_unchanged(plan):
    assert StepPlan.from_bytes(plan.to_bytes()) == plan


@given(st.binary(max_size=40))
def test_bytes_that_are_no_plan_are_refused(data):
    try:
        plan = StepPlan.from_bytes(data)
    except FormatError:
        return
    assert isinstance(plan, StepPlan)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x94\x90\x90\x90",
        StepPlan().to_bytes() + b"x",
        b"\x97\x91\x98\xa1a\xc4\x01b\x90\x00\xa0\xc2\x00\xc2\x90\x90\x90\x90\x90\x90",  # a hash without a block
        b"\x97\x91\x98\xa1a\xc4\x00\x90\xff\xa0\xc2\x00\xc2\x90\x90\x90\x90\x90\x90",  # group -1
    ],
)
def test_damaged_plans_are_refused(data):
    with pytest.raises(FormatError, match=f"{len(data)} bytes are not the plan"):
        StepPlan.from_bytes(data)


def test_a_plan_has_a_block_for_each_hash():
    with pytest.raises(InvalidRequestError, match="request a: 1 hashes for 2 blocks"):
        LoadPlan("a", (b"h" * 32,), (1, 2))


@pytest.mark.parametrize("kind", [LoadPlan, StorePlan])
def test_a_plan_is_of_a_group(kind):
    assert kind("a", (), ()).group == 0
    with pytest.raises(InvalidRequestError, match="request a: a cache group must be at least 0, got -1"):
        kind("a", (), (), -1)


def test_an_empty_plan_is_false():
    assert not StepPlan()
    assert StepPlan(finished=("a",))
    assert StepPlan(overwritten=(1,))
    assert StepPlan(copies=((1, 2),))
