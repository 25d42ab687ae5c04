"""The objects of a job on Kubernetes, as plain mappings: what the command and the launcher make.

docs/adr/0012-kubernetes.md says who owns what. Imports ``backstay.job_spec`` and the modules beside
it; does no I/O.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from backstay.config import ENDPOINT_VARIABLE
from backstay.errors import ConfigError
from backstay.exit_codes import JOB_CODES, ExitCode
from backstay.job_spec import JobSpec
from backstay.kubernetes.names import (
    CONTENT,
    JOB_NAME,
    MASTER,
    OWNER,
    RUN,
    SCHEDULE,
    STATUS,
    WORKER,
    WORKER_ID,
    annotation,
    files_name,
    labels_of,
    object_name,
    owner_label,
    run_uid,
    schedule_name,
    status_name,
    worker_pod_name,
)
from backstay.kubernetes.pod_template import (
    JOB_FOLDER,
    PYTHON,
    SCRATCH,
    pod_of,
    pod_template,
    section,
    variable_of_field,
    whole_cores,
)
from backstay.kubernetes.pserver_objects import (
    SETTINGS_FILE,
    PserverObjects,
    pserver_objects,
    settings_text,
)

__all__ = [
    "FILES_BYTES_MAX",
    "JOB_FILE",
    "LAST_WORDS_VARIABLE",
    "NAMESPACE_VARIABLE",
    "RUN_ENDS",
    "RUN_VARIABLE",
    "JobObjects",
    "OwnServers",
    "Owner",
    "ScheduleObjects",
    "has_own_servers",
    "job_objects",
    "schedule_objects",
    "spec_in_pods",
    "worker_pod",
]

# Kubernetes takes no larger ConfigMap.
FILES_BYTES_MAX = 1024 * 1024
JOB_FILE = "job.json"
# ElasticDL's; a NetworkPolicy can name it.
MASTER_PORT = 50001
NAMESPACE_VARIABLE = "POD_NAMESPACE"
RUN_VARIABLE = "BACKSTAY_RUN"
# With these exit codes a run is over, and did not go well. After another the Pod is made again, so
# often.
RUN_ENDS = sorted(int(code) for code in {*JOB_CODES} - {ExitCode.OK, ExitCode.NEVER_REACHED})
RUN_TRIES_MAX = 20
# The job master's option which says that the servers are the job's own.
SERVERS_END = "--servers-end"
THREADS_VARIABLE = "OMP_NUM_THREADS"
# The worker's: ``backstay.trainer.worker.last_words``, which nothing here may import.
LAST_WORDS_VARIABLE = "BACKSTAY_LAST_WORDS"
# Where a node looks, unless a Pod says otherwise.
TERMINATION_LOG = "/dev/termination-log"
# What Kubernetes takes as a key of a ConfigMap.
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
# The image's interpreter, not the one that runs this code.


class Owner(NamedTuple):
    """What owns the objects of a job: its Deployment; of a schedule: its CronJob."""

    name: str
    uid: str
    kind: str = "Deployment"

    def reference(self) -> dict[str, Any]:
        """Return what an object that it owns says of it."""
        group = "apps/v1" if self.kind == "Deployment" else "batch/v1"
        return {"apiVersion": group, "kind": self.kind, "name": self.name, "uid": self.uid}


class OwnServers(NamedTuple):
    """The servers of a job's own.

    Attributes:
        settings: As ``server_settings`` returned them.
        run: Tells their records from those of an earlier run of the job.
    """

    settings: Mapping[str, Any]
    run: str


class JobObjects(NamedTuple):
    """What the command makes for a job; the Deployment owns the others."""

    deployment: dict[str, Any]
    files: dict[str, Any]
    status: dict[str, Any]
    servers: PserverObjects | None = None

    @property
    def owned(self) -> tuple[dict[str, Any], ...]:
        """What the Deployment owns."""
        return (self.files, self.status, *(self.servers or ()))

    @property
    def content(self) -> str:
        """What tells whether two submissions are the same job."""
        return annotation(self.deployment, CONTENT)

    @property
    def run(self) -> str:
        """Which run of a schedule it is; empty: the job has none."""
        return annotation(self.deployment, RUN)


class ScheduleObjects(NamedTuple):
    """What the command makes for a job with a schedule; the CronJob owns the ConfigMap."""

    cron_job: dict[str, Any]
    files: dict[str, Any]

    @property
    def content(self) -> str:
        """What tells whether two submissions are the same."""
        return annotation(self.cron_job, CONTENT)


def has_own_servers(deployment: Mapping[str, Any]) -> bool:
    """Whether a job's servers end with it, as its Deployment says."""
    containers = deployment["spec"]["template"]["spec"]["containers"]
    return any(SERVERS_END in one.get("command", ()) for one in containers)


def spec_in_pods(spec: JobSpec, endpoints: Sequence[str] = (), *, local: int = 0) -> JobSpec:
    """Return the job as its Pods know it: their paths, their launcher, the cluster's addresses.

    Args:
        spec: The job.
        endpoints: Control addresses of its servers.
        local: So many servers of its own each run of its schedule makes; 0: a cluster runs.
    """
    folder = section(spec).model_folder or JOB_FOLDER
    return replace(
        spec,
        launcher="kubernetes",
        model=str(PurePosixPath(folder) / PurePosixPath(spec.model).name),
        log_dir=f"{SCRATCH}/{object_name(spec.name)}",
        servers=replace(spec.servers, local=local, endpoints=tuple(endpoints)),
    )


def job_objects(
    spec: JobSpec,
    files: Mapping[str, str],
    own: OwnServers | None = None,
    *,
    run: str = "",
    owner: Owner | None = None,
) -> JobObjects:
    """Return what the command makes.

    Args:
        spec: As ``spec_in_pods`` returned it.
        files: The model file and the files beside it: text by name; empty: the image has them.
        own: The servers of the job's own; None: a cluster runs.
        run: Which run of a schedule it is; empty: the job has none.
        owner: The CronJob of the schedule, which then owns the Deployment.

    Raises:
        ConfigError: The files are too large for a ConfigMap, or the job has no section.
    """
    settings = {} if own is None else {SETTINGS_FILE: settings_text(own.settings)}
    carried = {JOB_FILE: spec.to_json(), **settings, **files}
    content = _content_of(carried)
    annotations = {JOB_NAME: spec.name, CONTENT: content, **({RUN: run} if run else {})}
    name = files_name(spec.name, content)
    metadata = {"labels": labels_of(spec.name, MASTER), "annotations": annotations}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap"}
    owned = {} if owner is None else {"ownerReferences": [owner.reference()]}
    return JobObjects(
        _deployment(spec, {**metadata, **owned}, name, servers_end=own is not None, run=run),
        {
            **config_map,
            "metadata": {"name": name, **metadata},
            "immutable": True,
            "data": carried,
        },
        {**config_map, "metadata": _status_metadata(spec.name, metadata), "data": {}},
        None if own is None else pserver_objects(spec, own.settings, own.run, name),
    )


def schedule_objects(spec: JobSpec, files: Mapping[str, str]) -> ScheduleObjects:
    """Return what the command makes for a job with a schedule.

    Args:
        spec: As ``spec_in_pods`` returned it, with a schedule.
        files: As for ``job_objects``.

    Raises:
        ConfigError: The files are too large for a ConfigMap, or the job has no section.
    """
    assert spec.schedule is not None
    carried = {JOB_FILE: spec.to_json(), **files}
    labels = labels_of(spec.name, SCHEDULE)
    annotations = {JOB_NAME: spec.name, CONTENT: _content_of(carried)}
    metadata = {"labels": labels, "annotations": annotations}
    cron_job = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": object_name(spec.name), **metadata},
        "spec": {
            "schedule": spec.schedule.cron,
            "timeZone": spec.schedule.time_zone,
            "concurrencyPolicy": "Forbid",
            "successfulJobsHistoryLimit": spec.schedule.runs_kept,
            "failedJobsHistoryLimit": spec.schedule.runs_kept,
            "jobTemplate": {"metadata": {"labels": labels}, "spec": _run_of_schedule(spec, labels)},
        },
    }
    files_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": schedule_name(spec.name), **metadata},
        "data": carried,
    }
    return ScheduleObjects(cron_job, files_map)


def worker_pod(
    spec: JobSpec,
    worker_id: str,
    owner: Owner,
    *,
    command: Sequence[str],
    env: Mapping[str, str],
    files: str,
    priority_class: str,
) -> dict[str, Any]:
    """Return the Pod of a worker.

    Args:
        spec: The job, as its Pods know it.
        worker_id: Of the worker.
        owner: Of the Pod.
        command: What it runs.
        env: Its variables.
        files: Name of the ConfigMap with the job's files.
        priority_class: Its PriorityClass; empty: none.
    """
    kubernetes = section(spec)
    cores = whole_cores(kubernetes.worker)
    threads = {THREADS_VARIABLE: str(cores)} if cores is not None else {}
    template = pod_template(
        kubernetes,
        WORKER,
        command=[PYTHON, *command],
        env=_variables({**threads, **env}),
        files=files,
    )
    template = _leaving_last_words(template)
    labels = {
        **labels_of(spec.name, WORKER),
        OWNER: owner_label(owner.uid),
        WORKER_ID: worker_id,
    }
    pod = pod_of(template, labels, job=spec.name, restart="Never", priority_class=priority_class)
    named = {
        **pod["metadata"],
        "name": worker_pod_name(spec.name, owner.uid, worker_id),
        "ownerReferences": [owner.reference()],
    }
    return {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": named}


def _leaving_last_words(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a worker's Pod whose process knows where its node looks for its last words."""
    containers = template["spec"]["containers"]
    own = next(one for one in containers if one["name"] == WORKER)
    path = own.get("terminationMessagePath") or TERMINATION_LOG
    told = {**own, "env": [*_variables({LAST_WORDS_VARIABLE: path}), *own["env"]]}
    changed = [told if one is own else one for one in containers]
    return {**template, "spec": {**template["spec"], "containers": changed}}


def _run_of_schedule(spec: JobSpec, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the Job of one run: a Pod that makes the job's objects and looks on to the end."""
    assert spec.schedule is not None
    template = pod_template(
        section(spec),
        SCHEDULE,
        command=[PYTHON, "-m", "backstay.kubernetes.scheduled_run", f"{JOB_FOLDER}/{JOB_FILE}"],
        env=[
            # What Kubernetes calls the Job, however often its Pod begins anew.
            variable_of_field(RUN_VARIABLE, "metadata.labels['batch.kubernetes.io/job-name']"),
            variable_of_field(NAMESPACE_VARIABLE, "metadata.namespace"),
        ],
        files=schedule_name(spec.name),
    )
    account = spec.schedule.service_account
    return {
        "backoffLimit": RUN_TRIES_MAX,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                # The run is over, and another Pod would end in the same way.
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": SCHEDULE,
                        "operator": "In",
                        "values": RUN_ENDS,
                    },
                },
            ]
        },
        "template": pod_of(
            template, labels, job=spec.name, restart="Never", service_account=account
        ),
    }


def _deployment(
    spec: JobSpec, metadata: Mapping[str, Any], files: str, *, servers_end: bool, run: str
) -> dict[str, Any]:
    kubernetes = section(spec)
    name = object_name(spec.name)
    words = [PYTHON, "-m", "backstay.kubernetes.master", f"{JOB_FOLDER}/{JOB_FILE}"]
    words += ["--listen", f"0.0.0.0:{MASTER_PORT}", "--advertise-host", "$(POD_IP)"]
    words += [SERVERS_END] if servers_end else []
    words += ["--run", run_uid(run)] if run else []
    words += ["--insecure"] if kubernetes.insecure else []
    template = pod_template(
        kubernetes,
        MASTER,
        command=words,
        env=[
            variable_of_field("POD_IP", "status.podIP"),
            variable_of_field(NAMESPACE_VARIABLE, "metadata.namespace"),
            *_variables({ENDPOINT_VARIABLE: ",".join(spec.servers.endpoints)}),
        ],
        files=files,
    )
    labels = labels_of(spec.name, MASTER)
    pod = pod_of(
        template,
        labels,
        job=spec.name,
        restart="Always",
        priority_class=kubernetes.master.priority_class,
        service_account=kubernetes.service_account,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, **metadata},
        "spec": {
            "replicas": 1,
            "revisionHistoryLimit": 0,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": pod,
        },
    }


def _status_metadata(job: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **metadata,
        "name": status_name(job),
        "labels": {**metadata["labels"], STATUS: "true"},
    }


def _content_of(carried: Mapping[str, str]) -> str:
    """Return what tells files of a ConfigMap from others.

    Raises:
        ConfigError: They are too large, or one has a name that cannot be.
    """
    for name in carried:
        if not _KEY.fullmatch(name):
            raise ConfigError(
                f"model: a ConfigMap takes no file of the name {name!r}; rename it, or put the "
                "files into the image, and name their folder there: kubernetes.model_folder"
            )
    size = sum(len(name) + len(text.encode()) for name, text in carried.items())
    if size > FILES_BYTES_MAX:
        raise ConfigError(
            f"model: the model file and the Python files beside it take {size:,} bytes, and a "
            f"ConfigMap holds {FILES_BYTES_MAX:,}. Put them into the image, and name their folder "
            "there: kubernetes.model_folder"
        )
    return hashlib.sha256(json.dumps(carried, sort_keys=True).encode()).hexdigest()


def _variables(env: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in env.items()]
