"""The states of a task: the table in the code, what it refuses, and its drawing in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backstay.job_engine.task import TRANSITIONS, Event, IllegalTransition, State, Task
from backstay.job_engine.task_store import TaskBits, TaskStore

PAGE = Path(__file__).resolve().parents[3] / "docs" / "internals" / "jobs.md"


def drawn() -> set[tuple[str, str, str]]:
    """The transitions that the page draws: state, event, state."""
    page = PAGE.read_text(encoding="utf-8")
    drawing = re.search(r"^## A task\n.*?```mermaid\n(.*?)```", page, re.S | re.M)
    assert drawing
    arrows = re.findall(r"^ *(\w+) --> (\w+): (.+)$", drawing[1], re.M)
    return {
        (before, event.strip(), after)
        for before, after, events in arrows
        for event in events.split(",")
    }


def test_the_drawing_is_the_table() -> None:
    assert drawn() == {
        (before.name.lower(), event.name.lower(), after.name.lower())
        for before, events in TRANSITIONS.items()
        for event, after in events.items()
    }


def test_each_state_can_be_reached_and_all_but_done_can_be_left() -> None:
    assert TRANSITIONS.keys() == set(State)
    reached = {after for events in TRANSITIONS.values() for after in events.values()}
    assert reached == set(State)
    assert [state for state, events in TRANSITIONS.items() if not events] == [State.DONE]
    assert {event for events in TRANSITIONS.values() for event in events} == set(Event)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_an_event_that_the_table_does_not_allow_raises_and_changes_nothing(
    state: State, event: Event
) -> None:
    store = TaskStore(TaskBits(1), range(1), None)
    task = Task(0, state)
    before = store.counts
    if event in TRANSITIONS[state]:
        store.step(task, event)
        assert task.state is TRANSITIONS[state][event]
        return
    with pytest.raises(IllegalTransition, match=f"task 0: {event.name} while {state.name}"):
        store.step(task, event)
    assert task.state is state
    assert store.counts == before
    assert not store.done
