"""Which slots of an element a follower takes, and when it begins anew."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backstay.checkpoint.chain import Followed, after_delta, after_full, begins_anew
from tests.unit.serving.elements import base, increment


def begun() -> Followed:
    return after_full(None, base()).state


def test_a_base_is_taken_whole_and_an_increment_behind_it() -> None:
    first = after_full(None, base())
    assert first.slots.tolist() == [0, 1]
    step = after_delta(first.state, increment(8, [3, 5]))
    assert step.slots.tolist() == [1]
    assert step.state.position.tolist() == [3, 5]
    assert step.state.as_of.tolist() == [200.0, 200.0]


def test_what_is_missing_is_named_and_nothing_is_taken() -> None:
    state = begun()
    step = after_delta(state, increment(9, [5, 5], since=[3, 4]))
    assert "inc-000009-3fa9c1 does not follow base-000007-3fa9c1" in step.missing
    assert "1 slots (1, ...)" in step.missing
    assert step.state is state
    # A slot that has all its rows needs nothing before it.
    assert not after_delta(state, increment(9, [5, 5], since=[3, 0], whole=[0, 1])).missing


def test_no_slot_goes_back() -> None:
    state = after_delta(begun(), increment(9, [9, 4])).state
    step = after_delta(state, increment(10, [7, 6], since=[3, 3], begun=150.0))
    assert step.slots.tolist() == [1]
    assert step.state.position.tolist() == [9, 6]


def test_slots_that_were_left_out_stay_as_old_as_they_are() -> None:
    step = after_delta(begun(), increment(8, [5, 3], left_out=[1]))
    assert step.state.as_of.tolist() == [200.0, 100.0]


def test_of_a_base_beside_the_increments_only_what_is_newer_is_taken() -> None:
    state = after_delta(begun(), increment(8, [9, 4])).state
    beside = base(9, [8, 8], chain=state.chain, begun=300.0)
    assert not begins_anew(state, beside)
    step = after_full(state, beside)
    assert step.slots.tolist() == [1]
    assert step.state.position.tolist() == [9, 8]
    assert step.state.number == 9
    assert step.state.as_of.tolist() == [200.0, 300.0]


def test_a_chain_begins_with_a_newer_base_of_no_older_rows() -> None:
    state = after_full(None, base(generation=2)).state
    assert begins_anew(None, base())
    assert begins_anew(state, base(20, generation=3))
    assert begins_anew(state, base(20, generation=2))
    assert not begins_anew(state, base(20, generation=1)), "of a controller that was replaced"
    assert not begins_anew(state, base(5, generation=3))
    assert begins_anew(state, base(20, uid="cd")), "another cluster's"
    assert begins_anew(state, base(5, generation=2, begun=300.0)), "numbers may begin anew"


slots = st.lists(st.integers(0, 20), min_size=2, max_size=2)


@given(st.lists(st.tuples(slots, slots, st.booleans()), max_size=30))
def test_positions_grow_without_a_gap(told: list[tuple[list[int], list[int], bool]]) -> None:
    state = begun()
    for number, (since, more, is_whole) in enumerate(told):
        position = [a + b for a, b in zip(since, more, strict=True)]
        whole = [1, 1] if is_whole else [0, 0]
        one = increment(8 + number, position, since=since, whole=whole)
        step = after_delta(state, one)
        assert (step.state.position >= state.position).all()
        taken = np.zeros(2, np.bool_)
        taken[step.slots] = True
        reaches = np.array(since) <= state.position
        assert (reaches | (np.array(whole) == 1))[taken].all()
        assert (step.state.position == np.where(taken, position, state.position)).all()
        state = step.state
