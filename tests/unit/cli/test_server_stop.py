"""Whether a job needs the rows of its own servers follows from its records."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay.cli.server_stop import are_rows_needed
from backstay.consensus.records.jobs import RunState
from backstay.job_spec import CheckpointSpec
from backstay.schedule.rounds import RoundId, RoundKind
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import KEYS, counting_spec, master_of
from tests.unit.memory_nodes import run

DURABLE_S = 5.0


@pytest.mark.parametrize(
    ("end", "every", "steps", "saved", "needed"),
    [
        (None, "pass", 0, 0, True),
        ("done", "pass", 7, 7, False),
        ("failed", "pass", 7, 0, False),
        # Only its servers have what the last checkpoint lacks.
        ("unsaved", "pass", 7, 0, True),
        # The checkpoint of a job that is stopped comes after the order.
        ("stopped", "pass", 7, 0, True),
        ("stopped", "pass", 7, 7, False),
        ("stopped", "none", 7, 0, False),
    ],
)
def test_rows_are_needed_until_the_job_is_over_and_saved(
    tmp_path: Path, end: RunState | None, every: str, steps: int, saved: int, needed: bool
) -> None:
    async def inside(backend: MemoryBackend) -> None:
        spec = counting_spec(tmp_path, checkpoint=CheckpointSpec(every=every))
        async with master_of(MemoryStore(backend), spec, 1) as (_, job):
            if steps:
                job.schedule.count_steps(RoundId(RoundKind.TRAINING, 1), steps)
            if saved:
                job.note_checkpoint("ckpt-1", saved, "/checkpoints")
            if end is not None:
                job.end(end, "for a test")
            job.stage_state()
            await job.journal.durable(DURABLE_S)
            found = (await MemoryStore(backend).range(KEYS.root)).values()
            records = {key: item.value for key, item in found.items()}
            assert are_rows_needed(KEYS, records) is needed

    run(inside)


def test_rows_of_a_job_that_has_not_begun_are_needed() -> None:
    assert are_rows_needed(KEYS, {})
