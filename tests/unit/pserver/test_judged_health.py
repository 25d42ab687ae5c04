"""What a controller has written of a cluster is believed only while it can be of the present."""

from __future__ import annotations

import pytest

from backstay.consensus.records import ClusterHealthRecord
from backstay.pserver.client.inspection import judged_health

OK = ClusterHealthRecord("OK", "", ("ps-0", "ps-1"))
ROUTED = {"ps-0": 1, "ps-1": 2}


def test_a_controller_that_has_seen_the_living_processes_is_believed() -> None:
    assert judged_health(OK, controller="ps-0", routed=ROUTED, living=ROUTED) == OK
    # A node that does not answer is told by its own status.
    assert judged_health(OK, controller="ps-0", routed=ROUTED, living={"ps-0": 1}) == OK


def test_nobody_judges_without_a_controller() -> None:
    found = judged_health(OK, controller="", routed=ROUTED, living=ROUTED)
    assert found.cluster_status == "UNKNOWN"
    assert "no node is the controller" in found.reason


@pytest.mark.parametrize("controller", ["ps-0", ""])
def test_what_was_said_of_former_processes_is_not_of_those_that_run(controller: str) -> None:
    living = {"ps-0": 3, "ps-1": 4}
    found = judged_health(OK, controller=controller, routed=ROUTED, living=living)
    assert found.cluster_status == "UNKNOWN"
    assert "ps-0, ps-1" in found.reason or not controller


def test_a_trouble_that_the_controller_tells_stays() -> None:
    short = ClusterHealthRecord("UNHEALTHY", "8 slots have too few copies", ("ps-0",))
    living = {"ps-0": 1, "ps-1": 4}
    assert judged_health(short, controller="ps-0", routed=ROUTED, living=living) == short
    found = judged_health(short, controller="", routed=ROUTED, living=living)
    assert found.reason.endswith("before: 8 slots have too few copies")


def test_a_routing_that_is_newer_than_the_record_is_believed() -> None:
    lost = judged_health(OK, controller="ps-0", routed=ROUTED, living=ROUTED, lost=32, short=32)
    assert lost.cluster_status == "UNHEALTHY"
    assert "32 slots lost all copies" in lost.reason
    short = judged_health(OK, controller="ps-0", routed=ROUTED, living=ROUTED, short=8)
    assert short.cluster_status == "UNHEALTHY"
    assert "8 slots have too few copies" in short.reason
