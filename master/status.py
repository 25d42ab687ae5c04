"""How a job goes, and which of its tasks failed for good, as messages: for commands and displays.

The figures come from a job's memory, or from its records if it has no job master. This module
changes nothing and does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backstay._proto.v1 import job_pb2
from backstay.consensus.records.jobs import JobStateRecord, MasterRecord
from backstay.consensus.records.keys import JobKeys
from backstay.job_engine.values import DeadLetter
from backstay.job_spec import JobSpec
from backstay.master.job import Job
from backstay.schedule import schedule
from backstay.schedule.rounds import RoundId, RoundKind, data_of
from backstay.schedule.task_table import TaskTable

__all__ = [
    "KIND_OF_MESSAGE",
    "MESSAGE_OF_KIND",
    "complete_with_spec",
    "dead_letter_message",
    "dead_letters",
    "job_status",
    "newest_evaluation",
    "recorded_dead_letters",
    "recorded_status",
]

MESSAGE_OF_KIND = {
    RoundKind.TRAINING: job_pb2.TASK_KIND_TRAINING,
    RoundKind.EVALUATION: job_pb2.TASK_KIND_EVALUATION,
    RoundKind.PREDICTION: job_pb2.TASK_KIND_PREDICTION,
    RoundKind.TRAIN_END: job_pb2.TASK_KIND_TRAIN_END,
}
KIND_OF_MESSAGE = {number: kind for kind, number in MESSAGE_OF_KIND.items()}


def job_status(job: Job, own: MasterRecord, now_ms: int) -> job_pb2.JobStatus:
    """Return how a job goes.

    Args:
        job: The job.
        own: The process that is its job master.
        now_ms: Unix time.
    """
    status = job_pb2.JobStatus(
        job=job.spec.name,
        uid=job.identity.uid,
        state="unsaved" if job.checkpoints.unsaved else job.state.state,
        reason=f"the last checkpoint is not written yet: {job.checkpoints.unsaved}"
        if job.checkpoints.unsaved and not job.is_over
        else job.state.reason,
        passes=_passes(job.spec),
        examples=job.figures["examples"],
        steps=job.schedule.steps,
        workers_desired=job.workers.desired,
        workers_min=job.spec.workers.min,
        workers_max=job.spec.workers.max,
        bad_records=job.figures["bad_records"],
        dead_letters=sum(len(opened.ledger.dead_letters) for opened in job.rounds.values()),
        checkpoint=job.state.checkpoint,
        trouble="; ".join(filter(None, [job.journal.trouble, *job.trouble.values()])),
        master_address=own.address,
        master_instance=own.instance,
        started_ms=job.identity.created_ms,
        now_ms=now_ms,
        master_starts=job.state.starts,
        inexact=job.state.inexact,
        saving=job.saves_still or (bool(job.checkpoints.unsaved) and not job.is_over),
        checkpoints_failed=job.checkpoints.failed,
        checkpoint_url=job.state.checkpoint_url,
        table_notes=job.state.table_notes,
        went_back=job.figures["went_back"],
        scalings=job.scalings,
        passes_over=job.schedule.passes_over,
        passes_saved=job.figures["saved_passes"],
    )
    _add_progressive(status, {} if job.progressive is None else job.progressive.shown())
    if job.spec.is_stream:
        _add_stream(status, job)
    _add_round(status, job)
    _add_workers(status, job)
    status.evaluations.extend(map(_evaluation_message, job.state.evaluations))
    return status


def recorded_status(job: str, record: JobStateRecord) -> job_pb2.JobStatus:
    """Return what the records tell of a job that has no job master any more."""
    status = job_pb2.JobStatus(
        job=job,
        state=record.state,
        reason=record.reason,
        examples=record.figures.get("examples", 0),
        steps=record.figures.get("steps", 0),
        bad_records=record.figures.get("bad_records", 0),
        dead_letters=schedule.recorded_dead_letters(record.schedule),
        checkpoint=record.checkpoint,
        checkpoint_url=record.checkpoint_url,
        master_starts=record.starts,
        inexact=record.inexact,
        went_back=record.figures.get("went_back", 0),
        table_notes=record.table_notes,
        passes_over=schedule.recorded_passes(record.schedule),
        passes_saved=record.figures.get("saved_passes", 0),
    )
    _add_progressive(status, record.progressive)
    status.evaluations.extend(map(_evaluation_message, record.evaluations))
    if record.stream is not None:
        status.stream.dropped_records = record.figures.get("dropped_records", 0)
    return status


def _passes(spec: JobSpec) -> int:
    """Return how many passes a job has; 0: none, or periods without an end."""
    return 0 if spec.training is None or spec.is_stream else spec.epochs


def _add_stream(status: job_pb2.JobStatus, job: Job) -> None:
    """Tell how far the job is in training data without an end."""
    dropped, lag = job.figures["dropped_records"] + job.stream.dropped, job.stream.lag
    if lag is not None:
        status.stream.lag_records = lag.records
        status.stream.ahead_records = lag.ahead
        dropped += lag.dropped
    if lag is not None and not lag.records and not job.stream.waiting_folders:
        # The age is asked for less often than the records are counted.
        status.stream.lag_s = 0.0
    elif job.stream.lag_s is not None:
        status.stream.lag_s = job.stream.lag_s
    status.stream.waiting_folders = job.stream.waiting_folders
    status.stream.dropped_records = dropped
    status.stream.stopping = job.stream_record.stopping


def complete_with_spec(status: job_pb2.JobStatus, spec: JobSpec) -> None:
    """Add what records without a job master do not tell, and the job's own description does."""
    status.passes = status.passes or _passes(spec)
    if spec.is_stream:
        status.stream.SetInParent()
    if not status.kind:
        status.kind = MESSAGE_OF_KIND[RoundKind(spec.kind)]


def newest_evaluation(job: Job) -> job_pb2.EvaluationResult | None:
    """Return the last evaluation that is over; one that a restore has undone does not count."""
    number = job.schedule.evaluated
    results = (one for one in reversed(job.state.evaluations) if one["round"] == number)
    return next((_evaluation_message(one) for one in results), None)


def _evaluation_message(result: Mapping[str, Any]) -> job_pb2.EvaluationResult:
    return job_pb2.EvaluationResult(
        round=result["round"],
        steps=result["steps"],
        records=result["records"],
        metrics={name: float(value) for name, value in result["metrics"].items()},
    )


def _add_progressive(status: job_pb2.JobStatus, shown: Mapping[str, Any]) -> None:
    """Tell figures of progressive metrics, as ``Progressive.shown`` has them; empty: none."""
    if not shown:
        return
    told = job_pb2.ProgressiveStatus(
        examples=shown["examples"],
        skipped=shown["skipped"],
        decayed=_figures(shown["decayed"]),
        by=_figures_by(shown["by"]),
        alerts=shown["alerts"],
    )
    for one in shown["windows"]:
        told.windows.add(
            number=one["number"],
            steps=one["steps"],
            window=_figures(one["window"]),
            decayed=_figures(one["decayed"]),
            window_by=_figures_by(one["window_by"]),
            decayed_by=_figures_by(one["decayed_by"]),
            alerts=one["alerts"],
        )
    status.progressive.CopyFrom(told)


def _figures(figures: Mapping[str, float | None]) -> job_pb2.ScoreFigures:
    return job_pb2.ScoreFigures(
        examples=figures["examples"] or 0.0,
        skipped=figures["skipped"] or 0.0,
        auc=figures["auc"],
        logloss=figures["logloss"],
        calibration=figures["calibration"],
    )


def _figures_by(by: Mapping[str, Mapping[str, float | None]]) -> dict[str, job_pb2.ScoreFigures]:
    return {value: _figures(figures) for value, figures in by.items()}


def dead_letters(job: Job) -> list[job_pb2.DeadLetter]:
    """Return the tasks that failed for good."""
    return [
        dead_letter_message(opened.id, dead_letter, opened.table)
        for opened in job.rounds.values()
        for _, dead_letter in sorted(opened.ledger.dead_letters.items())
    ]


def dead_letter_message(
    round_id: RoundId, dead_letter: DeadLetter, table: TaskTable
) -> job_pb2.DeadLetter:
    """Return what is told of a task that failed for good.

    Args:
        round_id: Of which round.
        dead_letter: The task.
        table: All tasks of the round's data.
    """
    place = table[dead_letter.task]
    return job_pb2.DeadLetter(
        kind=MESSAGE_OF_KIND[round_id.kind],
        round=round_id.number,
        number=dead_letter.task,
        shard=place.shard,
        start=place.start,
        count=place.count,
        tries=dead_letter.failures,
        error=dead_letter.failure.error,
        worker=dead_letter.failure.worker,
        records=dead_letter.failure.records,
    )


def _add_round(status: job_pb2.JobStatus, job: Job) -> None:
    """Tell of the round that is shown: training goes before an evaluation beside it."""
    open_rounds = job.schedule.open_rounds
    shown: RoundId | None = next(
        (one for one in open_rounds if one.kind is RoundKind.TRAINING),
        open_rounds[0] if open_rounds else None,
    )
    if shown is None:
        shown = max(job.rounds, key=lambda one: one.number, default=None)
    opened = job.rounds.get(shown) if shown is not None else None
    if opened is None:
        return
    status.kind = MESSAGE_OF_KIND[opened.id.kind]
    status.round = opened.id.number
    counts = opened.ledger.counts
    status.tasks.CopyFrom(
        job_pb2.TaskCounts(
            total=counts.total,
            todo=counts.todo,
            doing=counts.doing,
            done=counts.done,
            dead_letters=counts.dead_letters,
        )
    )
    status.records_total = opened.table.records
    # All tasks but the last ones of shards have the same number.
    status.records_done = opened.table.records * counts.done // counts.total if counts.total else 0


def _add_workers(status: job_pb2.JobStatus, job: Job) -> None:
    ttl_s = job.task_lease_ttl_ms / 1000
    now_s = job.now()
    losses = []
    stale_slots = staleness_sum = 0
    for known in sorted(job.known, key=lambda one: one.id):
        silent_s = now_s - known.heard_s
        is_alive = silent_s < ttl_s
        tasks = [
            f"{opened.id}-{leased.task}"
            for opened in job.rounds.values()
            for leased in opened.ledger.record_of(known.id).leased
        ]
        worker = status.workers.add(
            id=known.id,
            instance=known.instance,
            host=known.host,
            pid=known.pid,
            alive=is_alive,
            tasks=tasks,
            examples=known.examples,
            examples_per_s=known.examples_per_s if is_alive else 0.0,
            silent_ms=int(silent_s * 1000),
            note=known.note,
            resident_bytes=known.resident_bytes,
        )
        if known.loss is not None:
            worker.loss = known.loss
        if known.stale_slots:
            worker.staleness = known.staleness_sum / known.stale_slots
            worker.staleness_sum = known.staleness_sum
            worker.staleness_buckets[:] = known.staleness_buckets
            stale_slots += known.stale_slots
            staleness_sum += known.staleness_sum
        if is_alive:
            status.examples_per_s += known.examples_per_s
            if known.loss is not None:
                losses.append(known.loss)
    if losses:
        status.loss = sum(losses) / len(losses)
    if stale_slots:
        status.staleness = staleness_sum / stale_slots


def recorded_dead_letters(
    keys: JobKeys, records: Mapping[str, str]
) -> tuple[job_pb2.DeadLetter, ...]:
    """Return the tasks that are dead-lettered, by round and number.

    Args:
        keys: The keys of the job.
        records: All records below ``keys.all_dead_letters``, ``keys.all_shards`` and
            ``keys.all_takes``, by key.

    Raises:
        InvalidRequest: A record cannot be read.
    """
    tables: dict[str, TaskTable] = {}
    tasks = []
    for key in sorted(records):
        if not key.startswith(keys.all_dead_letters):
            continue
        round_id = RoundId.parse(key.removeprefix(keys.all_dead_letters).rpartition("/")[0])
        data, prefix = data_of(round_id.kind), f"{keys.all_takes}{round_id}/"
        if any(name.startswith(prefix) for name in records):
            # A period: each has a table of its own.
            data = str(round_id)
        else:
            prefix = f"{keys.all_shards}{data}/"
        if data not in tables:
            chunks = [records[name] for name in sorted(records) if name.startswith(prefix)]
            tables[data] = TaskTable.from_chunks(chunks)
        dead_letter = DeadLetter.from_json(records[key])
        tasks.append(dead_letter_message(round_id, dead_letter, tables[data]))
    return tuple(tasks)
