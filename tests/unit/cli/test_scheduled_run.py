"""Which Pods of a run another one takes the place of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay.cli import scheduled_run
from backstay.cli.kubernetes_submit import submit
from backstay.cli.scheduled_run import EXIT_AGAIN, exit_code_of
from backstay.cli.stop_signals import StopOrder
from backstay.errors import BackstayError, ConfigError, JobError, JobRefused, KubernetesError
from backstay.job_spec import HooksSpec
from backstay.master.kubernetes.api import KubernetesApi
from tests.unit.cli.test_kubernetes_submit import (
    JOB,
    NAME,
    Cluster,
    api_of,
    never,
    objects_of,
    spec_of,
)


@pytest.mark.parametrize(
    ("error", "stopped", "code"),
    [
        (KubernetesError("no answer"), False, EXIT_AGAIN),
        (KubernetesError("conflict", status=409), False, EXIT_AGAIN),
        (KubernetesError("unavailable", status=503), False, EXIT_AGAIN),
        (KubernetesError("forbidden", status=403), False, 1),
        (JobRefused("a job of the name runs"), False, 1),
        (JobError("the hook was stopped"), True, EXIT_AGAIN),
        (JobError("the hook failed"), False, 1),
        (ConfigError("the CronJob is gone"), True, 2),
    ],
)
def test_a_run_goes_on_in_another_pod_unless_that_would_end_in_the_same_way(
    error: BackstayError, stopped: bool, code: int
) -> None:
    assert exit_code_of(error, stopped=stopped) == code


def test_a_run_that_is_refused_calls_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(JOB)
    cluster.found["cronjobs", NAME] = {"metadata": {"uid": "cronjob-1"}}
    submit(api_of(cluster), JOB, objects_of(files={"model.py": "# other"}), never)
    monkeypatch.setattr(KubernetesApi, "in_pod", lambda _: api_of(cluster))
    monkeypatch.setattr(scheduled_run, "objects_of", lambda *_: objects_of(run="census-2"))
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(scheduled_run, "run_hooks", lambda hooks, *_, **__: called.append(hooks))
    spec = replace(spec_of(), hooks=HooksSpec(before=("fetch",), after=("report",)))
    with pytest.raises(JobRefused, match="runs on Kubernetes already"):
        scheduled_run._Run(spec, "census-2", StopOrder()).to_its_end()
    assert called == []
