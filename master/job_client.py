"""A job as the commands see it: its job master's figures and orders, and the jobs of a cluster.

Its calls block. They need the address of a pserver only: the job master's is in the job's record.
This module imports :mod:`backstay.rpc` and the records of :mod:`backstay.consensus`. It changes no
record but to forget a job that has no job master.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from backstay._proto.v1 import job_pb2, store_pb2, store_pb2_grpc
from backstay.cluster.directory import Directory
from backstay.config import ClientConfig
from backstay.consensus.records.jobs import JobSpecRecord, JobStateRecord, MasterRecord
from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import OPERATIONS_MAX, Delete, Txn, absent
from backstay.consensus.store.messages import txn_to_message
from backstay.errors import JobRefused
from backstay.job.calls import ATTEMPT_S, JobCalls, JobIsOver, read_keys
from backstay.job_engine.launch import LauncherReport, WorkerWish
from backstay.job_spec import JobSpec
from backstay.master.launcher import report_message, wish_of
from backstay.master.status import recorded_dead_letters, recorded_status
from backstay.schedule.schedule import Schedule

__all__ = ["JobClient", "JobEntry", "find_job", "forget_job", "list_jobs"]


@dataclass(frozen=True)
class JobEntry:
    """One job of a cluster, from its records: also while it has no job master.

    Attributes:
        job: Its name.
        uid: What tells it from others of that name.
        state: ``running``, ``done``, ``stopped``, ``failed`` or ``new``.
        reason: Why, if it is over.
        spec_json: Its spec.
        created_ms: Unix time.
        master_address: Of the process that is its job master now; empty: none is.
        progress: One line for people, such as ``pass 2 of 10``.
        is_finished: Whether nothing is left to do but tasks that failed for good.
    """

    job: str
    uid: str
    state: str
    reason: str
    spec_json: str
    created_ms: int
    master_address: str
    progress: str
    is_finished: bool


COMMAND_DEADLINE_MS = 10_000


def list_jobs(
    endpoints: str | Sequence[str], *, config: ClientConfig | None = None
) -> tuple[JobEntry, ...]:
    """Return the jobs of a cluster, by name.

    Raises:
        ServerUnavailable: No pserver answered within the deadline.
    """
    directory = Directory(endpoints, _patient(config))
    try:
        names = [key.rpartition("/")[2] for key in read_keys(directory, JobKeys.names())]
        found = (_entry(directory, name) for name in sorted(names))
        return tuple(entry for entry in found if entry is not None)
    finally:
        directory.close()


def find_job(
    endpoints: str | Sequence[str], job: str, *, config: ClientConfig | None = None
) -> JobEntry | None:
    """Return one job of a cluster, None if there is none of that name.

    Raises:
        ServerUnavailable: No pserver answered within the deadline.
    """
    directory = Directory(endpoints, _patient(config))
    try:
        return _entry(directory, job)
    finally:
        directory.close()


def forget_job(
    endpoints: str | Sequence[str], job: str, *, config: ClientConfig | None = None
) -> bool:
    """Remove all records of a job; returns whether there were any.

    Raises:
        JobRefused: It has a job master; stop it first.
    """
    directory = Directory(endpoints, _patient(config))
    keys = JobKeys(job)
    try:
        found = [*read_keys(directory, keys.root), *read_keys(directory, keys.name, single=True)]
        # Its name goes last: until then the job is listed, and can be forgotten again.
        for start in range(0, len(found), OPERATIONS_MAX):
            part = found[start : start + OPERATIONS_MAX]
            gone = tuple(Delete(key) for key in part if key != keys.master)
            answer = _transact(directory, Txn((absent(keys.master),), gone))
            if not answer.succeeded:
                raise JobRefused(f"job {job!r} has a job master; stop the job first")
        return bool(found)
    finally:
        directory.close()


def _transact(directory: Directory, txn: Txn) -> store_pb2.StoreTransactResponse:
    request = txn_to_message(txn)
    return directory.call(
        lambda channel, timeout_s: store_pb2_grpc.StoreServiceStub(channel).Transact(
            request, timeout=timeout_s
        )
    )


def _entry(directory: Directory, job: str) -> JobEntry | None:
    """Return what the records say of a job; None if it was forgotten meanwhile."""
    keys = JobKeys(job)

    def text_of(key: str) -> str | None:
        return read_keys(directory, key, single=True).get(key)

    spec_text, state_text = text_of(keys.spec), text_of(keys.state)
    master_text = text_of(keys.master)
    if spec_text is None:
        return None
    record = JobSpecRecord.from_json(spec_text)
    state = JobStateRecord.from_json(state_text) if state_text is not None else None
    spec = JobSpec.from_json(record.spec)
    schedule = Schedule.of(spec, state.schedule) if state is not None and state.schedule else None
    return JobEntry(
        job=job,
        uid=record.uid,
        state=state.state if state is not None else "new",
        reason=state.reason if state is not None else "",
        spec_json=record.spec,
        created_ms=record.created_ms,
        master_address=MasterRecord.from_json(master_text).address if master_text else "",
        progress=_progress(spec, schedule),
        is_finished=schedule is not None
        and schedule.outcome in ("finished", "finished_with_dead_letters"),
    )


def _progress(spec: JobSpec, schedule: Schedule | None) -> str:
    if schedule is None:
        return "not begun"
    if schedule.open_rounds:
        first = schedule.open_rounds[0]
        if first.kind.value == "training" and spec.is_stream:
            return f"period {first.number}"
        of = f" of {spec.epochs}" if first.kind.value == "training" else ""
        return f"{first.kind.value.replace('_', ' ')} {first.number}{of}"
    rounds = "periods" if spec.is_stream else "passes"
    return f"{schedule.passes_over} {rounds}, {schedule.steps} steps"


def _patient(config: ClientConfig | None) -> ClientConfig:
    """Return the settings of a command: it must not seem to hang as a trainer may."""
    config = config or ClientConfig.load()
    return replace(config, deadline_ms=min(config.deadline_ms, COMMAND_DEADLINE_MS))


class JobClient:
    """Calls to one job master; repeated while it is away, until the deadline."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        job: str,
        *,
        config: ClientConfig | None = None,
    ) -> None:
        """Prepare; nothing is asked yet.

        Args:
            endpoints: Control addresses of pservers.
            job: Name of the job.
            config: Security, and ``deadline_ms`` of each call; default: 10 s at most.
        """
        self._calls = JobCalls(endpoints, job, config or _patient(None))

    def status(self) -> job_pb2.JobStatus:
        """Return how the job goes; of one that is over, what its records tell.

        Raises:
            UnknownJob: There is no such job.
            ServerUnavailable: No job master answered within the deadline.
        """
        request = job_pb2.GetJobRequest()
        try:
            return self._calls.call(lambda stub, timeout: stub.GetJob(request, timeout=timeout))
        except JobIsOver as error:
            return recorded_status(self._calls.job, error.record)

    def scale(self, workers: int) -> int:
        """Have so many workers; returns how many were wanted before.

        Raises:
            InvalidRequest: It is outside of the job's min and max.
        """
        request = job_pb2.ScaleRequest(workers=workers)
        answer = self._calls.call(lambda stub, timeout: stub.Scale(request, timeout=timeout))
        return answer.before

    def stop(self, reason: str = "", *, keep_state: bool = True, when_done: bool = False) -> int:
        """End the job.

        Args:
            reason: For people.
            keep_state: The same command goes on with it later.
            when_done: A job over data without an end first does what it has taken.

        Returns:
            How many records it does before.
        """
        request = job_pb2.StopRequest(reason=reason, keep_state=keep_state, when_done=when_done)
        answer = self._calls.call(lambda stub, timeout: stub.Stop(request, timeout=timeout))
        return answer.records_left

    def dead_letters(self) -> tuple[job_pb2.DeadLetter, ...]:
        """Return the tasks that failed for good; of a job that is over, from its records."""
        request = job_pb2.ListDeadLettersRequest()
        try:
            answer = self._calls.call(
                lambda stub, timeout: stub.ListDeadLetters(request, timeout=timeout)
            )
        except JobIsOver:
            keys, directory = JobKeys(self._calls.job), self._calls.directory
            records = read_keys(directory, keys.all_dead_letters)
            if records:
                records |= read_keys(directory, keys.all_shards)
                records |= read_keys(directory, keys.all_takes)
            return recorded_dead_letters(keys, records)
        return tuple(answer.tasks)

    def retry_dead_letters(self, numbers: Sequence[int] = ()) -> tuple[int, bool]:
        """Give dead-lettered tasks their tries again; none named: all of them.

        Returns:
            How many, and whether a last checkpoint that could not be written is tried again, too.
        """
        request = job_pb2.RetryDeadLettersRequest(numbers=numbers)
        answer = self._calls.call(
            lambda stub, timeout: stub.RetryDeadLetters(request, timeout=timeout)
        )
        return answer.tasks, answer.saves

    def launch(
        self,
        report: LauncherReport,
        *,
        known_version: int = 0,
        wait_ms: int = 1000,
    ) -> WorkerWish:
        """Tell which workers run and which have ended; return which should run.

        Answers at once if what should run is not what ``known_version`` stands for, else after
        ``wait_ms``. It is the ``LauncherPort`` of a launcher in another process. Where the job
        master has left because the job is over, the records tell that.
        """
        request = report_message(report, known_version=known_version, wait_ms=wait_ms)
        try:
            answer = self._calls.call(
                lambda stub, timeout: stub.Launch(request, timeout=timeout),
                attempt_s=wait_ms / 1000 + ATTEMPT_S,
            )
        except JobIsOver as error:
            return WorkerWish(known_version, (), ended=(error.record.state, error.record.reason))
        return wish_of(answer)

    def close(self) -> None:
        """Close the connections."""
        self._calls.close()
