"""Whether each record of a job counts as often as its tasks are done: reads counters and records.

The cluster must still have the tables and the records of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from backstay.cluster.directory import Directory
from backstay.config import ClientConfig
from backstay.consensus.records.keys import JobKeys
from backstay.job.calls import read_keys
from backstay.job_engine.rows_change import change_of, why_inexact
from backstay.runner.recorded_counts import recorded_counts
from backstay.trainer.client import Client
from backstay.trainer.worker.audit import RecordsAudit, audit_records

__all__ = ["audit_job", "audit_lines", "audit_mapping", "audit_of_mapping"]


def audit_job(job: str, endpoints: Sequence[str], config: ClientConfig) -> RecordsAudit:
    """Read all counters of a job whose workers have ended.

    What its records say comes with it: counters cannot tell of other rows that were lost, or that
    were restored without them.

    Args:
        job: Its name.
        endpoints: Control addresses of its servers.
        config: Security and deadlines.

    Raises:
        JobRefused: The job had no audit, or has not begun.
        UnknownTable: It has counted nothing.
        ServerUnavailable: No server answers.
    """
    keys = JobKeys(job)
    directory = Directory(endpoints, config)
    try:
        recorded = recorded_counts(keys, read_keys(directory, keys.root))
    finally:
        directory.close()
    with Client(endpoints, config=config, trainer=None) as client:
        found = audit_records(
            client, job, recorded.stream_job, recorded.tasks, passes=recorded.passes
        )
        now = client.checkpoints.restore_state()
    since = why_inexact(change_of(recorded.incarnation, now), now)
    return replace(found, inexact=recorded.inexact or (since and f"since the job's end: {since}"))


def audit_mapping(audit: RecordsAudit) -> dict[str, Any]:
    """Return it as plain values."""
    return {"records_counted_once": audit.records_counted_once, **asdict(audit)}


def audit_of_mapping(document: Mapping[str, Any]) -> RecordsAudit:
    """Return what ``audit_mapping`` made a mapping of, also after a way through JSON."""
    values = {item.name: document[item.name] for item in fields(RecordsAudit)}
    values["first_wrong"] = tuple(tuple(one) for one in values["first_wrong"])
    return RecordsAudit(**values)


def audit_lines(audit: RecordsAudit) -> list[str]:
    """Return it for people."""
    lines = [
        f"records_counted_once {str(audit.records_counted_once).lower()}",
        f"{audit.records:,} records, {audit.passes} passes: {audit.right:,} right, "
        f"{audit.missing:,} counted too seldom, {audit.doubled:,} too often, "
        f"{audit.damaged:,} damaged",
    ]
    if audit.unfinished:
        lines.append(
            f"{audit.unfinished:,} of them belong to tasks that a pass dropped or dead-lettered, "
            "and count in it at most once"
        )
    if audit.inexact:
        lines.append(f"not exact {audit.inexact}")
    lines += [
        f"  record {number} of {shard}: {count} times" for shard, number, count in audit.first_wrong
    ]
    return lines
