"""The store's state machine against a plain model, for any sequence of commands."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from backstay.consensus.store import (
    Compare,
    Delete,
    Event,
    Put,
    Txn,
    absent,
    exists,
    mod_revision_is,
    value_is,
    version_is,
)
from backstay.consensus.store.state import StoreState, command, execute, transaction_command
from backstay.errors import BackstayError

KEYS = st.sampled_from(["a", "a/1", "a/2", "b"])
VALUES = st.sampled_from(["0", "1", "ü"])
LEASES = st.integers(0, 4)
COMPARES = st.one_of(
    st.builds(absent, KEYS),
    st.builds(exists, KEYS),
    st.builds(value_is, KEYS, VALUES),
    st.builds(version_is, KEYS, st.integers(0, 3)),
    st.builds(mod_revision_is, KEYS, st.integers(0, 9)),
)
OPERATIONS = st.one_of(st.builds(Put, KEYS, VALUES, LEASES), st.builds(Delete, KEYS))
BRANCHES = st.lists(OPERATIONS, max_size=3, unique_by=lambda each: each.key).map(tuple)
COMMANDS = st.lists(
    st.one_of(
        st.builds(Txn, st.lists(COMPARES, max_size=2).map(tuple), BRANCHES, BRANCHES).map(
            transaction_command
        ),
        st.builds(command, st.just("grant"), st.integers(100, 400)),
        st.builds(command, st.just("keepalive"), LEASES),
        st.builds(command, st.just("revoke"), LEASES),
        st.builds(command, st.just("lead"), st.integers(1, 3)),
        st.builds(command, st.just("tick"), st.integers(1, 3), st.integers(0, 300)),
    ),
    max_size=40,
)


def carry_out(state: StoreState, text: str) -> object:
    """Return the result, or the name of the error."""
    try:
        return execute(state, text)
    except BackstayError as error:
        return type(error).__name__


@given(COMMANDS)
def test_the_same_commands_give_the_same_results_and_state(commands: list[str]) -> None:
    one, two = StoreState(), StoreState()
    for text in commands:
        assert carry_out(one, text) == carry_out(two, text)
    assert one.to_json() == two.to_json()
    assert one.events_since("", 2) == two.events_since("", 2)


@given(COMMANDS, st.integers(0, 40))
def test_a_restored_state_goes_on_as_the_first(commands: list[str], at: int) -> None:
    one, two = StoreState(), StoreState()
    for text in commands[:at]:
        carry_out(one, text)
    two.restore(json.loads(json.dumps(one.to_json())))
    for text in commands[at:]:
        assert carry_out(one, text) == carry_out(two, text)
    assert one.to_json() == two.to_json()


@given(COMMANDS, st.sampled_from(["", "a", "a/", "b"]))
def test_events_lead_from_nothing_to_what_is_there(commands: list[str], prefix: str) -> None:
    state = StoreState()
    for text in commands:
        carry_out(state, text)
    batches = state.events_since(prefix, 2)
    revisions = [batch.revision for batch in batches]
    assert revisions == sorted(set(revisions))
    items: dict[str, Event] = {}
    for batch in batches:
        for event in batch.events:
            assert event.revision == batch.revision
            assert event.key.startswith(prefix)
            if event.kind == "put":
                items[event.key] = event
            else:
                del items[event.key]
    found = state.range(prefix)
    assert [item.key for item in found.items] == sorted(items)
    for item in found.items:
        event = items[item.key]
        assert (item.value, item.mod_revision) == (event.value, event.revision)
        assert (item.create_revision, item.version) == (event.create_revision, event.version)


@given(COMMANDS)
def test_a_key_with_a_lease_is_there_only_while_the_lease_is(commands: list[str]) -> None:
    state = StoreState()
    for text in commands:
        before = state.revision
        carry_out(state, text)
        assert state.revision - before >= 0
        alive = state.lease_ids()
        assert all(not item.lease or item.lease in alive for item in state.range("").items)
        end_ms = state.next_lease_end_ms()
        assert end_ms is None or end_ms > state.now_ms


@given(COMMANDS, COMPARES)
def test_a_comparison_holds_or_its_branch_is_not_done(
    commands: list[str], condition: Compare
) -> None:
    state = StoreState()
    for text in commands:
        carry_out(state, text)
    before = state.to_json()
    result = state.transact(Txn((condition,), (Put("new", "1"),), ()))
    item = state.get("new")
    assert (item is not None and item.mod_revision == result.revision) == result.succeeded
    if not result.succeeded:
        assert state.to_json() == before
