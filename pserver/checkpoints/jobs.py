"""What checkpoints have to do with the jobs that train on the cluster.

A checkpoint keeps how far each job is, read from its records when the checkpoint has its turn and
before anything of it is written: what a record calls done was acknowledged before, so it is in
every slot that is saved. The masters of the jobs put it together again after a restore. A restore
of some slots only fits no such progress, so it waits for jobs to end. Decides nothing about jobs.
"""

from __future__ import annotations

from typing import Any

from backstay.consensus.job_records import JobStateRecord
from backstay.consensus.keys import JobKeys
from backstay.consensus.store import CoordinationStore
from backstay.errors import CheckpointRefused

__all__ = ["JOBS_PROGRESS", "progress_of_jobs", "refuse_while_jobs_go_on"]

# The member of a checkpoint's progress; trainers' own progress has other names.
JOBS_PROGRESS = "backstay_jobs"


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
            jobs[keys.job] = {
                "spec": found[keys.spec].value,
                "state": found[keys.state].value,
                **{
                    part: {
                        key.removeprefix(prefix): item.value
                        for key, item in found.items()
                        if key.startswith(prefix)
                    }
                    for part, prefix in (
                        ("done", keys.all_done),
                        ("parked", keys.all_parked),
                        ("damaged", keys.all_damaged),
                    )
                },
            }
    if not jobs:
        return {}
    return {
        JOBS_PROGRESS: {
            "restore_version": restore_version,
            "generation": generation,
            "jobs": jobs,
        }
    }


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
            raise CheckpointRefused(
                f"job {keys.job!r} ({state}) trains on all slots: with only some of them from a "
                "checkpoint, its records would count never or twice. Restore all slots (without "
                "--slots): the job goes back with them. Or let it end first, or end it for good "
                f"(backstay jobs stop {keys.job} --discard). Or allow it (--allow-inexact): the "
                "job goes on from the checkpoint's progress and says from when on its records "
                "are not counted exactly"
            )
