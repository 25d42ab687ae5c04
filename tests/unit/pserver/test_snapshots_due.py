"""When a snapshot is due, and how many pushes count for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.snapshots import pushes
from backstay.pserver.snapshots.due import Due, Every, is_due
from backstay.pserver.snapshots.pushes import PushCounts, PushesSince, PushLook

# Processes, by their instances.
A, B, C = 1, 2, 3


def look(counts: Mapping[int, int], *silent: int) -> PushLook:
    return PushLook(frozenset({*counts, *silent}), counts)


def since(then: PushLook, *later: PushLook) -> PushesSince:
    counted = PushesSince(then)
    for one in later:
        counted.look(one)
    return counted


@pytest.mark.parametrize(
    ("now", "busiest", "total"),
    [
        ({}, 0, 0),
        ({A: 10, B: 20}, 0, 0),
        ({A: 17, B: 22}, 7, 9),
        # One that does not answer tells nothing.
        ({B: 22}, 2, 2),
        # One that is new.
        ({A: 10, B: 20, C: 9}, 9, 9),
    ],
)
def test_what_came_since_counts(now: dict[int, int], busiest: int, total: int) -> None:
    counted = since(look({A: 10, B: 20}), look(now))
    assert (counted.busiest, counted.total) == (busiest, total)


def test_a_node_that_was_silent_at_first_does_not_count_its_whole_life() -> None:
    counted = since(look({B: 10}, A), look({A: 1_000_000, B: 11}))
    assert (counted.busiest, counted.total) == (1, 1)
    counted.look(look({A: 1_000_007, B: 11}))
    assert (counted.busiest, counted.total) == (7, 8)


def test_a_node_that_began_anew_keeps_what_it_had_counted() -> None:
    counted = since(look({A: 100, B: 20}), look({A: 150, B: 20}), look({B: 20, C: 4}))
    assert (counted.busiest, counted.total) == (50, 54)


@dataclass
class Process:
    """A process of the model: what it has applied, also before it was first in the cluster."""

    applied: int
    answers: bool = True


@given(st.data())
def test_no_count_is_above_what_was_applied_and_none_is_lost(data: st.DataObject) -> None:
    """Processes that apply, are silent, go and come, in any order."""
    number = st.integers(0, 1_000)
    processes = {
        each: Process(data.draw(number), data.draw(st.booleans()))
        for each in range(data.draw(st.integers(1, 4)))
    }

    def now() -> PushLook:
        counts = {each: one.applied for each, one in processes.items() if one.answers}
        return PushLook(frozenset(processes), counts)

    first = now()
    counted = PushesSince(first)
    # What each has applied since the first look, and what of it a look has seen.
    applied, seen = dict.fromkeys(processes, 0), dict.fromkeys(processes, 0)
    for _ in range(data.draw(st.integers(0, 20))):
        each = data.draw(st.sampled_from(sorted(applied)))
        what = data.draw(st.sampled_from(["push", "silent", "answers", "gone", "new", "look"]))
        if what == "new":
            new = len(applied)
            processes[new], applied[new], seen[new] = Process(0), 0, 0
        elif what == "look":
            counted.look(now())
            seen |= {one: applied[one] for one, state in processes.items() if state.answers}
        elif each in processes:
            if what == "push":
                more = data.draw(number)
                processes[each].applied += more
                applied[each] += more
            elif what == "gone":
                del processes[each]
            else:
                processes[each].answers = what == "answers"
    assert counted.total <= sum(applied.values())
    assert counted.busiest <= max(applied.values())
    if first.counts.keys() == first.members:
        assert counted.total == sum(seen.values())
        assert counted.busiest == max(seen.values())


@pytest.mark.parametrize(
    ("every", "seconds", "applied", "due"),
    [
        (Every(), 1e9, 10**12, False),
        (Every(seconds=60), 59.9, 10**12, False),
        (Every(seconds=60), 60.0, 0, True),
        (Every(pushes=1000), 1e9, 999, False),
        (Every(pushes=1000), 0.0, 1000, True),
        (Every(60, 1000), 60.0, 1, True),
        (Every(60, 1000), 1.0, 1000, True),
        # 600 of one node, 400 of another: together, or of the busiest.
        (Every(pushes=1000, by_busiest=True), 0.0, 1000, False),
        (Every(pushes=600, by_busiest=True), 0.0, 1000, True),
    ],
)
def test_a_snapshot_is_due_by_time_or_by_pushes(
    every: Every, seconds: float, applied: int, due: bool
) -> None:
    half = applied * 6 // 10
    assert (
        is_due(every, seconds, since(look({A: 0, B: 0}), look({A: half, B: applied - half}))) is due
    )


def test_pushes_count_from_the_moment_at_which_the_last_snapshot_was_begun() -> None:
    looks = [look({A: 10}), look({A: 14}), look({A: 15}), look({A: 15}), look({A: 19})]

    class Counts:
        async def look(self) -> PushLook:
            return looks.pop(0)

    async def scenario() -> list[bool]:
        counts: Any = Counts()
        due, every = Due(counts), Every(pushes=5)
        await due.begin(every, 0.0)
        first = [await due.is_due(every, 1.0), await due.is_due(every, 2.0)]
        await due.begin(every, 2.0)
        return [*first, await due.is_due(every, 3.0)]

    assert asyncio.run(scenario()) == [False, True, False]


def test_a_node_that_hangs_holds_up_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "ANSWER_S", 0.01)

    class Calls:
        async def node_stats(self, address: str) -> Any:
            if address == "hangs":
                await asyncio.Event().wait()
            return SimpleNamespace(data_plane_json=json.dumps({"pushes_applied": 7}))

    nodes = {
        name: SimpleNamespace(instance=instance, control_address=name)
        for instance, name in enumerate(("hangs", "b"), start=A)
    }
    view: Any = SimpleNamespace(snapshot=lambda: SimpleNamespace(members=nodes))
    calls: Any = Calls()
    counted = asyncio.run(asyncio.wait_for(PushCounts(view, calls).look(), 30.0))
    assert counted == PushLook(frozenset({A, B}), {B: 7})


@pytest.mark.parametrize("wrong", ["-1", "1.5", str(10**12 + 1)])
def test_a_number_of_pushes_out_of_range_is_refused_before_it_is_sent(wrong: str) -> None:
    words = ["export", "start", "a", "/served", "--every-pushes", wrong]
    refused = CliRunner().invoke(pserverctl, words)
    assert refused.exit_code == 2
    assert "--every-pushes" in refused.stderr
