"""How a job goes, as its job master writes it to a ConfigMap and the command reads it.

A user who reaches the API of Kubernetes only sees it there. It is also the record that the job is
over: a job master that is started after that serves no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from backstay._proto.v1 import job_pb2
from backstay.job_engine.launch import ExitReason, WorkerExit
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.names import status_name
from backstay.kubernetes.worker_pods import LAST_WORDS_MAX
from backstay.master.hosted_launcher import ExitsSeen
from backstay.runner.place import Published, WorkerEnd

__all__ = [
    "GrownServers",
    "PublishedStatus",
    "growth_data",
    "how_ended",
    "may_replace",
    "not_over",
    "read_status",
    "status_data",
]


class GrownServers(NamedTuple):
    """For which plan servers of the job's own were added, and how many there were before it."""

    plan_id: str
    before: int


@dataclass(frozen=True)
class PublishedStatus(Published):
    """What the ConfigMap says.

    Attributes:
        grown: The last growth of the job's own servers, until the plan has ended.
    """

    grown: GrownServers | None = None

    @classmethod
    def of_data(cls, data: Mapping[str, str]) -> PublishedStatus:
        """Return what the ConfigMap's data says; what cannot be read counts as not said."""
        status: job_pb2.JobStatus | None = None
        try:
            if "status" in data:
                status = ParseDict(
                    json.loads(data["status"]), job_pb2.JobStatus(), ignore_unknown_fields=True
                )
            workers = json.loads(data.get("workers", "{}"))
            exits = tuple(
                WorkerEnd(one["worker"], one["how"], one["log"]) for one in workers["newest"]
            )
            counts = dict(workers["ended"])
        except (ValueError, KeyError, TypeError, ParseError):
            counts, exits = {}, ()
        over, reason = data.get("over", ""), data.get("reason", "")
        audit, grown = _document(data.get("audit", "")), _grown(data.get("grown", ""))
        return cls(status, over, reason, counts, exits, audit, grown)


def read_status(api: KubernetesApi, job: str, owner_uid: str = "") -> PublishedStatus | None:
    """Return what the job master has written; None: there is no such job.

    Args:
        api: The namespace of the job.
        job: Its name.
        owner_uid: Of its Deployment; another one's job is not meant. Empty: whichever it is.
    """
    found = api.get("configmaps", status_name(job))
    owners = () if found is None else found["metadata"].get("ownerReferences", ())
    if owner_uid and all(one["uid"] != owner_uid for one in owners):
        return None
    return None if found is None else PublishedStatus.of_data(found.get("data") or {})


def status_data(status: job_pb2.JobStatus | None, exits: ExitsSeen) -> dict[str, str]:
    """Return what a job master writes."""
    data = {"workers": json.dumps(_workers(exits))}
    if status is not None:
        short = job_pb2.JobStatus()
        short.CopyFrom(status)
        # Of thousands of workers only their number fits.
        del short.workers[:]
        short.workers.extend(job_pb2.WorkerStatus(alive=True) for w in status.workers if w.alive)
        data["status"] = json.dumps(MessageToDict(short, preserving_proto_field_name=True))
    return data


def not_over() -> dict[str, str | None]:
    """Return what makes a job that has ended one that goes on."""
    return {"over": None, "reason": None, "audit": None}


def may_replace(found: Mapping[str, str], data: Mapping[str, str]) -> bool:
    """Whether a job master may write over what is published.

    The end of the job stays, and so does what a later job master has written.

    Args:
        found: What the ConfigMap says.
        data: What is to be written.
    """
    if found.get("over") and not data.get("over"):
        return False
    before, after = PublishedStatus.of_data(found).status, PublishedStatus.of_data(data).status
    return before is None or after is None or before.master_starts <= after.master_starts


def growth_data(grown: GrownServers | None) -> dict[str, str]:
    """Return what a job master writes when it adds servers; None: no growth is to be undone."""
    return {"grown": "" if grown is None else json.dumps(grown._asdict())}


def _grown(text: str) -> GrownServers | None:
    document = _document(text)
    try:
        return None if document is None else GrownServers(**document)
    except TypeError:
        return None


def _document(text: str) -> Mapping[str, Any] | None:
    try:
        document = json.loads(text) if text else None
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _workers(exits: ExitsSeen) -> dict[str, Any]:
    newest: list[WorkerExit] = list(exits.newest)
    return {
        "ended": dict(exits.counts),
        "newest": [
            {
                "worker": one.worker_id,
                "how": how_ended(one),
                "log": one.last_words[-LAST_WORDS_MAX:],
            }
            for one in newest
        ],
    }


def how_ended(end: WorkerExit) -> str:
    """Return how a worker ended; the exit code of one that was taken away tells nothing."""
    return "was preempted" if end.reason is ExitReason.PREEMPTED else end.how
