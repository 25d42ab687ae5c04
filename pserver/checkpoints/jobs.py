"""What a checkpoint keeps of the jobs that train on the cluster: how far each of them is.

Read from the jobs' records when a checkpoint has its turn and before anything of it is written:
what a record calls done was acknowledged before, so it is in every slot that is saved. The masters
of the jobs put it together again after a restore; here nothing is looked into.
"""

from __future__ import annotations

from typing import Any

from backstay.consensus.keys import JobKeys
from backstay.consensus.store import CoordinationStore

__all__ = ["JOBS_PROGRESS", "progress_of_jobs"]

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
                    for part, prefix in (("done", keys.all_done), ("parked", keys.all_parked))
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
