"""``python -m backstay.kubernetes.scheduled_run FILE``: one run of a job's schedule, in a Pod.

A CronJob makes the Pod. The Pod runs the hooks, makes the objects of the job as ``backstay train
--on kubernetes`` does, and looks on until the job is over, so that no two runs are under way. A Pod
that takes the place of another finds what that one has made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click

from backstay.config import ENDPOINT_VARIABLE
from backstay.errors import BackstayError, ConfigError, JobError, KubernetesError
from backstay.exit_codes import ExitCode
from backstay.job_spec import HooksSpec, JobSpec
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.follow import BegunJob
from backstay.kubernetes.manifest import objects_of
from backstay.kubernetes.names import RUN, annotation, object_name
from backstay.kubernetes.objects import NAMESPACE_VARIABLE, RUN_VARIABLE, JobObjects, Owner
from backstay.kubernetes.refusals import Refusal, refusal_of, why_refused
from backstay.kubernetes.submit import check_free, earlier_run, submit
from backstay.logs import set_up_logging
from backstay.runner.hooks import run_hooks
from backstay.runner.outcome import Outcome
from backstay.runner.show import Lines
from backstay.runner.stop_signals import StopOrder, StopSignals

__all__ = ["exit_code_of", "main"]

# Another Pod is to go on with the run.
# Answers of the API that another time may be others.
_PASSING = (0, 409, 429)
_FORBIDDEN = 403
_SERVER_ERRORS = 500
# An API server that begins knows no accounts and rights yet.
FORBIDDEN_TRIES_MAX = 10
RETRY_S = 5.0

ResultT = TypeVar("ResultT")


def main(spec_file: Path) -> int:
    """Carry out the run; return the exit code, as ``backstay train`` has it."""
    run, stops = os.environ[RUN_VARIABLE], StopSignals()
    try:
        spec = JobSpec.from_json(spec_file.read_text(encoding="utf-8"))
        set_up_logging("info", "text", f"run {run} of {spec.name}")
        with stops:
            outcome = _Run(spec, run, stops).to_its_end()
    except BackstayError as error:
        click.echo(f"Error: {error}", err=True)
        return exit_code_of(error, stopped=stops.asked)
    if outcome is None:
        return ExitCode.AGAIN
    click.echo(f"{spec.name}: {outcome.state}{f' ({outcome.reason})' if outcome.reason else ''}")
    return outcome.exit_code


def exit_code_of(error: BackstayError, *, stopped: bool) -> int:
    """Return the exit code of a run that an error ends: whether another Pod is to go on with it.

    Args:
        error: What has ended it.
        stopped: Whether this Pod was told to end.
    """
    if isinstance(error, ConfigError):
        return ExitCode.WRONG_SETTING
    if stopped:
        return ExitCode.AGAIN
    if isinstance(error, KubernetesError):
        is_quota = error.status == _FORBIDDEN and refusal_of(error) is Refusal.PASSES
        passes = is_quota or error.status in _PASSING or error.status >= _SERVER_ERRORS
        return ExitCode.AGAIN if passes else ExitCode.FAILED
    return ExitCode.FAILED


class _Run:
    """One run."""

    def __init__(self, spec: JobSpec, run: str, stops: StopOrder) -> None:
        self._api = KubernetesApi.in_pod(os.environ.get(NAMESPACE_VARIABLE, ""))
        self._hooks = spec.hooks
        self._spec = replace(spec, schedule=None, hooks=HooksSpec())
        self._run = run
        self._stops = stops

    def to_its_end(self) -> Outcome | None:
        """Run hooks and job; return how the job ended, None if this Pod is to end before that."""
        schedule = self._repeat(self._schedule)
        objects = objects_of(self._spec, self._run, schedule)
        begins = self._repeat(lambda: self._begins(objects))
        if begins:
            if not self._earlier_run_ends(objects, schedule):
                return None
            # No hook may change what another job of the name reads now.
            self._repeat(lambda: check_free(self._api, self._spec.name, objects))
        try:
            if begins:
                self._call_hooks(self._hooks.before, {})
            outcome = self._to_the_end_of_the_job(objects)
        except JobError as error:
            # Otherwise another Pod goes on with the run.
            if exit_code_of(error, stopped=self._stops.asked) != ExitCode.AGAIN:
                self._call_hooks_after("failed", str(error))
            raise
        if outcome is not None:
            self._call_hooks_after(outcome.state, outcome.reason)
        return outcome

    def _schedule(self) -> Owner:
        name = object_name(self._spec.name)
        cron_job = self._api.get("cronjobs", name)
        if cron_job is None:
            raise ConfigError(f"the CronJob {name} of this run is gone, and so is the schedule")
        return Owner(name, cron_job["metadata"]["uid"], "CronJob")

    def _earlier_run_ends(self, objects: JobObjects, schedule: Owner) -> bool:
        """Look on at an earlier run that is not over; False: this Pod is to end before that.

        Raises:
            JobError: That run cannot write its last checkpoint, and its servers have rows that no
                checkpoint has.
        """
        owner = self._repeat(
            lambda: earlier_run(self._api, self._spec.name, objects, schedule, self._stops.wait)
        )
        if owner is None:
            return True
        click.echo(f"{self._spec.name}: an earlier run is not over yet")
        outcome = self._look_on(owner)
        if outcome is not None and outcome.state == "unsaved":
            raise JobError(
                f"an earlier run of job {self._spec.name!r} is not saved ({outcome.reason}), so no "
                "run begins. Make room for its checkpoint, or give its rows up: kubectl delete "
                f"deployment {owner.name}"
            )
        return outcome is not None

    def _begins(self, objects: JobObjects) -> bool:
        """Whether no Pod before this one has made the objects of the run."""
        found = self._api.get("deployments", objects.deployment["metadata"]["name"])
        return found is None or annotation(found, RUN) != self._run

    def _to_the_end_of_the_job(self, objects: JobObjects) -> Outcome | None:
        owner = self._repeat(lambda: submit(self._api, self._spec.name, objects, self._stops.wait))
        return self._look_on(owner)

    def _repeat(self, call: Callable[[], ResultT]) -> ResultT:
        """Make calls that go on where they were refused, a few times while they are forbidden.

        Raises:
            KubernetesError: The API refuses them still, or for another reason.
        """
        for number in range(1, FORBIDDEN_TRIES_MAX + 1):
            try:
                return call()
            except KubernetesError as error:
                failure = error
                is_forbidden = refusal_of(error) is Refusal.FORBIDDEN
            is_last = number == FORBIDDEN_TRIES_MAX
            if is_last or not is_forbidden or self._stops.wait(RETRY_S):
                break
        raise KubernetesError(why_refused(failure), status=failure.status, reason=failure.reason)

    def _look_on(self, owner: Owner) -> Outcome | None:
        begun = BegunJob(self._api, self._spec, owner)
        return begun.follow(Lines(), self._stops, lambda: False)

    def _call_hooks_after(self, state: str, reason: str) -> None:
        result = {"BACKSTAY_JOB_RESULT": state, "BACKSTAY_JOB_REASON": reason}
        self._call_hooks(self._hooks.after, result)

    def _call_hooks(self, commands: tuple[str, ...], result: dict[str, str]) -> None:
        endpoints = ",".join(self._spec.servers.endpoints)
        # Servers of the job's own are not there yet, or not any more.
        reached = {ENDPOINT_VARIABLE: endpoints} if endpoints else {}
        env = {**reached, "BACKSTAY_JOB": self._spec.name, **result}
        run_hooks(commands, env, timeout_s=self._hooks.timeout_s, stopped=lambda: self._stops.asked)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
