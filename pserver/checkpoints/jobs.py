"""What checkpoints have to do with the jobs that train on the cluster.

A checkpoint keeps how far each job is, read from its records when its writer has the lock and
before anything of it is written: what a record calls done was acknowledged before, so it is in
every slot that is saved. The masters of the jobs put it together again after a restore. A restore
of some slots only fits no such progress, so it waits for jobs to end. Decides nothing about jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from backstay.consensus.records.jobs import (
    JOBS_PROGRESS,
    JobSpecRecord,
    JobStateRecord,
    StreamRecord,
)
from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import CoordinationStore
from backstay.errors import CheckpointRefused
from backstay.schedule.rounds import RoundId
from backstay.schedule.schedule import is_cut_short, recorded_passes
from backstay.schedule.takes import PERIODS_KEPT

__all__ = [
    "JOBS_PROGRESS",
    "jobs_behind",
    "jobs_cut_short",
    "kept_records",
    "progress_of_jobs",
    "refuse_while_jobs_go_on",
    "with_cut_short",
    "with_forgotten",
    "with_restored",
    "with_taken",
]

# The same number stands in crates/backstay-core/src/stream_memory.rs.
MAX_CLOSED_STREAMS = 8_192
# Less than that: streams of tasks that ended before are closed meanwhile, too.
ENDED_MAX = MAX_CLOSED_STREAMS * 3 // 4


async def progress_of_jobs(
    store: CoordinationStore, restore_version: int, generation: int
) -> dict[str, Any]:
    """Return how far each job is, as one object; empty if there is none.

    Args:
        store: The coordination store.
        restore_version: Which restore of the cluster was the last: progress that goes with
            another one is not that of the model.
        generation: Of the cluster's rows; likewise.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    jobs: dict[str, Any] = {}
    for name in (await store.range(JobKeys.names())).values():
        keys = JobKeys(name.rpartition("/")[2])
        # One read: what it holds was true at one moment.
        found = (await store.range(keys.root)).values()
        if keys.spec in found and keys.state in found:
            texts = {key: item.value for key, item in found.items()}
            jobs[keys.job] = kept_records(keys, texts)
    if not jobs:
        return {}
    return {
        JOBS_PROGRESS: {
            "restore_version": restore_version,
            "generation": generation,
            "jobs": jobs,
        }
    }


def kept_records(keys: JobKeys, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return what a checkpoint keeps of a job's records, which are given by key."""
    kept = {
        "spec": texts[keys.spec],
        "state": texts[keys.state],
        "done": _below(texts, keys.all_done),
        "dead_letters": _below(texts, keys.all_dead_letters),
        "damaged": _below(texts, keys.all_damaged),
        "progressive": _below(texts, keys.all_progressive),
    }
    takes = _below(texts, keys.all_takes)
    return {**kept, "takes": takes} if takes else kept


def _below(texts: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {key.removeprefix(prefix): text for key, text in texts.items() if key.startswith(prefix)}


def jobs_behind(progress: Mapping[str, Any]) -> list[str]:
    """Return the jobs whose progress is not that of the model: they did not go on since."""
    document = progress.get(JOBS_PROGRESS)
    if document is None:
        return []
    return [name for name, entry in document["jobs"].items() if _is_behind(document, entry)]


def _is_behind(document: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    state = JobStateRecord.from_json(entry["state"])
    incarnation = document["restore_version"], document["generation"]
    return (state.restore_version, state.generation) != incarnation


def with_restored(progress: Mapping[str, Any], restored: Mapping[str, Any]) -> dict[str, Any]:
    """Return progress in which a job that is behind is as far as a checkpoint has it.

    A job that this checkpoint does not have begins anew, so it has none.

    Args:
        progress: As it is recorded.
        restored: That of the checkpoint that all slots were restored from last.
    """
    document = progress[JOBS_PROGRESS]
    there = restored.get(JOBS_PROGRESS, {"jobs": {}})
    version, generation = document["restore_version"], document["generation"]
    jobs = dict(document["jobs"])
    for name in jobs_behind(progress):
        entry = there["jobs"].get(name)
        if entry is not None and _is_behind(there, entry):
            # It had not followed an earlier restore, so this is not known.
            continue
        recorded = jobs.pop(name)
        uids = [JobSpecRecord.from_json(one["spec"]).uid for one in (recorded, entry) if one]
        if len(uids) == 2 and uids[0] == uids[1]:
            state = JobStateRecord.from_json(entry["state"])
            state = replace(state, restore_version=version, generation=generation)
            jobs[name] = {**entry, "state": state.to_json()}
    return {**progress, JOBS_PROGRESS: {**document, "jobs": jobs}}


def with_forgotten(
    kept: Mapping[str, Any], now: Mapping[str, Any], took_s: float
) -> dict[str, Any]:
    """Return progress that says so, if slots may have forgotten tasks which it does not call done.

    A task that ends while a checkpoint is written is in some slots, and is done again after a
    restore: slots that have it skip it, as far as they remember its closed stream. They remember
    ``MAX_CLOSED_STREAMS`` of them (crates/backstay-core/src/stream_memory.rs).

    Args:
        kept: The progress, read before anything was written.
        now: The same, read when all slots are written.
        took_s: The time between.
    """
    before, after = kept.get(JOBS_PROGRESS), now.get(JOBS_PROGRESS)
    if before is None or after is None:
        return dict(kept)
    ended = {
        name: max(0, _tasks_done(entry) - _tasks_done(before["jobs"].get(name)))
        for name, entry in after["jobs"].items()
    }
    total = sum(ended.values())
    if total <= ENDED_MAX:
        return dict(kept)
    why = (
        f"since a restore of a checkpoint: {total} tasks ended in the {took_s:.0f} s in which "
        f"it was written, and slots remember {MAX_CLOSED_STREAMS}; raise "
        "records_per_task"
    )
    return _with_inexact(kept, {name: why for name, count in ended.items() if count})


def with_taken(kept: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return progress with what periods took of data without an end until all slots were written.

    Slots that were written late may have pushes of tasks that were taken meanwhile. After a restore
    these must be the same tasks, or their records would count twice in these slots and once or
    never in others.

    Args:
        kept: The progress, read before anything was written.
        now: The same, read when all slots are written.
    """
    before = kept.get(JOBS_PROGRESS)
    after = now.get(JOBS_PROGRESS, {"jobs": {}})["jobs"]
    if before is None:
        return dict(kept)
    jobs, inexact = dict(before["jobs"]), {}
    for name, entry in before["jobs"].items():
        later = after.get(name)
        if later is None or "takes" not in later or not _is_same_job(entry, later):
            continue
        taken = _with_taken(entry, later)
        if taken is not None:
            jobs[name] = taken
            continue
        inexact[name] = (
            "since a restore of a checkpoint: more than "
            f"{PERIODS_KEPT} periods ended while it was written; make periods longer"
        )
    return _with_inexact({**kept, JOBS_PROGRESS: {**before, "jobs": jobs}}, inexact)


def _is_same_job(entry: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    first, second = (JobSpecRecord.from_json(one["spec"]).uid for one in (entry, later))
    return first == second


def _with_taken(entry: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a job's progress with later takes; None: some of them are forgotten."""
    state, state_later = (JobStateRecord.from_json(one["state"]) for one in (entry, later))
    found = state_later.stream
    assert found is not None
    open_then = recorded_passes(state.schedule) + 1
    over_now = recorded_passes(state_later.schedule)
    numbers = {key: RoundId.parse(key.partition("/")[0]).number for key in later["takes"]}
    needed = set(range(open_then, over_now + 1))
    if open_then <= over_now - PERIODS_KEPT or not needed <= set(numbers.values()):
        return None
    takes = {
        key: text
        for key, text in entry.get("takes", {}).items()
        if RoundId.parse(key.partition("/")[0]).number < open_then
    }
    takes |= {key: text for key, text in later["takes"].items() if numbers[key] >= open_then}
    stream = state.stream
    if stream is None or not stream.positions:
        stream = StreamRecord(positions=found.started, started=found.started)
    began_s = found.began_s if open_then > over_now else stream.began_s
    stream = replace(stream, sealed=max(stream.sealed, found.sealed), began_s=began_s)
    return {**entry, "state": replace(state, stream=stream).to_json(), "takes": takes}


def jobs_cut_short(kept: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the jobs of which slots may have closed streams of tasks that are still to be done.

    The progress that is kept says that a pass goes on. It was cut short since: streams of tasks
    that were never done are closed, and a slot that is saved after that skips what is missing of
    them. The other slots do not.

    Args:
        kept: The progress, read before anything was written.
        now: The same, read when all slots are written.
    """
    before = kept.get(JOBS_PROGRESS, {"jobs": {}})["jobs"]
    after = now.get(JOBS_PROGRESS, {"jobs": {}})["jobs"]
    return [name for name, entry in before.items() if _was_cut(entry, after.get(name))]


def _was_cut(before: Mapping[str, Any], after: Mapping[str, Any] | None) -> bool:
    if is_cut_short(JobStateRecord.from_json(before["state"]).schedule):
        return False
    uids = [JobSpecRecord.from_json(one["spec"]).uid for one in (before, after) if one]
    if after is None or uids[0] != uids[1]:
        # It was cut short before it was removed or begun anew, as far as is known.
        return True
    return is_cut_short(JobStateRecord.from_json(after["state"]).schedule)


def with_cut_short(kept: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return progress that says that these jobs, cut short meanwhile, are not exact."""
    if not names:
        return dict(kept)
    why = "since a restore of a checkpoint: the job was cut short while it was written"
    return _with_inexact(kept, dict.fromkeys(names, why))


def _with_inexact(kept: Mapping[str, Any], why: Mapping[str, str]) -> dict[str, Any]:
    before = kept[JOBS_PROGRESS]
    jobs = dict(before["jobs"])
    for name in jobs.keys() & why.keys():
        state = JobStateRecord.from_json(jobs[name]["state"])
        inexact = replace(state, inexact=state.inexact or why[name])
        jobs[name] = {**jobs[name], "state": inexact.to_json()}
    return {**kept, JOBS_PROGRESS: {**before, "jobs": jobs}}


def _tasks_done(entry: Mapping[str, Any] | None) -> int:
    """Return how many training tasks a job has done in all its passes."""
    if entry is None:
        return 0
    return JobStateRecord.from_json(entry["state"]).figures.get("tasks", 0)


async def refuse_while_jobs_go_on(store: CoordinationStore) -> None:
    """Refuse a restore of some slots while there is a job that may go on with the others.

    Its progress says what all slots have. Taken back with the checkpoint, slots that stay may
    count again what they have forgotten; kept, those that are restored lack what is done. A job
    that is stopped or failed goes on from its records too, when it is started again.

    Raises:
        CheckpointRefused: There is one; the message names it.
        InvalidRequest: The state of a job cannot be read.
        StoreUnavailable: The store does not answer.
    """
    for name in sorted((await store.range(JobKeys.names())).values()):
        keys = JobKeys(name.rpartition("/")[2])
        found = await store.get(keys.state)
        state = "new" if found is None else JobStateRecord.from_json(found.value).state
        if state != "done":
            ending = (
                "Or let it end first, or end it for good (backstay jobs stop "
                f"{keys.job} --discard). "
                if state in ("new", "running")
                else ""
            )
            raise CheckpointRefused(
                f"job {keys.job!r} ({state}) trains on all slots: with only some of them from a "
                "checkpoint, its records would count never or twice. Restore all slots (without "
                f"--slots): the job goes back with them. {ending}Or allow it (--allow-inexact): "
                "the job goes on from the checkpoint's progress and says from when on its records "
                "are not counted exactly"
            )
