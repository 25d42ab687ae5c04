"""The jobs of a namespace, for users who reach its API only: ``backstay.runner.place.JobsThere``.

Objects and logs are asked of the API. Other commands run in the job master's Pod, which reaches the
servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backstay.errors import JobRefused, KubernetesError, UnknownJob
from backstay.job_spec import JobSpec
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.master_pod import (
    master_pod,
    pserver_trouble,
    pservers_running,
    run_in_master,
)
from backstay.kubernetes.names import (
    JOB_NAME,
    MASTER,
    SCHEDULE,
    STATUS,
    WORKER_ID,
    annotation,
    object_name,
    selector_of,
    status_name,
    worker_selector,
)
from backstay.kubernetes.objects import JOB_FILE
from backstay.kubernetes.pod_template import files_of
from backstay.kubernetes.pserver_objects import SETTINGS_FILE
from backstay.kubernetes.published_status import PublishedStatus
from backstay.runner.place import JobThere, Published, Ran

__all__ = ["STATUS_SELECTOR", "JobsOfNamespace", "removal_text"]

FORBIDDEN = 403
_SELECTOR = "app.kubernetes.io/managed-by=backstay"
# The files of a job take up to 1 MiB, and are not looked at.
STATUS_SELECTOR = f"{_SELECTOR},{STATUS}=true"


class JobsOfNamespace:
    """Asks the API at each call. Errors are ``KubernetesError``."""

    def __init__(self, api: KubernetesApi) -> None:
        """Take the connection over."""
        self._api = api

    def __enter__(self) -> JobsOfNamespace:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.close()

    def jobs(self) -> dict[str, JobThere]:
        """Return all jobs, by name."""
        listed = self._api.list_objects("configmaps", STATUS_SELECTOR).items
        maps = {one["metadata"]["name"]: one for one in listed}
        schedules = self._schedules()
        found = {job: self._job(job, "", Published(), one) for job, one in schedules.items()}
        for one in self._api.list_objects("deployments", _SELECTOR).items:
            job = annotation(one, JOB_NAME)
            if not job:
                continue
            data: Mapping[str, Any] = maps.get(status_name(job), {})
            published = PublishedStatus.of_data(data.get("data") or {})
            found[job] = self._job(job, one["metadata"]["uid"], published, schedules.get(job))
        return found

    def job(self, name: str) -> JobThere:
        """Return one job.

        Raises:
            UnknownJob: The namespace has no such job.
        """
        found = self.jobs()
        if name not in found:
            there = ", ".join(sorted(found)) or "none"
            raise UnknownJob(
                f"namespace {self._api.namespace} has no job {name!r}; there are: {there}"
            )
        return found[name]

    def waits_for(self, job: JobThere) -> str:
        """Return what a job waits for that its job master has not begun; empty: for a moment."""
        troubles = [
            master_pod(self._api, job.name).trouble,
            self._servers_lacking(job.name),
            pserver_trouble(self._api, job.name),
        ]
        return "; ".join(filter(None, troubles))

    def logs(self, job: JobThere) -> dict[str, str]:
        """Return the Pods that have a log, by worker."""
        listed = self._api.list_objects("pods", worker_selector(job.uid)).items
        pods = {one["metadata"]["labels"][WORKER_ID]: one["metadata"]["name"] for one in listed}
        runs = self._api.list_objects("pods", selector_of(job.name, SCHEDULE)).items
        newest = max(runs, key=lambda one: str(one["metadata"]["creationTimestamp"]), default=None)
        if newest is not None:
            pods[SCHEDULE] = newest["metadata"]["name"]
        if name := master_pod(self._api, job.name).name:
            pods[MASTER] = name
        return pods

    def log(self, job: JobThere, worker: str, lines: int) -> str:
        """Return the end of a Pod's log.

        Raises:
            JobRefused: The worker has no Pod now.
        """
        pods = self.logs(job)
        if worker not in pods:
            there = ", ".join(sorted(pods)) or "none"
            raise JobRefused(f"{worker!r} has no Pod now; there are: {there}")
        return self._api.log(pods[worker], lines=lines)

    def run(self, job: JobThere, command: str, words: Sequence[str]) -> Ran:
        """Run a command of ``backstay jobs`` in the job master's Pod.

        Raises:
            JobRefused: The job has no job master now, or none any more.
        """
        if not job.uid:
            raise JobRefused(f"no run of job {job.name!r} is under way")
        if job.published.over:
            goes_on = "Its schedule begins the next run"
            if not job.schedule:
                goes_on = "The same `backstay train` goes on with it"
            raise JobRefused(
                f"job {job.name!r} is {job.published.over}, so it has no job master. {goes_on}. "
                f"`backstay jobs --endpoint HOST:PORT {command} {job.name}`, in a Pod of its "
                "servers, asks them about it"
            )
        return run_in_master(self._api, job.name, [command, *words])

    def _job(
        self, name: str, uid: str, published: Published, cron_job: Mapping[str, Any] | None
    ) -> JobThere:
        if cron_job is None:
            return JobThere(name, uid, published)
        text = _schedule_text(name, cron_job, self._api.namespace)
        return JobThere(name, uid, published, str(cron_job["spec"]["schedule"]), text)

    def _schedules(self) -> dict[str, Mapping[str, Any]]:
        """Return the CronJobs of jobs, by job; none if this user may not see them."""
        try:
            listed = self._api.list_objects("cronjobs", _SELECTOR).items
        except KubernetesError as error:
            if error.status == FORBIDDEN:
                return {}
            raise
        named = {annotation(one, JOB_NAME): one for one in listed}
        return {job: one for job, one in named.items() if job}

    def _servers_lacking(self, job: str) -> str:
        """Return how many servers of its own a job lacks to begin, for people; empty: none."""
        deployment = self._api.get("deployments", object_name(job))
        name = "" if deployment is None else files_of(deployment["spec"]["template"])
        found = self._api.get("configmaps", name) if name else None
        files = (found or {}).get("data") or {}
        if SETTINGS_FILE not in files:
            return ""
        servers = JobSpec.from_json(files[JOB_FILE]).servers
        least = servers.counts(len(servers.endpoints)).least
        running = pservers_running(self._api, job)
        return f"{running} of at least {least} servers run" if running < least else ""


def removal_text(job: str, namespace: str) -> str:
    """Return how a schedule is removed, for people."""
    return (
        f"`kubectl delete cronjob {object_name(job)} -n {namespace}` removes the schedule, and a "
        "run that is under way"
    )


def _schedule_text(job: str, cron_job: Mapping[str, Any], namespace: str) -> str:
    """Return when a job runs, for people."""
    spec, status = cron_job["spec"], cron_job.get("status", {})
    under_way = ", ".join(one["name"] for one in status.get("active") or ())
    lines = [
        f"{job}: runs by `{spec['schedule']}` ({spec.get('timeZone', 'time zone of the cluster')})"
        + (", suspended" if spec.get("suspend") else ""),
        f"  run under way: {under_way or 'none'}",
        f"  last run: begun {status.get('lastScheduleTime', 'never')}, last success: "
        f"{status.get('lastSuccessfulTime', 'never')}",
        f"  {removal_text(job, namespace)}",
    ]
    return "\n".join(lines)
