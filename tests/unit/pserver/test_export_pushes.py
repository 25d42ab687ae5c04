"""How many pushes came between two counts."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.exports import pushes
from backstay.pserver.exports.pushes import PushCounts, most_since


@pytest.mark.parametrize(
    ("now", "most"),
    [
        ({}, 0),
        ({"a": 10, "b": 20}, 0),
        ({"a": 17, "b": 22}, 7),
        # One that does not answer tells nothing.
        ({"b": 22}, 2),
        # One that began anew, and one that is new.
        ({"a": 4, "b": 22}, 4),
        ({"a": 10, "b": 20, "c": 9}, 9),
    ],
)
def test_the_busiest_node_counts(now: dict[str, int], most: int) -> None:
    assert most_since({"a": 10, "b": 20}, now) == most


def test_a_node_that_hangs_holds_up_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "ANSWER_S", 0.01)

    class Calls:
        async def node_stats(self, address: str) -> Any:
            if address == "hangs":
                await asyncio.Event().wait()
            return SimpleNamespace(data_plane_json=json.dumps({"pushes_applied": 7}))

    nodes = {name: SimpleNamespace(node_id=name, control_address=name) for name in ("hangs", "b")}
    view: Any = SimpleNamespace(snapshot=lambda: SimpleNamespace(members=nodes))
    calls: Any = Calls()
    counted = asyncio.run(asyncio.wait_for(PushCounts(view, calls).now(), 30.0))
    assert counted == {"b": 7}


@pytest.mark.parametrize("wrong", ["-1", "1.5", str(10**12 + 1)])
def test_a_number_of_pushes_out_of_range_is_refused_before_it_is_sent(wrong: str) -> None:
    words = ["export", "start", "a", "/served", "--every-pushes", wrong]
    refused = CliRunner().invoke(pserverctl, words)
    assert refused.exit_code == 2
    assert "--every-pushes" in refused.stderr
