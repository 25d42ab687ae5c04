"""A job in virtual time: what it is, its job masters one after the other, and what must be true.

The judge knows what each batch pushes: when the job is done, each slot counts each of them once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

from backstay.consensus.records.checkpoints import CheckpointRecord, RestorePlan
from backstay.consensus.records.jobs import JobSpecRecord, JobStateRecord, stream_job_of
from backstay.consensus.store import Put, Txn
from backstay.data import Shard
from backstay.job_engine.task_store import TaskBits
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec
from backstay.pserver.checkpoints.jobs import JOBS_PROGRESS, jobs_cut_short
from backstay.schedule.schedule import Schedule, is_cut_short
from backstay.schedule.task_table import TaskTable
from tests.sim.checkpoints import NEWEST, RESTORE, SAVE_EVERY, URL, Checkpoints, SavedSlot
from tests.sim.events import MS, Micros
from tests.sim.job_master import KEYS, LEASE_TTL_MS, UID, SimMaster

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

__all__ = ["BATCHES", "TABLES", "JobBook", "JobCheckpoints", "SlowJobCheckpoints"]

TASKS = 5
BATCHES = 5
TABLES = 2
PASSES = 2
RESCUES_MAX = 4
# Of batches, 50 in all: within the first pass, the second one, or never.
MAX_STEPS = (0, 11, 28, 28, 40)
# How long a checkpoint that takes time does, in the mean, and how often it is begun anew.
SAVE_TAKES = 400 * MS


def job_spec(seed: int, *, cuts: bool = False) -> JobSpec:
    """Return the job of a seed; ``cuts``: it may end in the middle of a pass."""
    return JobSpec(
        name=KEYS.job,
        model="model.py",
        training=DataSpec(paths=("data.csv",)),
        epochs=PASSES,
        batch_size=1,
        records_per_task=BATCHES,
        seed=seed,
        task_lease_ttl_ms=LEASE_TTL_MS,
        straggler_factor=1.5,
        straggler_min_s=0.05,
        max_task_retries=10,
        checkpoint=CheckpointSpec(every="none"),
        max_steps=Random(f"cut {seed}").choice(MAX_STEPS) if cuts else 0,
    )


class JobBook:
    """The job as the simulation sees it: its job masters, and what must be true at its end."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = Random(f"job {seed}")
        self.spec = job_spec(seed, cuts=cluster.cuts_passes)
        self.failed = False
        self._rescues = 0
        self.went_back = 0
        self.first: Counter[tuple[int, int, int]] = Counter()
        self.masters: list[SimMaster] = []
        self.saved: list[dict[str, Any]] = []
        self.stream_job = stream_job_of(UID)
        self._seed = seed
        self._deaths = self.random.choice((0, 2, 6, 12))
        table = self.table()
        state = JobStateRecord("running", data={"training": table.digest()})
        records = {
            KEYS.spec: JobSpecRecord(UID, 1, self.spec.to_json()).to_json(),
            KEYS.state: state.to_json(),
        }
        puts = tuple(Put(key, text) for key, text in records.items())
        cluster.store.state.transact(Txn((), puts))
        self._start_master()
        for _ in range(self._deaths):
            at = self.random.randrange(100 * MS, cluster.options.faults_end)
            cluster.queue.after(at, self._hurt_master)
        cluster.queue.after(50 * MS, self._supervise)

    def table(self) -> TaskTable:
        """Return the tasks of the training data."""
        return TaskTable.from_shards([Shard("data.csv", TASKS * BATCHES)], BATCHES)

    # Masters

    @property
    def newest(self) -> SimMaster:
        """The job master that was started last."""
        return self.masters[-1]

    def _start_master(self) -> None:
        self.masters.append(SimMaster(self, len(self.masters) + 1))

    def _hurt_master(self) -> None:
        one = self.newest
        if self.random.random() < 0.6:
            one.die("masters_killed")
            return
        one.pause(self.random.randrange(20 * MS, 600 * MS))
        self.cluster.queue.counts["masters_paused"] += 1
        if self.random.random() < 0.6:
            # Somebody takes it for dead.
            self.cluster.queue.after(self.random.randrange(300 * MS), self._start_master)

    def rescue(self) -> None:
        """Restore a checkpoint and start a job that has failed again, as people do, in any order.

        Not for ever.
        """
        self._rescues += 1
        if self.cluster.checkpoints is None or self._rescues > RESCUES_MAX:
            self.failed = True
            return
        self.cluster.queue.counts["rescues"] += 1
        for what in (self._restore_all, partial(self.newest.die, "masters_ended")):
            self.cluster.queue.after(self.random.randrange(MS, 300 * MS), what)

    def _restore_all(self) -> None:
        assert self.cluster.checkpoints is not None
        if not self.cluster.checkpoints.restore_all():
            self.cluster.queue.after(50 * MS, self._restore_all)

    def _supervise(self) -> None:
        if not self.newest.is_alive:
            self._start_master()
        self.cluster.queue.after(50 * MS, self._supervise)

    # Data

    def tasks(self) -> Iterator[tuple[int, int]]:
        """Yield all tasks, with the numbers of their passes."""
        yield from product(range(1, PASSES + 1), range(TASKS))

    def keys_of(self, number: int, task: int, batch: int) -> list[list[int]]:
        """Return the keys of each table's push of a batch; the same for every reader."""
        random = Random(f"{self._seed} {number} {task} {batch}")
        keys = [random.sample(self.cluster.keys, random.choice((1, 2, 5)))]
        keys.append(random.sample(self.cluster.keys, 2))
        return [self.cluster.sort_keys(one) for one in keys]

    # Checkpoints

    def rows(self) -> tuple[RestorePlan | None, int]:
        """Return which restore was the last, and the generation of the rows."""
        found = self.cluster.store.state.get(RESTORE)
        plan = RestorePlan.from_json(found.value) if found is not None else None
        generation = self.cluster.routings[-1].generation if self.cluster.routings else 0
        return plan, generation

    def records(self) -> dict[str, Any]:
        """Return what a node that writes a checkpoint reads of the job before it begins."""
        plan, generation = self.rows()
        found = self.cluster.store.state.range(KEYS.root).values()

        def below(prefix: str) -> dict[str, str]:
            return {
                key.removeprefix(prefix): item.value
                for key, item in found.items()
                if key.startswith(prefix)
            }

        document = {
            "spec": found[KEYS.spec].value,
            "state": found[KEYS.state].value,
            "done": below(KEYS.all_done),
            "dead_letters": below(KEYS.all_dead_letters),
            "damaged": below(KEYS.all_damaged),
        }
        version = plan.version if plan is not None else 0
        return {"restore_version": version, "generation": generation, "jobs": {"job": document}}

    def kept(self, plan: RestorePlan) -> dict[str, Any]:
        """Return what was saved of the job with a checkpoint."""
        return self.saved[int(plan.checkpoint.split("-")[1]) - 1]

    # Verdict

    def told_first(self, number: int, task: int, worker: str) -> None:
        """A worker was told that its attempt made a task done."""
        self.cluster.queue.counts["told_first"] += 1
        self.first[self.went_back, number, task] += 1
        restored = self.cluster.checkpoints is not None
        if self.first[self.went_back, number, task] > 1 and not restored:
            self.cluster.fail(f"task {number}-{task} was completed first twice, now by {worker}")

    @property
    def state(self) -> str:
        """The job's state as it is recorded."""
        return self._recorded().state

    def _recorded(self) -> JobStateRecord:
        found = self.cluster.store.state.get(KEYS.state)
        assert found is not None
        return JobStateRecord.from_json(found.value)

    @property
    def missing(self) -> str:
        """What is missing until the job is over; empty if nothing is."""
        if self.failed or (self.state == "done" and not self._start_again()):
            return ""
        return f"the job is {self.state}"

    def _start_again(self) -> bool:
        """Start a job again that was done, as people do when its rows were restored or lost since.

        Returns:
            Whether that is under way.
        """
        plan, generation = self.rows()
        if generation == self._recorded().generation or self._rescues > RESCUES_MAX:
            return False
        job = self.newest.job
        if job is not None and job.is_over and (plan is None or plan.state == "done"):
            self._rescues += 1
            self.cluster.queue.counts["started_again"] += 1
            self.newest.die("masters_ended")
        return True

    def check_end(self, where: str, keys: list[int], counts: list[int]) -> None:
        """Each batch of each pass counts once in each slot, if rows are those of its end."""
        recorded = self._recorded()
        if self.rows()[1] != recorded.generation:
            self.cluster.queue.counts["rows_changed_after_the_end"] += 1
            return
        if recorded.inexact:
            # It says so itself: some slots were restored, others not.
            self.cluster.queue.counts["inexact_copies"] += 1
            return
        least, most = self._expected
        for key, count in zip(keys, counts, strict=True):
            if not least[key] <= count <= most[key]:
                slot = self.cluster.slot_of[key]
                self.cluster.fail(
                    f"job: {where} counts {count} for key {key} of slot {slot}, "
                    f"not {least[key]} to {most[key]}"
                )

    @cached_property
    def _expected(self) -> tuple[Counter[int], Counter[int]]:
        """What each key counts at least and at most at the end of the job.

        Batches of tasks that are not done, in a pass that was cut short, may count or not.
        """
        least: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for number, task in self.tasks():
            for batch in range(BATCHES):
                for pushed in self.keys_of(number, task, batch):
                    most.update(pushed)
                    if not self.is_cut(number, task):
                        least.update(pushed)
        return least, most

    def is_cut(self, number: int, task: int) -> bool:
        """Whether a task is not done and never will be: its pass was cut short."""
        record = self._recorded().schedule
        if not is_cut_short(record) or number <= Schedule.of(self.spec, record).passes_over:
            return False
        found = self.cluster.store.state.get(KEYS.done(f"training-{number}", 0))
        chunks = {} if found is None else {0: found.value}
        return task not in TaskBits.from_chunks(TASKS, chunks)

    def note_cut(self) -> None:
        """Have the judge of single pushes expect nothing of tasks that are not done."""
        for number, task in self.tasks():
            if self.is_cut(number, task):
                self.cluster.history.cut((self.stream_job, number, task))


class JobCheckpoints(Checkpoints):
    """Checkpoints that keep the job's records, read a little before they are written."""

    def __init__(self, cluster: Cluster, seed: int, book: JobBook) -> None:
        self._book = book
        super().__init__(cluster, seed)
        # The progress of a job goes with all slots; allowed all the same, it must say so.
        self._some_slots = cluster.allows_inexact
        self.lost_only = self.lost_only and cluster.allows_inexact

    def _save(self) -> None:
        if self._cluster.routings and self._cluster.store.is_up:
            records = self._book.records()
            self._later(30 * MS, partial(self._finish, records))
        else:
            self._later(30 * MS, self._save)

    def _finish(self, records: dict[str, Any]) -> None:
        plan, generation = self._book.rows()
        version = plan.version if plan is not None else 0
        is_same = (version, generation) == (records["restore_version"], records["generation"])
        before = len(self._saved)
        if is_same and (plan is None or plan.state == "done"):
            super()._save()
        elif not self._cluster.trainers[0].stopping:
            self._later(30 * MS, self._save)
        if len(self._saved) > before:
            self._book.saved.append(records)


class SlowJobCheckpoints(JobCheckpoints):
    """Checkpoints that take time: each slot is of a moment of its own, as in reality.

    The node that writes one has the turn: no restore begins meanwhile.
    """

    def __init__(self, cluster: Cluster, seed: int, book: JobBook) -> None:
        self._is_writing = False
        super().__init__(cluster, seed, book)

    def _finish(self, records: dict[str, Any]) -> None:
        plan, generation = self._book.rows()
        version = plan.version if plan is not None else 0
        is_same = (version, generation) == (records["restore_version"], records["generation"])
        if self._cluster.trainers[0].stopping:
            return
        if not is_same or (plan is not None and plan.state != "done"):
            self._later(30 * MS, self._save)
            return
        self._is_writing = True
        slots = list(range(self._cluster.options.slots))
        self._random.shuffle(slots)
        begun = self._cluster.routings[-1].version
        give_up = self._cluster.queue.now + 3 * SAVE_TAKES
        self._gather(records, slots, {}, begun, give_up)

    def _gather(
        self,
        records: dict[str, Any],
        slots: list[int],
        found: dict[int, SavedSlot],
        begun: int,
        give_up: Micros,
    ) -> None:
        if not slots and self._cluster.store.is_up:
            self._end(records, found, begun)
            return
        if self._cluster.queue.now > give_up:
            self._cluster.queue.counts["checkpoints_given_up"] += 1
            self._over()
            return
        again = partial(self._gather, records, slots, found, begun, give_up)
        one = self._save_slot(slots[-1]) if slots else None
        if one is None:
            self._cluster.queue.after(10 * MS, again)
            return
        found[slots.pop()] = one
        step = 2 * SAVE_TAKES // self._cluster.options.slots
        self._cluster.queue.after(self._random.randrange(1, step), again)

    def _end(self, records: dict[str, Any], found: dict[int, SavedSlot], begun: int) -> None:
        counts = self._cluster.queue.counts
        if any(saved.chain[-1].epoch > begun for saved in found.values()):
            counts["checkpoints_given_up"] += 1
        elif jobs_cut_short({JOBS_PROGRESS: records}, {JOBS_PROGRESS: self._book.records()}):
            # ``Saver`` begins it anew.
            counts["checkpoints_cut"] += 1
        else:
            self._saved.append(dict(sorted(found.items())))
            counts["checkpoints"] += 1
            self._book.saved.append(records)
            newest = CheckpointRecord(URL, self._name(len(self._saved)), "")
            self._put(NEWEST, newest.to_json())
        self._over()

    def _over(self) -> None:
        self._is_writing = False
        if not self._cluster.trainers[0].stopping:
            self._later(SAVE_EVERY, self._save)

    def _restore(self) -> None:
        if self._is_writing:
            self._later(20 * MS, self._restore)
            return
        super()._restore()

    def restore_all(self) -> bool:
        """Ask for a restore of all slots, unless a checkpoint is being written."""
        return not self._is_writing and super().restore_all()
