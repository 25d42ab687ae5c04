"""``backstay jobs --on kubernetes``: the jobs of a namespace, for users who reach its API only.

``list`` and ``logs`` ask the API. The other commands run in the job master's Pod, which reaches the
servers; of a job that is over, ``show`` and ``audit`` print what its job master has written last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape

from backstay.errors import JobRefused, KubernetesError, UnknownJob
from backstay.exit_codes import EXIT_FAILED
from backstay.exits import print_json
from backstay.job_spec import JobSpec
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.exec import run_in_master
from backstay.kubernetes.master_pod import (
    master_pod,
    pserver_trouble,
    pservers_running,
)
from backstay.kubernetes.names import (
    JOB_NAME,
    MASTER,
    OWNER,
    SCHEDULE,
    STATUS,
    WORKER_ID,
    labels_of,
    object_name,
    owner_label,
    status_name,
)
from backstay.kubernetes.objects import JOB_FILE
from backstay.kubernetes.pod_template import files_of
from backstay.kubernetes.pserver_objects import SETTINGS_FILE
from backstay.kubernetes.published_status import PublishedStatus
from backstay.kubernetes.schedule import removal_text
from backstay.pserver.ctl.showing import grid, print_whole
from backstay.runner.audit import audit_lines, audit_mapping, audit_of_mapping
from backstay.runner.progress import round_text
from backstay.runner.status_text import print_status

__all__ = ["STATUS_SELECTOR", "jobs_on_kubernetes"]

FORBIDDEN = 403
_SELECTOR = "app.kubernetes.io/managed-by=backstay"
# The files of a job take up to 1 MiB, and are not looked at.
STATUS_SELECTOR = f"{_SELECTOR},{STATUS}=true"


class _Found(NamedTuple):
    """A job of the namespace.

    Attributes:
        name: Of the job.
        uid: Of its Deployment; empty: there is none, because no run of its schedule has begun.
        published: What its job master has said.
        cron_job: Of its schedule; None: it has none.
    """

    name: str
    uid: str
    published: PublishedStatus
    cron_job: Mapping[str, Any] | None

    @property
    def state(self) -> str:
        if not self.uid:
            return "scheduled"
        status = self.published.status
        return self.published.over or (status.state if status is not None else "starting")


def jobs_on_kubernetes(
    namespace: str, command: str, given: Mapping[str, Any], words: Sequence[str]
) -> int:
    """Carry out one of the commands of ``backstay jobs``; return its exit code.

    Args:
        namespace: Of the jobs; empty: that of the kubeconfig.
        command: Its name.
        given: Its arguments and options, by the names of its parameters.
        words: The same, as they were typed.

    Raises:
        UnknownJob: The namespace has no such job.
        JobRefused: The job has no job master now, and the command needs it.
        KubernetesError: The API refuses a call, or does not answer.
    """
    api = KubernetesApi.of_kubeconfig(namespace)
    try:
        found = _jobs(api)
        if command == "list":
            _print_list(found, as_json=given["as_json"])
            return 0
        job = found.get(given["job"])
        if job is None:
            there = ", ".join(sorted(found)) or "none"
            raise UnknownJob(
                f"namespace {api.namespace} has no job {given['job']!r}; there are: {there}"
            )
        if command == "logs":
            return _logs(api, job, given["worker"], given["lines"])
        if job.cron_job is not None and command in ("show", "stop"):
            text = _schedule_text(job.name, job.cron_job, api.namespace)
            click.echo(text, err=bool(given.get("as_json")))
        if command == "show" and not job.uid:
            if given["as_json"]:
                _print_end(job, as_json=True)
            return 0
        if command == "show" and job.state == "starting":
            _print_start(api, job, as_json=given["as_json"])
            return 0
        if command == "show" and job.published.over:
            _print_end(job, as_json=given["as_json"])
            return 0
        if command == "audit" and job.published.over and job.published.audit is not None:
            return _print_audit(job.name, job.published.audit, as_json=given["as_json"])
        _check_has_master(job, command)
        ran = run_in_master(api, job.name, [command, *words])
    finally:
        api.close()
    click.echo(ran.output, nl=False)
    click.echo(ran.errors, nl=False, err=True)
    if command == "show" and ran.exit_code == 0 and not given["as_json"]:
        _print_exits(job.published)
    return ran.exit_code


def _check_has_master(job: _Found, command: str) -> None:
    """Refuse a command that needs the job master of a job that has none any more."""
    if not job.uid:
        raise JobRefused(f"no run of job {job.name!r} is under way")
    if job.published.over:
        goes_on = "The same `backstay train` goes on with it"
        if job.cron_job is not None:
            goes_on = "Its schedule begins the next run"
        raise JobRefused(
            f"job {job.name!r} is {job.published.over}, so it has no job master. {goes_on}. "
            f"`backstay jobs --endpoint HOST:PORT {command} {job.name}`, in a Pod of its servers, "
            "asks them about it"
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


def _schedules(api: KubernetesApi) -> dict[str, Mapping[str, Any]]:
    """Return the CronJobs of jobs, by job; none if this user may not see them."""
    try:
        listed = api.list_objects("cronjobs", _SELECTOR).items
    except KubernetesError as error:
        if error.status == FORBIDDEN:
            return {}
        raise
    named = {one["metadata"].get("annotations", {}).get(JOB_NAME): one for one in listed}
    return {job: one for job, one in named.items() if job is not None}


def _jobs(api: KubernetesApi) -> dict[str, _Found]:
    listed = api.list_objects("configmaps", STATUS_SELECTOR).items
    maps = {one["metadata"]["name"]: one for one in listed}
    schedules = _schedules(api)
    found = {job: _Found(job, "", PublishedStatus(), one) for job, one in schedules.items()}
    for one in api.list_objects("deployments", _SELECTOR).items:
        job = one["metadata"].get("annotations", {}).get(JOB_NAME)
        if job is None:
            continue
        data: Mapping[str, Any] = maps.get(status_name(job), {})
        published = PublishedStatus.of_data(data.get("data") or {})
        found[job] = _Found(job, one["metadata"]["uid"], published, schedules.get(job))
    return found


def _print_list(found: Mapping[str, _Found], *, as_json: bool) -> None:
    if as_json:
        print_json({"jobs": [_mapping(found[name]) for name in sorted(found)]})
        return
    table = grid("job", "state", "progress", "workers", "schedule")
    for name in sorted(found):
        status = found[name].published.status
        progress = "" if status is None else round_text(status)
        workers = "" if status is None else f"{len(status.workers)}/{status.workers_desired}"
        schedule = escape(_schedule_of(found[name]))
        table.add_row(escape(name), found[name].state, escape(progress), workers, schedule)
    print_whole(Console(), table)


def _schedule_of(job: _Found) -> str:
    """Return the cron expression of a job; empty: it has none."""
    return "" if job.cron_job is None else str(job.cron_job["spec"]["schedule"])


def _mapping(job: _Found) -> dict[str, Any]:
    status = job.published.status
    return {
        "job": job.name,
        "uid": job.uid,
        "state": job.state,
        "reason": job.published.reason,
        "progress": "" if status is None else round_text(status),
        "schedule": _schedule_of(job),
    }


def _print_start(api: KubernetesApi, job: _Found, *, as_json: bool) -> None:
    """Print what a job waits for that its job master has not begun yet."""
    troubles = [
        master_pod(api, job.name).trouble,
        _servers_lacking(api, job.name),
        pserver_trouble(api, job.name),
    ]
    trouble = "; ".join(filter(None, troubles))
    if as_json:
        print_json({**_mapping(job), "status": None, "trouble": trouble})
    else:
        click.echo(f"{job.name}: {job.state}")
        click.echo(f"trouble: {trouble}" if trouble else "it begins as soon as its servers serve")


def _servers_lacking(api: KubernetesApi, job: str) -> str:
    """Return how many servers of its own a job lacks to begin, for people; empty: none."""
    deployment = api.get("deployments", object_name(job))
    name = "" if deployment is None else files_of(deployment["spec"]["template"])
    found = api.get("configmaps", name) if name else None
    files = (found or {}).get("data") or {}
    if SETTINGS_FILE not in files:
        return ""
    servers = JobSpec.from_json(files[JOB_FILE]).servers
    least, running = servers.counts(len(servers.endpoints)).least, pservers_running(api, job)
    return f"{running} of at least {least} servers run" if running < least else ""


def _print_end(job: _Found, *, as_json: bool) -> None:
    """Print what the job master of an ended job has written last."""
    published = job.published
    if as_json:
        status = published.status
        plain = status and MessageToDict(status, preserving_proto_field_name=True)
        exits = [
            {"worker": worker, "how": how, "last_words": words}
            for worker, how, words in published.exits
        ]
        audit = published.audit
        print_json({**_mapping(job), "status": plain, "exits": exits, "audit": audit})
        return
    if published.status is None:
        click.echo(f"{job.name}: {published.over}: {published.reason}")
    else:
        # Nothing works any more.
        published.status.master_instance = 0
        print_status(published.status)
    if published.audit is not None:
        click.echo("\n".join(audit_lines(audit_of_mapping(published.audit))))
    _print_exits(published)


def _print_audit(job: str, document: Mapping[str, Any], *, as_json: bool) -> int:
    """Print what the counters of records said at the job's end; return the exit code."""
    audit = audit_of_mapping(document)
    if as_json:
        print_json({"job": job, **audit_mapping(audit)})
    else:
        click.echo("\n".join(audit_lines(audit)))
    return 0 if audit.records_counted_once else EXIT_FAILED


def _print_exits(published: PublishedStatus) -> None:
    """Print how workers ended, and the newest ends with the last lines of their logs."""
    if published.counts:
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(published.counts.items()))
        click.echo(f"workers that ended: {counts}")
    for worker, how, words in published.exits:
        click.echo(f"worker {worker} {how}")
        for line in words.strip().splitlines():
            click.echo(f"  {line}")


def _pod_of_run(api: KubernetesApi, job: str) -> dict[str, str]:
    """Return the Pod of the newest run of a job's schedule, if there is one."""
    labels = ",".join(f"{name}={value}" for name, value in labels_of(job, SCHEDULE).items())
    pods = api.list_objects("pods", labels).items
    newest = max(pods, key=lambda one: str(one["metadata"]["creationTimestamp"]), default=None)
    return {} if newest is None else {SCHEDULE: newest["metadata"]["name"]}


def _logs(api: KubernetesApi, job: _Found, worker: str | None, lines: int) -> int:
    """Print the end of a Pod's log, or the Pods that have one."""
    listed = api.list_objects("pods", f"{OWNER}={owner_label(job.uid)}").items
    pods = {one["metadata"]["labels"][WORKER_ID]: one["metadata"]["name"] for one in listed}
    pods |= _pod_of_run(api, job.name)
    if name := master_pod(api, job.name).name:
        pods[MASTER] = name
    if worker is None:
        for each, pod in sorted(pods.items()):
            click.echo(f"{each}  {pod}")
    elif worker not in pods:
        there = ", ".join(sorted(pods)) or "none"
        raise JobRefused(f"{worker!r} has no Pod now; there are: {there}")
    else:
        click.echo(api.log(pods[worker], lines=lines), nl=False)
    return 0
