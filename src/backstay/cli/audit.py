"""Whether each record of a job counts once in each pass: reads the counters on the servers.

Needs the data's index, which is read here as the master read it, and a cluster that still has the
tables of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from backstay.config import ClientConfig
from backstay.errors import JobRefused
from backstay.job_spec import JobSpec
from backstay.master.data_scan import open_data
from backstay.master.job_client import find_job
from backstay.master.rows_change import change_of, why_inexact
from backstay.trainer.client import Client
from backstay.trainer.worker.audit import RecordsAudit, audit_records

__all__ = ["audit_job", "audit_lines", "audit_mapping"]


def audit_job(
    spec: JobSpec,
    endpoints: Sequence[str],
    config: ClientConfig,
    *,
    passes: int | None = None,
    damaged: int = 0,
) -> RecordsAudit:
    """Read all counters of a job whose workers have ended.

    What its records say comes with it: counters cannot tell of other rows that were lost, or that
    were restored without them.

    Args:
        spec: The job.
        endpoints: Control addresses of its servers.
        config: Security and deadlines.
        passes: How often each record should have been counted; default: the job's epochs.
        damaged: Records that each pass has skipped.

    Raises:
        JobRefused: The job had no audit.
        UnknownTable: It has counted nothing.
        DataError: The data cannot be read.
    """
    if not spec.audit or spec.training is None:
        raise JobRefused(f"job {spec.name!r} has counted no records: it needs `audit: true`")
    shards = list(open_data(spec, "training").shards())
    with Client(endpoints, config=config) as client:
        wanted = spec.epochs if passes is None else passes
        found = audit_records(client, spec.name, shards, wanted, damaged=damaged)
        entry = find_job(endpoints, spec.name, config=config)
        if entry is None:
            return found
        now = client.checkpoints.restore_state()
        since = why_inexact(change_of(entry.rows, now), now)
        return replace(found, inexact=entry.inexact or (since and f"since the job's end: {since}"))


def audit_mapping(audit: RecordsAudit) -> dict[str, Any]:
    """Return it as plain values."""
    return {"records_counted_once": audit.records_counted_once, **asdict(audit)}


def audit_lines(audit: RecordsAudit) -> list[str]:
    """Return it for people."""
    lines = [
        f"records_counted_once {str(audit.records_counted_once).lower()}",
        f"{audit.records:,} records, {audit.passes} passes: {audit.right:,} right, "
        f"{audit.missing:,} counted too seldom ({audit.damaged:,} are damaged), "
        f"{audit.doubled:,} too often",
    ]
    if audit.inexact:
        lines.append(f"not exact {audit.inexact}")
    lines += [
        f"  record {number} of {shard}: {count} times" for shard, number, count in audit.first_wrong
    ]
    return lines
