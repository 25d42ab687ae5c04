"""The cluster of the Kubernetes tests: what ends and starts together, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes import processes
from tests.kubernetes.cluster import Cluster


def test_the_controllers_end_and_start_with_the_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(processes, "start", lambda name, *_: calls.append(f"start {name}"))
    monkeypatch.setattr(processes, "kill", lambda name: calls.append(f"kill {name}"))
    monkeypatch.setattr(Cluster, "_wait", lambda *_: calls.append("wait"))
    cluster = Cluster(tmp_path)
    cluster.kill_api_server()
    assert calls == ["kill api-server", "kill controller-manager", "kill scheduler"]
    calls.clear()
    cluster.start_api_server()
    # What they see first is an API server that answers.
    assert calls == [
        "start api-server",
        "wait",
        "start controller-manager",
        "start scheduler",
    ]
