"""``examples/serving``: the service predicts as the servers' rows do, and says how old they are."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest

from backstay.job_spec import DataSpec, JobSpec, ModeSpec
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.exporting import start_export, stop_export
from tests.integration.followed_training import ADS, USERS, train
from tests.integration.tiny_jobs import write_model
from tests.waiting import wait_until

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "serving"


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an application on a port of this machine; what is given is its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the service")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def ask(address: str, document: Any = None) -> tuple[int, str]:
    """Return status and text of an answer; with a document the request is a POST."""
    data = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(address, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_service_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason="examples/serving: pip install fastapi uvicorn")
    monkeypatch.syspath_prepend(EXAMPLE)
    import app

    monkeypatch.delitem(sys.modules, "app")
    spec = JobSpec(
        name="clicks",
        model=str(write_model(tmp_path, "torch")),
        training=DataSpec(paths=("unread.csv",)),
        mode=ModeSpec(kind="sync"),
    )
    served = tmp_path / "served"
    with LocalCluster(settings={"slot_count": 8}) as cluster:
        expected = train(cluster, spec, "torch")
        start_export(cluster, served)
        with serving(app.make_app(spec.model, str(served))) as address:
            stop_export(cluster)
            asked = {"features": {"users": USERS.tolist(), "ads": ADS.tolist()}}
            status, text = ask(f"{address}/predict", asked)
            assert status == 200, text
            answer = json.loads(text)["predictions"]
            np.testing.assert_allclose(answer, expected, rtol=1e-6, atol=1e-7)
            status, text = ask(f"{address}/health")
            assert (status, json.loads(text)["trouble"]) == (200, "")
            # A feature may have more dimensions than one, such as numbers for a dense layer.
            nested = {"hour": [[0.5], [1]]}
            assert app.Examples(features=nested).features == nested
            status, text = ask(f"{address}/predict", {"features": {"users": [1]}})
            assert (status, "ads" in text) == (422, True)
            assert ask(f"{address}/predict", {"features": {"users": [None]}})[0] == 422
    with serving(app.make_app(spec.model, str(served), max_age_s=0.0)) as address:
        assert ask(f"{address}/health")[0] == 503
