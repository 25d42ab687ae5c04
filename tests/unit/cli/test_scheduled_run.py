"""Which Pods of a run another one takes the place of."""

from __future__ import annotations

import pytest

from backstay.cli.scheduled_run import EXIT_AGAIN, exit_code_of
from backstay.errors import BackstayError, ConfigError, JobError, JobRefused, KubernetesError


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
