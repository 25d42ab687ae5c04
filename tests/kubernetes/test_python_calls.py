"""``backstay.submit`` and ``backstay.train`` on a real cluster, and ``evaluate`` beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import backstay
from backstay.errors import JobRefused, UnknownJob
from tests.kubernetes.test_jobs import (
    JOB,
    LIMIT_S,
    PASSES,
    RECORDS,
    KubernetesJob,
    both_work,
    job,
)

__all__ = ["job"]

pytestmark = [pytest.mark.kubernetes, pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.fixture
def call(job: KubernetesJob, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a call for the job."""
    monkeypatch.delenv("BACKSTAY_ENDPOINT", raising=False)
    return {
        "job": job.folder / "job.yaml",
        "on": "kubernetes",
        "kubernetes": {"namespace": job.namespace.name},
    }


@pytest.mark.chaos
def test_a_job_is_looked_at_scaled_and_stopped_and_the_next_call_goes_on(
    job: KubernetesJob, call: dict[str, Any], capfd: Any
) -> None:
    begun = backstay.submit(**call, epochs=10)
    assert begun.state in ("starting", "running")
    job.wait("two workers", both_work)
    assert begun.wait(timeout=1) is None
    assert (begun.state, begun.metrics["workers_alive"]) == ("running", 2)
    with pytest.raises(JobRefused, match="runs on Kubernetes already, with other settings"):
        backstay.submit(**call, epochs=11)
    assert begun.scale(3) == 2
    with pytest.raises(JobRefused, match="4"):
        begun.scale(4)
    job.wait_until("three workers", lambda: len(job.workers()) == 3)
    # Another call follows the same job.
    again = backstay.submit(**call, epochs=10)
    again.stop("enough")
    stopped = begun.wait(LIMIT_S)
    assert stopped is not None
    assert (stopped["state"], stopped["reason"], begun.state) == ("stopped", "enough", "stopped")
    job.wait_until("its Pods are gone", lambda: len(job.namespace.pods()) == 1)
    with pytest.raises(JobRefused, match="is stopped: it has no job master any more"):
        begun.scale(1)

    done = backstay.train(**call, epochs=10)
    assert (done["state"], done["examples"]) == ("done", 10 * RECORDS)
    assert "records_counted_once true" in job.audit()
    job.api.delete("deployments", f"backstay-{JOB}")
    job.wait_until("its objects are gone", lambda: not job.api.get("configmaps", f"backstay-{JOB}"))
    with pytest.raises(UnknownJob, match="were deleted"):
        job.wait_until("its status is gone", lambda: begun.state == "")
    assert capfd.readouterr() == ("", "")


def test_a_trained_model_evaluates_and_predicts(
    job: KubernetesJob, call: dict[str, Any], tmp_path: Path
) -> None:
    trained = backstay.train(**call)
    assert (trained["state"], trained["examples"]) == ("done", PASSES * RECORDS)

    words = ("--on", "kubernetes", "--namespace", job.namespace.name)
    given = ("--validation", "/data/clicks.csv", "--json")
    evaluated = job.command("evaluate", "job.yaml", *words, *given)
    assert evaluated.returncode == 0, evaluated.stderr
    (evaluation,) = json.loads(evaluated.stdout)["evaluations"]
    assert evaluation["metrics"]["auc"] > 0.6

    output = tmp_path / "predictions"
    output.mkdir()
    # The Pods run as another user.
    output.chmod(0o777)
    document = yaml.safe_load((job.folder / "job.yaml").read_text(encoding="utf-8"))
    document["kubernetes"]["volumes"].append({"host_path": str(output), "mount_path": "/output"})
    document["model"] = str(job.folder / document["model"])
    predicted = backstay.train(
        {**document, "kubernetes": {**document["kubernetes"], **call["kubernetes"]}},
        on="kubernetes",
        use="prediction",
        prediction="/data/clicks.csv",
        output="/output",
    )
    assert (predicted["job"], predicted["state"]) == (f"{JOB}-prediction", "done")
    files = [path for path in output.rglob("*") if path.is_file()]
    assert files
    shown = job.jobs("list").stdout
    assert all(name in shown for name in (JOB, f"{JOB}-evaluation", f"{JOB}-prediction"))
