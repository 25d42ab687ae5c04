"""Plans as records and as messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay.consensus.records.messages import plan_from_message, plan_to_message
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.errors import InvalidRequest, ProtocolError

PLAN = ResizePlan(
    "ab",
    "resize",
    3,
    leaving=(LeavingNode("ps-3", 7),),
    stop=True,
    pause=True,
    wait_s=60,
    state="moving",
    reason="2 of 3 copies are still to move",
    moves_total=3,
    moves_left=2,
    started="2026-11-21T10:00:00Z",
)


def test_a_plan_comes_out_of_a_message_without_instances() -> None:
    there = plan_from_message(plan_to_message(PLAN))
    assert there == replace(PLAN, leaving=(LeavingNode("ps-3", 0),))


def test_a_message_of_a_later_version_is_refused() -> None:
    for name, value in (("kind", "merge"), ("state", "thinking"), ("nodes", 0)):
        message = plan_to_message(PLAN)
        setattr(message, name, value)
        with pytest.raises(ProtocolError):
            plan_from_message(message)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"plan_id": ""}, "id is empty"),
        ({"kind": "merge"}, "unknown kind"),
        ({"state": "thinking"}, "unknown state"),
        ({"nodes": 0}, "0 nodes"),
        ({"wait_s": -1}, "wait_s"),
        ({"moves_left": -1}, "moves_left"),
        ({"leaving": (LeavingNode("a", 0), LeavingNode("a", 3))}, "twice"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        replace(PLAN, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("leaving", ['["ps-3"]', '[["ps-3"]]', '[["ps-3","7"]]', '[[7,"ps-3"]]'])
def test_leaving_is_read_strictly(leaving: str) -> None:
    text = PLAN.to_json().replace('[["ps-3",7]]', leaving)
    with pytest.raises(InvalidRequest, match="leaving"):
        ResizePlan.from_json(text)


def test_a_plan_is_in_force_as_long_as_its_state_says() -> None:
    assert PLAN.lets_go("ps-3", 7)
    assert PLAN.lets_go("ps-3", 8)
    assert not PLAN.lets_go("ps-2", 7)
    done = replace(PLAN, state="done")
    assert done.lets_go("ps-3", 7)
    assert not done.lets_go("ps-3", 8)
    assert replace(done, stop=False).lets_go("ps-3", 8)
    assert not replace(PLAN, state="cancelled").lets_go("ps-3", 7)
    assert not replace(PLAN, state="failed").lets_go("ps-3", 7)
    assert PLAN.pause_reason
    assert not done.pause_reason
    assert not replace(PLAN, pause=False).pause_reason
    assert not replace(PLAN, state="waiting_for_nodes").pause_reason
