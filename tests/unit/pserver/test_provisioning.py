"""What a plan asks of the process that starts nodes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.pserver.provisioning import provision


class Counted:
    """A provisioner whose nodes are a number."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.gone: list[str] = []

    def running(self) -> int:
        return self.count

    def start(self, count: int) -> None:
        self.count += count

    def ended(self, node_ids: Collection[str]) -> None:
        self.gone += node_ids


PLAN = ResizePlan("p", "resize", 5, stop=True, state="waiting_for_nodes")


def test_what_a_plan_waits_for_is_started_once() -> None:
    nodes = Counted(3)
    provision(PLAN, nodes)
    provision(PLAN, nodes)
    assert nodes.count == 5
    provision(replace(PLAN, nodes=4), nodes)
    assert nodes.count == 5


def test_nothing_is_started_for_a_plan_that_does_not_wait() -> None:
    nodes = Counted(3)
    for state in ("moving", "done", "cancelled", "failed"):
        provision(replace(PLAN, state=state), nodes)
    assert (nodes.count, nodes.gone) == (3, [])


def test_those_that_a_plan_has_ended_are_cleaned_up_when_it_is_done() -> None:
    leaving = (LeavingNode("ps-3", 7),)
    nodes = Counted(4)
    provision(replace(PLAN, leaving=leaving, state="moving"), nodes)
    provision(replace(PLAN, leaving=leaving, state="done", stop=False), nodes)
    assert nodes.gone == []
    provision(replace(PLAN, leaving=leaving, state="done"), nodes)
    assert nodes.gone == ["ps-3"]
