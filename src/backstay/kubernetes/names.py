"""Names and labels of a job's objects on Kubernetes.

Imports the standard library only; does no I/O.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

__all__ = [
    "CONTENT",
    "JOB_NAME",
    "MASTER",
    "OWNER",
    "PSERVER",
    "REPLACES",
    "RUN",
    "SCHEDULE",
    "STATUS",
    "WORKER",
    "annotation",
    "files_name",
    "labels_of",
    "object_name",
    "owner_label",
    "pserver_name",
    "run_uid",
    "schedule_name",
    "selector_of",
    "status_name",
    "worker_pod_name",
    "worker_selector",
]

# Roles, and the names of their containers.
MASTER = "master"
PSERVER = "pserver"
WORKER = "worker"
SCHEDULE = "schedule"
# Labels. The owner's tells the worker Pods of a job from those of an earlier one of its name.
OWNER = "backstay/owner"
WORKER_ID = "backstay/worker"
# Tells the ConfigMap with a job's status from those with files.
STATUS = "backstay/status"
# Annotations: the name as the user wrote it, what the objects were made of, which run of a schedule
# has made them, and the cluster of earlier servers whose records are to be removed.
JOB_NAME = "backstay/job-name"
CONTENT = "backstay/content"
RUN = "backstay/run"
REPLACES = "backstay/replaces-cluster"

# With the prefix, the part of the uid and the worker id a Pod's name stays a host name (63).
JOB_LENGTH_MAX = 30
HASH_LENGTH = 8
UID_LENGTH = 5
UID_OF_RUN_LENGTH = 16


def object_name(job: str) -> str:
    """Return the name of a job's objects: small letters, digits and hyphens.

    Two jobs have two names: a name that had to be changed gets a hash of the original.
    """
    fitted = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")
    if fitted != job or len(fitted) > JOB_LENGTH_MAX:
        short = fitted[: JOB_LENGTH_MAX - HASH_LENGTH - 1].strip("-")
        digest = hashlib.sha256(job.encode()).hexdigest()[:HASH_LENGTH]
        fitted = f"{short}-{digest}" if short else digest
    return f"backstay-{fitted}"


def status_name(job: str) -> str:
    """Return the name of the ConfigMap with a job's status, which no ``object_name`` can be."""
    return f"{object_name(job)}.status"


def files_name(job: str, content: str) -> str:
    """Return the name of the ConfigMap with a job's files, which no ``object_name`` can be.

    Other content has another name. A node does not read an immutable ConfigMap again while it has
    a Pod that uses one of the name, so a new job would get the files of the deleted one.

    Args:
        job: Name of the job.
        content: What the annotation ``CONTENT`` says.
    """
    return f"{object_name(job)}.{content[:HASH_LENGTH]}"


def pserver_name(job: str) -> str:
    """Return the name of the objects of a job's own servers; the Pods have a number after it."""
    return f"{object_name(job)}-{PSERVER}"


def schedule_name(job: str) -> str:
    """Return the name of the ConfigMap of a job's schedule, which no ``object_name`` can be."""
    return f"{object_name(job)}.schedule"


def run_uid(run: str) -> str:
    """Return the job's uid in a run of its schedule."""
    return hashlib.sha256(run.encode()).hexdigest()[:UID_OF_RUN_LENGTH]


def worker_pod_name(job: str, owner_uid: str, worker_id: str) -> str:
    """Return the name of a worker's Pod; to make a Pod of it twice is refused."""
    return f"{object_name(job)}-{owner_label(owner_uid)[:UID_LENGTH]}-{worker_id}"


def owner_label(owner_uid: str) -> str:
    """Return the value of the label ``OWNER``."""
    return owner_uid.replace("-", "").lower()


def worker_selector(owner_uid: str) -> str:
    """Return what selects the worker Pods of an owner."""
    return f"{OWNER}={owner_label(owner_uid)}"


def selector_of(job: str, role: str) -> str:
    """Return what selects the objects of a role."""
    return ",".join(f"{name}={value}" for name, value in labels_of(job, role).items())


def annotation(found: Mapping[str, Any], name: str) -> str:
    """Return an annotation of an object as the API gives it; empty: it has none."""
    return str(found["metadata"].get("annotations", {}).get(name, ""))


def labels_of(job: str, role: str) -> dict[str, str]:
    """Return the labels that all objects of a role have."""
    return {
        "app.kubernetes.io/name": "backstay",
        "app.kubernetes.io/instance": object_name(job),
        "app.kubernetes.io/component": "job-master" if role == MASTER else role,
        "app.kubernetes.io/managed-by": "backstay",
        # What the NetworkPolicy of deploy/kubernetes lets reach the pservers.
        "app.kubernetes.io/part-of": "backstay",
    }
