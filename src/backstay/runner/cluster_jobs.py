"""The jobs of a cluster, for the commands of ``backstay jobs`` and the Python calls.

What a job is and how it ended is in its records; figures and orders are asked of its job master,
whose address is in the records as well. Prints nothing and ends no process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from backstay.config import ClientConfig
from backstay.consensus.records.jobs import OVER_STATES
from backstay.errors import JobRefused, UnknownJob
from backstay.master.job_client import JobClient, JobEntry, find_job, list_jobs

__all__ = ["Cluster", "without_master"]

# People wait for the answer.
CALL_LIMIT_MS = 10_000


class Cluster(NamedTuple):
    """Where to ask."""

    endpoints: tuple[str, ...]
    config: ClientConfig

    @classmethod
    def at(cls, endpoints: tuple[str, ...], config: ClientConfig) -> Cluster:
        """Return the cluster with these addresses; its calls have a short time limit."""
        shorter_ms = min(config.deadline_ms, CALL_LIMIT_MS)
        return cls(endpoints, replace(config, deadline_ms=shorter_ms))

    def entries(self) -> tuple[JobEntry, ...]:
        """Return the jobs of the cluster."""
        return list_jobs(self.endpoints, config=self.config)

    def entry(self, job: str) -> JobEntry:
        """Return one job.

        Raises:
            UnknownJob: There is no such job.
        """
        found = find_job(self.endpoints, job, config=self.config)
        if found is not None:
            return found
        there = ", ".join(entry.job for entry in self.entries()) or "none"
        raise UnknownJob(f"the cluster has no job {job!r}; there are: {there}")

    @contextmanager
    def master(self, job: str) -> Iterator[JobClient]:
        """Have the job master.

        Raises:
            UnknownJob: There is no such job.
            JobRefused: It has no job master now.
        """
        entry = self.entry(job)
        if not entry.master_address:
            raise JobRefused(without_master(entry))
        client = JobClient(self.endpoints, job, config=self.config)
        try:
            yield client
        finally:
            client.close()


def without_master(entry: JobEntry) -> str:
    """Return why there is no job master to command."""
    reason = f" ({entry.reason})" if entry.reason else ""
    if entry.state in OVER_STATES:
        return f"job {entry.job!r} is {entry.state}{reason}: it has no job master any more"
    return (
        f"job {entry.job!r} has no job master now: the `backstay train` that ran it has ended, or "
        "the job master is being started again. The same command goes on with the job"
    )
