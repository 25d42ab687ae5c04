"""The rows of a job at the ends of its passes, on real servers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np

from backstay.cluster.directory import Directory
from backstay.config import ClientConfig
from backstay.master.job import Job
from backstay.master.upkeep import RowUpkeep
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, Expiry, Lifetime, Score, TableSpec
from backstay.tasks import end_tasks
from backstay.trainer import Client
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import KEYS, counting_spec, do_one, master_of
from tests.unit.memory_nodes import run

LIFETIME = Lifetime(expiry=Expiry(score_below=1e-6), score=Score(decay=0.5))
TABLE = TableSpec.sparse(f"{KEYS.job}/rows", 2, optimizer=SGD(1.0), lifetime=LIFETIME)


async def do_pass(job: Job, number: int) -> None:
    """Do the one task of a pass, and wait until the rows were seen to."""
    job.advance()
    await do_one(job)
    job.advance()
    changed = job.changed
    while job.figures["upkept_passes"] < number:
        await changed.wait()
        changed = job.changed


def test_a_decay_by_hand_ends_no_later_one_and_one_from_the_future_is_told(tmp_path: Path) -> None:
    config = ClientConfig()
    spec = counting_spec(tmp_path, records=4, epochs=4)
    with (
        LocalCluster(1, settings={"slot_count": 16}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        client.create_table(TABLE)
        client.push(TABLE.name, np.arange(100), np.ones((100, 2), np.float32))

        async def inside(backend: MemoryBackend) -> None:
            async with master_of(MemoryStore(backend), spec, 1) as (_, job):
                upkeep = RowUpkeep(job, spec.name, Directory(cluster.endpoints, config), config)
                seeing = asyncio.create_task(upkeep.run())
                try:
                    await do_pass(job, 1)
                    assert job.figures["upkeeps"] == 1
                    now_ms = int(time.time() * 1000)
                    assert await asyncio.to_thread(client.decay, TABLE.name, period=now_ms) == 16
                    await do_pass(job, 2)
                    assert job.figures["upkeeps"] == 2
                    assert job.trouble["lifetime"] == ""
                    await asyncio.to_thread(client.decay, TABLE.name, period=2**47)
                    await do_pass(job, 3)
                    assert job.figures["upkeeps"] == 2
                    said = f"the decay after pass 3 did nothing in {TABLE.name}: "
                    assert said in job.trouble["lifetime"]
                finally:
                    await end_tasks(seeing)

        run(inside)
