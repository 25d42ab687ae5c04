"""The store's state machine: revisions, leases in logical time, history, saving and restoring."""

from __future__ import annotations

import json

import pytest

from backstay.consensus.store import Delete, Put, Txn, absent
from backstay.consensus.store.embedded_raft import without_known_entries
from backstay.consensus.store.state import (
    READ_MAX,
    StoreState,
    command,
    execute,
    transaction_command,
)
from backstay.errors import InvalidRequest, LeaseLost, WatchLost


def put(state: StoreState, key: str, value: str = "", lease: int = 0) -> int:
    return state.transact(Txn(success=(Put(key, value, lease),))).revision


def test_only_changes_get_a_revision() -> None:
    state = StoreState()
    assert put(state, "a") == 2
    assert state.transact(Txn(success=(Delete("b"),))).revision == 2
    assert state.transact(Txn((absent("a"),), (Put("a", ""),))).revision == 2
    assert put(state, "b") == 3
    assert [batch.revision for batch in state.events_since("", 1 + 1)] == [2, 3]


def test_a_lease_lives_its_time_and_not_longer() -> None:
    state = StoreState(lease_slack_ms=50)
    lease = state.grant(1000)
    put(state, "k", lease=lease.id)
    state.advance(1049)
    assert state.get("k") is not None
    assert state.keepalive(lease.id) == 1000
    state.advance(1049)
    assert state.get("k") is not None
    state.advance(1)
    assert state.get("k") is None
    with pytest.raises(LeaseLost):
        state.keepalive(lease.id)
    with pytest.raises(InvalidRequest, match="cannot go back"):
        state.advance(-1)


def test_only_the_newest_leader_drives_the_time() -> None:
    state = StoreState()
    lease = state.grant(1000)
    state.take_lead(3, 0)
    assert state.tick(3, 900)
    state.take_lead(5, 0)
    # What the old leader had sent before it knew.
    assert not state.tick(3, 900)
    state.take_lead(3, 0)
    assert state.tick(5, 499)
    assert state.keepalive(lease.id) == 1000
    with pytest.raises(InvalidRequest, match="cannot go back"):
        state.take_lead(6, -1)


@pytest.mark.parametrize(
    ("passed_ms", "silent_ms", "left_ms"),
    [
        (100, 0, 900),
        # The time without a leader counts: one that hung and was replaced is not kept longer.
        (100, 300, 600),
        # Half of it is left, so that those who live can renew it.
        (100, 450, 500),
        (900, 100, 500),
        # No client could renew for long: all of it.
        (100, 501, 1000),
        (900, 3_600_000, 1000),
    ],
)
def test_a_new_leader_counts_the_silence_and_leaves_time_to_renew(
    passed_ms: int, silent_ms: int, left_ms: int
) -> None:
    state = StoreState()
    lease = state.grant(1000)
    state.take_lead(1, 0)
    assert state.tick(1, passed_ms)
    state.take_lead(2, silent_ms)
    assert state.tick(2, left_ms - 1)
    assert state.lease_ids() == (lease.id,)
    assert state.tick(2, 1)
    assert state.lease_ids() == ()


def test_a_put_that_names_a_lost_lease_does_nothing_of_its_transaction() -> None:
    state = StoreState()
    with pytest.raises(LeaseLost):
        state.transact(Txn(success=(Put("a", "1"), Put("b", "2", 7))))
    assert state.range("").items == ()
    assert state.revision == 1


def test_history_has_its_limit_and_says_when_it_is_passed() -> None:
    state = StoreState(history_max=3)
    for number in range(5):
        put(state, "k", f"{number}")
    assert state.compacted_revision == 3
    assert [batch.revision for batch in state.events_since("k", 4)] == [4, 5, 6]
    with pytest.raises(WatchLost, match="keeps those after 3"):
        state.events_since("k", 3)
    assert state.events_since("k", 7) == ()
    assert [batch.revision for batch in state.events_since("k", 4, limit=2)] == [4, 5]


def test_a_watch_reads_on_behind_what_it_has_seen_or_passed_over() -> None:
    state = StoreState(history_max=3)
    put(state, "mine", "1")
    for number in range(2):
        put(state, "other", f"{number}")
    batches, after = state.read_on("mine", 2)
    assert [batch.revision for batch in batches] == [2]
    assert after == state.revision + 1
    # What it passed over may be forgotten: nothing of its own was lost.
    for number in range(5):
        put(state, "other", f"{number}")
        batches, after = state.read_on("mine", after)
        assert batches == ()
    assert state.compacted_revision > 4
    put(state, "mine", "2")
    batches, after = state.read_on("mine", after)
    assert [event.value for batch in batches for event in batch.events] == ["2"]
    # One that is ahead of this member waits.
    assert state.read_on("mine", 100) == ((), 100)


def test_a_watch_with_much_to_read_goes_on_where_it_stopped() -> None:
    state = StoreState()
    for number in range(READ_MAX + 1):
        put(state, "k", f"{number}")
    batches, after = state.read_on("k", 2)
    assert (len(batches), after) == (READ_MAX, READ_MAX + 2)
    batches, after = state.read_on("k", after)
    assert [event.value for batch in batches for event in batch.events] == [f"{READ_MAX}"]
    assert after == state.revision + 1


def test_a_large_history_is_limited_by_its_size() -> None:
    state = StoreState()
    for _ in range(70):
        put(state, "k", "x" * 1_000_000)
    with pytest.raises(WatchLost):
        state.events_since("k", 2)
    assert state.events_since("k", 60)


def test_what_is_restored_goes_on_the_same() -> None:
    state = StoreState()
    lease = state.grant(1000)
    put(state, "k", "v", lease.id)
    state.advance(600)
    state.take_lead(2, 0)
    other = StoreState()
    other.restore(json.loads(json.dumps(state.to_json())))
    assert other.to_json() == state.to_json()
    with pytest.raises(WatchLost):
        other.events_since("", 2)
    assert other.grant(1000).id == lease.id + 1
    other.tick(2, 1000)
    assert other.get("k") is None
    for wrong in ({}, {"format": 2}, state.to_json() | {"items": [{"key": 1}]}):
        with pytest.raises(InvalidRequest, match="store state"):
            other.restore(wrong)


def test_a_command_of_another_version_is_refused() -> None:
    state = StoreState()
    for text in ('["sing"]', "{}", '["transaction",[],[["burn","k"]],[]]', "[]", '["tick","x"]'):
        with pytest.raises(InvalidRequest):
            execute(state, text)
    execute(state, transaction_command(Txn((absent("k"),), (Put("k", "ü"),), (Delete("k"),))))
    item = state.get("k")
    assert item is not None
    assert item.value == "ü"
    assert execute(state, command("barrier")) is None


LOG = [(b"a", 5, 1), (b"b", 6, 2), (b"c", 7, 2)]


@pytest.mark.parametrize(
    ("previous", "entries", "leader_term", "expected"),
    [
        # New entries only: unchanged.
        ((7, 2), [(b"d", 8, 2)], 2, ((7, 2), [(b"d", 8, 2)])),
        # Known ones are skipped.
        ((5, 1), [(b"b", 6, 2), (b"c", 7, 2), (b"d", 8, 2)], 2, ((7, 2), [(b"d", 8, 2)])),
        # All known, and more of this leader's: nothing is to be deleted.
        ((5, 1), [(b"b", 6, 2)], 2, ((7, 2), [])),
        # All known, and more that another leader made: those may go.
        ((5, 1), [(b"b", 6, 2)], 3, ((6, 2), [])),
        # A conflict is left to be settled behind the last entry that is the same.
        ((5, 1), [(b"b", 6, 2), (b"x", 7, 3)], 3, ((6, 2), [(b"x", 7, 3)])),
        # No common ground: unchanged.
        ((9, 2), [(b"e", 10, 2)], 2, ((9, 2), [(b"e", 10, 2)])),
        ((6, 1), [(b"x", 7, 1)], 3, ((6, 1), [(b"x", 7, 1)])),
    ],
)
def test_entries_that_are_there_already_are_not_deleted(
    previous: tuple[int, int],
    entries: list[tuple[bytes, int, int]],
    leader_term: int,
    expected: tuple[tuple[int, int], list[tuple[bytes, int, int]]],
) -> None:
    message = {
        "type": "append_entries",
        "term": leader_term,
        "prevLogIdx": previous[0],
        "prevLogTerm": previous[1],
        "entries": entries,
    }
    changed = without_known_entries(message, LOG)
    assert ((changed["prevLogIdx"], changed["prevLogTerm"]), changed["entries"]) == expected
