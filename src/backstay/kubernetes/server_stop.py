"""``python -m backstay.kubernetes.server_stop JOB SECONDS``: what a server waits for to end.

Kubernetes runs it in the Pod of a job's own server (``preStop``). That may hold the only copy of a
slot, so it waits until the others have their copies, unless nobody needs the rows any more: at the
end of a job all its servers end, and the last of them would wait for copies that cannot come.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace

import click

from backstay.cluster.directory import Directory
from backstay.config import ENDPOINT_VARIABLE, ClientConfig
from backstay.consensus.records.jobs import JobSpecRecord, JobStateRecord
from backstay.consensus.records.keys import JobKeys
from backstay.errors import BackstayError
from backstay.exit_codes import ExitCode
from backstay.job.calls import read_keys
from backstay.job_spec import JobSpec
from backstay.pserver.client.inspection import ClusterInspection, slots_short_of_copies

__all__ = ["are_rows_needed", "main", "wait_for_copies"]

LOOK_PAUSE_S = 0.5
# An answer that takes longer says nothing.
CALL_LIMIT_MS = 2000
# A server that does not answer for so long has nothing that the cluster could lose.
NO_ANSWER_S = 10.0


def are_rows_needed(keys: JobKeys, records: Mapping[str, str]) -> bool:
    """Whether a job needs the rows of its own servers: it goes on, or is not saved yet.

    Args:
        keys: Of the job.
        records: Those of the job, by key.

    Raises:
        InvalidRequest: A record cannot be read.
    """
    if keys.spec not in records or keys.state not in records:
        return True
    state = JobStateRecord.from_json(records[keys.state])
    if state.state != "stopped":
        return state.state not in ("done", "failed")
    # It is stopped before its last checkpoint is written.
    spec = JobSpec.from_json(JobSpecRecord.from_json(records[keys.spec]).spec)
    saves = spec.training is not None and spec.checkpoint.is_wanted
    return saves and state.figures.get("steps", 0) != state.figures.get("saved_steps", 0)


def main(job: str, wait_s: float) -> int:
    """Wait until this server may end; return the exit code."""
    keys, endpoint = JobKeys(job), os.environ[ENDPOINT_VARIABLE]
    config = ClientConfig.load()
    quick = replace(config, deadline_ms=min(config.deadline_ms, CALL_LIMIT_MS))
    with (
        ClusterInspection(endpoint, config) as inspection,
        closing(Directory([endpoint], quick)) as directory,
    ):
        return wait_for_copies(
            lambda: slots_short_of_copies(inspection.routing()),
            lambda: _are_rows_needed(directory, keys),
            wait_s,
        )


def wait_for_copies(
    count_short: Callable[[], int],
    are_needed: Callable[[], bool],
    wait_s: float,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until no slot is short of copies, or nobody needs the rows; return the exit code.

    Args:
        count_short: Returns how many slots are; an error of backstay: nobody says.
        are_needed: Whether the job needs the rows.
        wait_s: Seconds to wait at most.
        now: The time, in seconds.
        sleep: Waits for so many seconds.
    """
    ends_s = now() + wait_s
    failing_since_s: float | None = None
    while True:
        began_s = now()
        try:
            short = count_short()
        except BackstayError as error:
            # One answer may be missing for a moment. A server that never answers has ended.
            failing_since_s = began_s if failing_since_s is None else failing_since_s
            if now() >= min(ends_s, failing_since_s + NO_ANSWER_S):
                click.echo(f"Error: {error}", err=True)
                return ExitCode.NO_ANSWER
        else:
            failing_since_s = None
            if not short or not are_needed():
                return 0
            if now() >= ends_s:
                click.echo(f"after {wait_s:g} s {short} slots still have too few copies", err=True)
                return ExitCode.FAILED
        sleep(LOOK_PAUSE_S)


def _are_rows_needed(directory: Directory, keys: JobKeys) -> bool:
    """Ask the records; without an answer they are."""
    try:
        records: dict[str, str] = {}
        for key in (keys.spec, keys.state):
            records |= read_keys(directory, key, single=True)
        return are_rows_needed(keys, records)
    except BackstayError:
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
