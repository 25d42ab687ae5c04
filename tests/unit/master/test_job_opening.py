"""A job master dies at any transaction, and the next one goes on: nothing twice, nothing lost."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backstay.consensus.records.jobs import RunState
from backstay.consensus.store import Txn, TxnResult
from backstay.errors import (
    ConfigError,
    InvalidRequest,
    JobRefused,
    NotJobMaster,
    StoreUnavailable,
    TableConflict,
)
from backstay.job_engine.opening import StateIncarnation
from backstay.job_engine.progress import kept_job
from backstay.job_engine.values import Failure, LeasedTask
from backstay.master.job import Job
from backstay.pserver.checkpoints.jobs import JOBS_PROGRESS, progress_of_jobs
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.task_table import TaskTable
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import (
    KEYS,
    Master,
    counting_spec,
    do_one,
    master_of,
    saved_progress,
)
from tests.unit.memory_nodes import run

DURABLE_S = 5.0
TASKS = 10
PASSES = 2


class Mortal(MemoryStore):
    """After so many transactions the process that uses it is dead: no answer comes any more."""

    def __init__(self, backend: MemoryBackend, transactions: int) -> None:
        super().__init__(backend)
        self._left = transactions
        self.died = asyncio.Event()

    async def transaction(self, txn: Txn) -> TxnResult:
        if self._left <= 0:
            self.died.set()
            await asyncio.Event().wait()
        self._left -= 1
        return await super().transaction(txn)


class Worker:
    """Works as a trainer does, and keeps what it was told is recorded."""

    def __init__(self) -> None:
        # Times that each task of each pass was recorded as done first, as far as it was told.
        self.told: Counter[tuple[int, int]] = Counter()
        # Tasks it has trained on and not been told that they are recorded.
        self.open: dict[tuple[RoundId, int], LeasedTask] = {}
        self.worked: Counter[tuple[int, int]] = Counter()

    async def work(self, job: Job) -> None:
        """Work until the job is over."""
        for (round_id, _), lease in list(self.open.items()):
            await self._complete(job, round_id, lease)
        while not job.is_over:
            given = job.assign("w1")
            await job.journal.durable(DURABLE_S)
            if given is None:
                job.advance()
                continue
            self.worked[given.round.id.number, given.lease.task] += 1
            self.open[given.round.id, given.lease.task] = given.lease
            await self._complete(job, given.round.id, given.lease)

    async def _complete(self, job: Job, round_id: RoundId, lease: LeasedTask) -> None:
        if round_id not in job.rounds:
            del self.open[round_id, lease.task]
            return
        counts, is_new = job.complete("w1", round_id, lease, batches=2, examples=4)
        await job.journal.durable(DURABLE_S)
        del self.open[round_id, lease.task]
        if is_new and round_id.kind is RoundKind.TRAINING:
            self.told[round_id.number, lease.task] += 1
        if counts:
            job.closed([(round_id.number, lease.task)])
        job.advance()


def run_to_the_end(folder: Path, deaths: list[int]) -> tuple[Worker, Job, int]:
    """Run a job whose job masters die after so many transactions each, the last one not at all."""
    worker = Worker()
    end: list[Job] = []
    transactions = 0

    async def scenario(backend: MemoryBackend) -> None:
        nonlocal transactions
        spec = counting_spec(folder, epochs=PASSES)
        instance = 0
        for instance, lifetime in enumerate(deaths, start=1):
            store = Mortal(backend, lifetime)
            master = Master(store, spec, instance)

            async def live(master: Master = master, instance: int = instance) -> None:
                await worker.work(await master.open(replaces=instance - 1))

            living = asyncio.create_task(live())
            dying = asyncio.create_task(store.died.wait())
            await asyncio.wait({living, dying}, return_when=asyncio.FIRST_COMPLETED)
            for task in (living, dying):
                task.cancel()
            await asyncio.gather(living, dying, return_exceptions=True)
            await master.kill()
        async with master_of(MemoryStore(backend), spec, instance + 1, replaces=instance) as (
            master,
            job,
        ):
            await worker.work(job)
            await job.journal.durable(DURABLE_S)
            transactions = master.journal.transactions
            end.append(job)

    run(scenario)
    return worker, end[0], transactions


def every_task() -> set[tuple[int, int]]:
    return {(number, task) for number in range(1, PASSES + 1) for task in range(TASKS)}


def test_a_job_without_deaths_does_each_task_once(tmp_path: Path) -> None:
    worker, job, transactions = run_to_the_end(tmp_path, [])
    assert job.state.state == "done"
    assert worker.told == dict.fromkeys(every_task(), 1)
    assert job.figures["examples"] == PASSES * TASKS * 4
    assert job.schedule.steps == PASSES * TASKS * 2
    # An assignment and a completion, and a little: each call is one transaction at most.
    assert transactions < 3 * PASSES * TASKS


@pytest.mark.parametrize("lifetime", range(1, 50))
def test_a_master_that_dies_at_any_transaction_loses_nothing(tmp_path: Path, lifetime: int) -> None:
    worker, job, _ = run_to_the_end(tmp_path, [lifetime])
    assert job.state.state == "done"
    # What was told is told once, and what was not told was recorded all the same.
    assert max(worker.told.values()) == 1
    assert set(worker.worked) >= every_task()
    # A task whose completion was told is not given out again.
    again = {task for task, count in worker.worked.items() if count > 1}
    assert len(again) <= 1
    assert job.schedule.steps == PASSES * TASKS * 2


def test_masters_that_die_one_after_the_other_get_there_as_well(tmp_path: Path) -> None:
    worker, job, _ = run_to_the_end(tmp_path, [9, 11, 7, 13, 8, 10])
    assert job.state.state == "done"
    assert max(worker.told.values()) == 1
    assert set(worker.worked) >= every_task()


def test_leases_survive_the_master_with_their_time_anew(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            given = job.assign("w1")
            assert given is not None
            await job.journal.durable(DURABLE_S)
        async with master_of(store, spec, 2, replaces=1) as (master, job):
            others = [job.assign("w2") for _ in range(TASKS)]
            tasks = [one.lease.task for one in others if one is not None]
            assert given.lease.task not in tasks
            assert len(tasks) == TASKS - 1
            assert job.renew("w1", [(given.round.id, given.lease)]) == []
            master.now_s += spec.task_lease_ttl_ms / 1000 + 0.1
            job.expire()
            # Its time is over, and somebody else has its task: it is told so.
            others = [job.assign("w3") for _ in range(TASKS)]
            assert given.lease.task in [one.lease.task for one in others if one is not None]
            revoked = [(given.round.id, given.lease)]
            assert job.renew("w1", [(given.round.id, given.lease)]) == revoked

    run(scenario)


def test_the_data_is_scanned_once(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            records = job.tables["training"].records
        (tmp_path / "data.csv").unlink()
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            assert job.tables["training"].records == records

    run(scenario)


def test_a_job_with_other_settings_is_refused_by_name_and_begun_anew_on_request(
    tmp_path: Path,
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            await Worker().work(job)
        other = replace(spec, records_per_task=8)
        refused = Master(store, other, 2)
        with pytest.raises(JobRefused, match=r"records_per_task is 8, was 4.*--fresh"):
            await refused.open(replaces=1)
        await refused.kill()
        async with master_of(store, other, 3, replaces=2, fresh=True) as (_, job):
            assert job.schedule.passes_over == 0
            assert len(job.tables["training"]) == TASKS / 2

    run(scenario)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 10}, "batch_size is 10, was 64"),
        ({"seed": 3, "shuffle": "none"}, "shuffle is 'none', was 'tasks_and_records'; seed is 3"),
        ({"model": "other.py"}, "model is 'other.py', was 'model.py'"),
        ({"model_params": {"dim": 8}}, "model_params is {'dim': 8}, was {}"),
    ],
)
def test_a_restored_job_with_other_settings_is_refused_as_one_on_a_cluster_that_lives(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        spec = counting_spec(tmp_path)
        async with master_of(MemoryStore(backend), spec, 1) as (_, job):
            job.declare_tables(["counting/users"])
            await do_one(job)
            kept = await progress_of_jobs(MemoryStore(backend), 0, 0)
        saved = kept_job(kept[JOBS_PROGRESS], KEYS.job)
        # Servers that began with the checkpoint, and have no records of any job.
        store = MemoryStore(MemoryBackend())
        refused = Master(store, replace(spec, **changes), 1)
        refused.restored = saved
        text = f"exists in the checkpoint .* with other settings: {re.escape(named)}.*--fresh"
        with pytest.raises(JobRefused, match=text):
            await refused.open()
        await refused.kill()
        # Settings that are not fixed may change.
        master = Master(store, replace(spec, epochs=7), 2)
        master.restored = saved
        job = await master.open(replaces=1)
        assert job.identity.uid == "ab12"
        with pytest.raises(TableConflict, match="each worker must run the same model file"):
            job.declare_tables(["counting/users", "counting/ads"])
        await master.kill()
        # Begun anew, nothing is compared.
        anew = Master(store, replace(spec, **changes), 3)
        anew.restored = saved
        job = await anew.open(replaces=2, fresh=True)
        job.declare_tables(["counting/ads"])
        await anew.kill()

    run(scenario)


def test_each_run_of_a_schedule_begins_anew_and_its_next_job_master_goes_on(
    tmp_path: Path,
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1, run="monday") as (_, job):
            job.declare_tables(["counting/users"])
            await Worker().work(job)
            assert job.identity.uid == "monday"
        async with master_of(store, spec, 2, replaces=1, run="monday") as (_, job):
            assert job.schedule.passes_over == 1
            kept = await progress_of_jobs(store, 0, 0)
        # Other settings: nothing of the run before counts.
        other = replace(spec, batch_size=10)
        async with master_of(store, other, 3, replaces=2, run="tuesday") as (_, job):
            assert (job.schedule.passes_over, job.identity.uid) == (0, "tuesday")
        # Nor does what servers were restored with, unless it is of the same run.
        for run_of_now, tables in (("monday", 1), ("tuesday", 0)):
            master = Master(MemoryStore(MemoryBackend()), spec, 1)
            master.restored = kept_job(kept[JOBS_PROGRESS], KEYS.job)
            job = await master.open(run=run_of_now)
            assert job.identity.uid == run_of_now
            assert len(job.state.tables) == tables
            await master.kill()

    run(scenario)


@pytest.mark.parametrize(
    ("ended", "owner", "goes_on"),
    [
        ("stopped", "deployment-1", False),
        ("failed", "deployment-1", False),
        # Its last checkpoint is tried again.
        ("unsaved", "deployment-1", True),
        # The user has deleted the job and made it anew, or it runs elsewhere.
        ("stopped", "deployment-2", True),
        ("stopped", "", True),
    ],
)
def test_a_job_that_ended_under_its_owner_is_not_opened_again_under_it(
    tmp_path: Path, ended: RunState, owner: str, goes_on: bool
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1, owner="deployment-1") as (master, job):
            job.end(ended, "by hand")
            await master.journal.durable(DURABLE_S)
        async with master_of(store, spec, 2, replaces=1, owner=owner) as (_, job):
            assert job.ended == (None if goes_on else (ended, "by hand"))
            assert job.state.owner == owner

    run(scenario)


def test_more_passes_go_on_where_the_job_ended(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            await Worker().work(job)
            assert job.state.state == "done"
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            assert job.is_over
        async with master_of(store, replace(spec, epochs=3), 3, replaces=2) as (_, job):
            worker = Worker()
            await worker.work(job)
            assert {number for number, _ in worker.told} == {2, 3}

    run(scenario)


def test_dead_lettered_tasks_fail_the_job_and_are_tried_again_by_the_same_command(
    tmp_path: Path,
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path, max_task_retries=0)
        async with master_of(store, spec, 1) as (_, job):
            given = job.assign("w1")
            assert given is not None
            assert job.fail("w1", given.round.id, given.lease, Failure("bad", "w1", (2,)))
            await Worker().work(job)
            assert job.state.state == "failed"
            assert "1 tasks failed for good" in job.state.reason
            await job.journal.durable(DURABLE_S)
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            worker = Worker()
            await worker.work(job)
            assert job.state.state == "done"
            assert set(worker.told) == {(1, given.lease.task)}

    run(scenario)


def test_an_end_leaves_no_records_of_rounds_behind(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            await Worker().work(job)
            await job.journal.durable(DURABLE_S)
        left = {key.split("/")[2] for key in (await store.range(KEYS.root)).values()}
        assert left == {"journal", "master", "shard_counts", "shards", "spec", "state"}

    run(scenario)


def test_going_back_to_progress_revokes_leases_and_gives_what_was_done_since_again(
    tmp_path: Path,
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            saved = {await do_one(job) for _ in range(3)}
            progress = await saved_progress(store, job)
            since = {await do_one(job) for _ in range(4)}
            leased = job.assign("w1")
            assert leased is not None
            job.go_back(progress)
            await job.journal.durable(DURABLE_S)
            job.note_incarnation(StateIncarnation(9, 4))
            await job.journal.durable(DURABLE_S)
            assert job.renew("w1", [(leased.round.id, leased.lease)]) == [
                (leased.round.id, leased.lease)
            ]
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            assert (job.state.restore_version, job.state.generation) == (9, 4)
            worker = Worker()
            await worker.work(job)
            done = {task for _, task in worker.told}
            assert done == set(range(TASKS)) - saved
            assert since <= done

    run(scenario)


def test_a_job_that_was_done_goes_on_when_the_model_goes_back(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            saved = {await do_one(job) for _ in range(6)}
            progress = await saved_progress(store, job)
            await Worker().work(job)
            was_over = job.is_over
            job.go_back(progress)
            assert (was_over, job.is_over) == (True, False)
            worker = Worker()
            await worker.work(job)
            assert {task for _, task in worker.told} == set(range(TASKS)) - saved
            assert job.state.state == "done"

    run(scenario)


def test_progress_that_is_not_of_the_model_or_of_the_data_is_refused(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        assert await progress_of_jobs(store, 0, 0) == {}
        async with master_of(store, spec, 1) as (_, job):
            await do_one(job)
            # The cluster has been restored, and the job has not followed yet.
            with pytest.raises(InvalidRequest, match="before the job had followed"):
                await saved_progress(store, job, restore_version=5)
            saved = kept_job((await progress_of_jobs(store, 0, 0))[JOBS_PROGRESS], KEYS.job)
            assert saved is not None
            other = TaskTable(["data.csv"], [40], 4)
            with pytest.raises(InvalidRequest, match="training data are not the data of"):
                saved.progress({"training": other})

    run(scenario)


def test_tables_of_another_order_are_refused(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), counting_spec(tmp_path), 1) as (_, job):
            job.declare_tables(["wide", "deep"])
            job.declare_tables(["wide", "deep"])
            with pytest.raises(TableConflict, match=r"table 0 .* 'deep', of the job's 'wide'"):
                job.declare_tables(["deep", "wide"])
            with pytest.raises(TableConflict, match="1 tables, the job has 2"):
                job.declare_tables(["wide"])

    run(scenario)


def test_a_second_master_waits_and_the_first_one_is_fenced(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (first, job):
            async with master_of(store, spec, 2, replaces=1) as (_, other):
                given = job.assign("w1")
                assert given is not None
                assert first.writing is not None
                with pytest.raises(NotJobMaster):
                    await first.writing
                other_given = other.assign("w2")
                assert other_given is not None
                await other.journal.durable(DURABLE_S)
            leased = (await store.range(KEYS.all_leased)).values()
            assert [key.rpartition("/")[2] for key in leased] == ["w2"]

    run(scenario)


def test_data_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("x\n", encoding="utf-8")

    async def scenario(backend: MemoryBackend) -> None:
        master = Master(MemoryStore(backend), counting_spec(tmp_path), 1)
        with pytest.raises(ConfigError, match="training: there are no records in"):
            await master.open()
        await master.kill()

    run(scenario)


def test_completions_wait_for_the_store_and_are_not_lost(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            given = job.assign("w1")
            assert given is not None
            await job.journal.durable(DURABLE_S)
            backend.set_outage(True)
            assert job.renew("w1", [(given.round.id, given.lease)]) == []
            assert job.complete("w1", given.round.id, given.lease, batches=1, examples=4) == (
                True,
                True,
            )
            with pytest.raises(StoreUnavailable, match="repeat"):
                await job.journal.durable(0.05)
            backend.set_outage(False)
            # The worker repeats the call: it counts, and not twice.
            assert job.complete("w1", given.round.id, given.lease, batches=1, examples=4) == (
                True,
                False,
            )
            await job.journal.durable(DURABLE_S)
            assert job.figures["examples"] == 4

    run(scenario)
