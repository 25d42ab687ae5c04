"""A whole cluster in virtual time: one seed, one run, one verdict."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import numpy as np

from backstay import _native
from backstay.consensus.records import NO_MASTER, RoutingTable
from tests.sim.checkpoints import Checkpoints
from tests.sim.crowd import Crowd, CrowdTrainer
from tests.sim.deletions import LIFETIME, Deletions
from tests.sim.events import MS, EventQueue, Micros, S
from tests.sim.faults import Faults
from tests.sim.history import History
from tests.sim.job_worker import JobWorker
from tests.sim.jobs import JobBook, JobCheckpoints, SlowJobCheckpoints
from tests.sim.losses import LossOperator
from tests.sim.network import Network
from tests.sim.plans import Operators, plan_of
from tests.sim.pserver import Pserver
from tests.sim.settings import TableSettings
from tests.sim.staleness import StaleTrainer, stale_keys, stale_tables
from tests.sim.store import SimStore
from tests.sim.tasks import TaskBook, TaskTrainer
from tests.sim.trainer import Trainer

__all__ = ["Cluster", "Failure", "Options", "Outcome", "simulate"]

CHECK_EVERY = 100 * MS
PROBE_EVERY = 4 * MS
UNLIMITED = 2**64 - 1
TABLE = {
    "name": "counts",
    "kind": {"sparse": {"dim": 1}},
    "initializer": {"constant": {"value": 0.0}},
    "optimizer": {"sgd": {"learning_rate": 1.0}},
}


class Failure(Exception):
    """A rule was broken."""


@dataclass(frozen=True)
class Options:
    """A cluster's size and times, drawn from the seed. Times are shorter than in production."""

    nodes: int
    slots: int
    replicas: int
    trainers: int
    slow: Micros
    slow_watch: Micros
    slow_thought: Micros
    duplicates: float
    copy_bytes_per_s: int
    row_time: Micros
    """For how long a row of a copy occupies the wire."""
    copy_window: int
    """Rows of copies on the way to a node, at the least."""
    read_lease: Micros = 150 * MS
    heartbeat: Micros = 45 * MS
    prepare_timeout: Micros = 150 * MS
    ttl: Micros = 600 * MS
    return_grace: Micros = 400 * MS
    faults_end: Micros = 1600 * MS
    healed_within: Micros = 15 * S

    @classmethod
    def draw(cls, random: Random, seed: int) -> Options:
        """Draw one."""
        # Its own: what links are like must not change what else happens.
        links = Random(f"links of {seed}")
        nodes = random.choice((3, 3, 4, 5))
        return cls(
            nodes=nodes,
            slots=random.choice((4, 8, 16) if nodes < 5 else (8, 16)),
            replicas=random.choice((1, 2, 2, 2, 3, 3)),
            trainers=random.randrange(1, 4),
            slow=random.choice((300, 2 * MS, 2 * MS, 20 * MS)),
            slow_watch=random.choice((2 * MS, 20 * MS, 300 * MS)),
            slow_thought=random.choice((1 * MS, 1 * MS, 50 * MS)),
            duplicates=random.choice((0.0, 0.1)),
            # A slot is some fifty bytes.
            copy_bytes_per_s=random.choice((UNLIMITED, UNLIMITED, 2_000)),
            # A slot is some four rows: on slow links its copy takes longer than a push may.
            row_time=links.choice((0, 0, 0, 0, 10 * MS, 60 * MS)),
            copy_window=links.choice((1, 1, 4)),
        )


@dataclass(frozen=True)
class Outcome:
    """How a run went."""

    seed: int
    failure: str
    pushes: int
    reads: int
    counts: Counter[str]


class Cluster:
    """Everything of one run."""

    def __init__(
        self,
        seed: int,
        *,
        trace: bool,
        checkpoints: bool = False,
        tasks: bool = False,
        job: bool = False,
        inexact: bool = False,
        cuts: bool = False,
        deletes: bool = False,
        lifetimes: bool = False,
        stale: bool = False,
        crowded: bool = False,
    ) -> None:
        self.allows_inexact = inexact
        self.cuts_passes = cuts
        self.queue = EventQueue(seed, trace=trace)
        self.options = Options.draw(self.queue.random, seed)
        self.network = Network(self.queue, self.options.slow)
        self.store = SimStore(self.queue, self.network)
        self.routings: list[RoutingTable] = []
        self.processes: dict[int, Pserver] = {}
        self.table_json = json.dumps(TABLE | ({"lifetime": LIFETIME} if lifetimes else {}))
        self.table = _native.table_id("counts")
        self.stale_tables_json = stale_tables() if stale else []
        self.keys = list(range(1, 4 * self.options.slots + 1))
        slots = _native.slots_of(np.array(self.keys, dtype=np.uint64), self.options.slots)
        self.slot_of = dict(zip(self.keys, slots.tolist(), strict=True))
        owners = self.options.trainers if deletes or lifetimes else 0
        self.deletions = Deletions(self, seed, trainers=owners, lifetimes=lifetimes)
        self.slot_of |= self.deletions.slot_of
        self.slot_of |= stale_keys(self.options.slots) if stale else {}
        self.crowd = Crowd(self) if crowded else None
        self.slot_of |= self.crowd.slot_of if self.crowd is not None else {}
        self.history = History(self.slot_of, self.fail)
        self._token = 0
        self._instance = 0
        self.checkpoints: Checkpoints | None = None
        self._losses = LossOperator(self, seed)
        self.settings = TableSettings(self, seed, self.options.faults_end)
        self.queue.log("cluster", lambda: str(self.options))
        for number in range(self.options.nodes):
            self.start_process(f"ps-{number}")
        self._add_trainers(seed, job=job, tasks=tasks)
        self.keys_of: dict[int, list[int]] = {}
        for key in self.keys:
            self.keys_of.setdefault(self.slot_of[key], []).append(key)
        self._seed = seed
        if checkpoints and self.job is not None:
            kind = SlowJobCheckpoints if cuts else JobCheckpoints
            self.checkpoints = kind(self, seed, self.job)
        elif checkpoints:
            self.checkpoints = Checkpoints(self, seed)
        self.queue.after(CHECK_EVERY, self._check_now_and_then)
        self.queue.after(PROBE_EVERY, self._probe_now_and_then)

    def _add_trainers(self, seed: int, *, job: bool, tasks: bool) -> None:
        self.trainers: list[Trainer] = []
        self.tasks: TaskBook | None = None
        self.job: JobBook | None = None
        if job:
            self.job = JobBook(self, seed)
            numbers = range(self.options.trainers + 1)
            self.trainers += [JobWorker(self, number, self.job) for number in numbers]
        else:
            self.trainers += [Trainer(self, number) for number in range(self.options.trainers)]
        if tasks:
            self.tasks = TaskBook(self, seed)
            # At least two, so that one can go on with the task of another.
            first = len(self.trainers)
            numbers = range(first, first + self.options.trainers + 1)
            self.trainers += [TaskTrainer(self, number, self.tasks) for number in numbers]
        for table in self.stale_tables_json:
            for _ in range(2):
                self.trainers.append(StaleTrainer(self, len(self.trainers), table))
        if self.crowd is not None:
            first = len(self.trainers)
            self.trainers += [CrowdTrainer(self, first + n, self.crowd) for n in range(2)]

    def fail(self, why: str) -> None:
        """Give the verdict: a rule was broken."""
        raise Failure(f"{why} (at {self.queue.now / 1000:.3f} ms)")

    def next_token(self) -> int:
        """Return a number that is used once."""
        self._token += 1
        return self._token

    def start_process(self, node_id: str) -> None:
        """Start a process, unless one of that name runs."""
        if any(one.is_alive and one.node_id == node_id for one in self.processes.values()):
            return
        self._instance += 1
        self.queue.log(node_id, lambda: f"starts as process {self._instance}")
        process = Pserver(self, node_id, self._instance)
        self.processes[process.instance] = process
        self.settings.tell(process)

    def sort_keys(self, keys: list[int]) -> list[int]:
        """Return keys ordered by slot, as pushes carry them."""
        return sorted(keys, key=lambda key: (self.slot_of[key], key))

    def watch_delay(self) -> Micros:
        """Return how late a change in the store is heard of."""
        return self.queue.between(100, self.options.slow_watch)

    def think_delay(self) -> Micros:
        """Return how long a controller takes between two steps."""
        return self.queue.between(50, self.options.slow_thought)

    def routing_written(self, routing: RoutingTable, reasons: list[str]) -> None:
        """The store has a new routing table."""
        if routing.version != len(self.routings) + 1:
            self.fail(f"routing version {routing.version} after {len(self.routings)}")
        if self.routings:
            epochs = self.routings[-1].epoch_of_slot
            for slot in np.flatnonzero(routing.epoch_of_slot != epochs).tolist():
                self.queue.counts["slots_lost"] += 1
                self.history.slot_lost(slot)
                if self.checkpoints is not None:
                    self.checkpoints.new_epoch(routing, slot)
        self._check_lost(routing)
        self._losses.look(routing)
        self.queue.counts["routing_changes"] += 1
        self.routings.append(routing)
        self.queue.log("store", lambda: f"routing {routing.version}: {'; '.join(reasons)}")
        self.queue.log("store", lambda: f"{routing.to_json()}")
        self._check_in_sync()

    def _check_lost(self, routing: RoutingTable) -> None:
        """What began anew was lost on purpose, comes from a checkpoint, or has no node yet."""
        if not self.routings:
            return
        before = self.routings[-1]
        for slot in np.flatnonzero(routing.epoch_of_slot != before.epoch_of_slot).tolist():
            if slot not in routing.lost and slot not in routing.restoring.slots:
                self.fail(f"slot {slot} began anew, empty, in routing {routing.version}")

    # Checks

    def check_silent(self, reporter: Pserver, silent: Iterable[int]) -> None:
        """A node that no fault hit is not called silent, however slow the links are."""
        for instance in silent:
            one = self.processes[instance]
            if not (reporter.is_hurt or one.is_hurt):
                self.fail(f"{reporter.node_id} calls {one.node_id} silent, which no fault hit")

    def _synced(self, routing: RoutingTable, slot: int) -> list[Pserver]:
        held = routing.replicas_of_slot[slot].synced
        return [self.processes[routing.nodes[number].instance] for number in held]

    def _check_fit(self) -> None:
        """For I1: the controller makes only in-sync processes master."""
        for process in self.processes.values():
            if process.native.counters()["unfit_promotions"]:
                self.fail(f"I1: {process.node_id} was made master without being in sync")

    def _check_now_and_then(self) -> None:
        self._check_fit()
        self._check_in_sync()
        self._check_digests()
        self.queue.after(CHECK_EVERY, self._check_now_and_then)

    def _probe_now_and_then(self) -> None:
        slot = self.queue.random.randrange(self.options.slots)
        running = [one for one in self.processes.values() if one.is_alive and not one.is_paused]
        answering = [one.node_id for one in running if self.probe(one, slot)]
        # A slot that was declared lost may live on, cut off from the store, with its backups.
        alone = self.options.replicas == 1
        if len(answering) > 1 and (alone or slot not in self.history.lost_slots):
            self.fail(f"I3: {answering} answer reads of slot {slot} at the same time")
        if not self.trainers[0].stopping:
            self.queue.after(PROBE_EVERY, self._probe_now_and_then)

    def probe(self, process: Pserver, slot: int) -> bool:
        """I3, I5: a node that answers a read at this moment knows all that was acknowledged."""
        keys = self.keys_of.get(slot, [])
        if not keys:
            return False
        code, values = process.native.read(process.clock.now(), self.table, keys)
        if code == 0:
            counts = [round(value) for value in values]
            self.history.was_read(process.node_id, keys, counts, self.history.expect(keys))
        return code == 0

    def _check_in_sync(self) -> None:
        """I1: every in-sync replica holds what was acknowledged, applied or staged."""
        if not self.routings:
            return
        for slot, recent in self.history.recent.items():
            # A push may be acknowledged in the old life, on a node that does not know of the new.
            if self.checkpoints is not None and slot in self.history.lost_slots:
                continue
            for process in self._synced(self.routings[-1], slot):
                for stream, sequence in recent if process.is_alive else ():
                    if not process.native.holds(stream, sequence, slot):
                        self.fail(
                            f"I1: {process.node_id} (process {process.instance}) is in sync in "
                            f"slot {slot} without the acknowledged push {stream[0]}/{sequence}"
                        )

    def _check_digests(self) -> None:
        """I4: in-sync replicas are equal wherever they have come equally far.

        In an epoch this holds over terms, too: a new master keeps all that may be applied.
        """
        if not self.routings:
            return
        for slot in range(self.options.slots):
            seen: dict[tuple[int, int], tuple[int, str]] = {}
            for process in self._synced(self.routings[-1], slot):
                if not process.is_alive:
                    continue
                _, epoch, _, torn = process.native.slot_state(slot)
                if torn:
                    continue
                at = (epoch, process.native.place(slot)[0])
                digest = process.native.digest(slot)
                known, other = seen.setdefault(at, (digest, process.node_id))
                if known != digest:
                    self.fail(f"I4: {other} and {process.node_id} differ in slot {slot} at {at}")

    def missing(self) -> str:
        """Return what is missing until the cluster is well again, empty if nothing."""
        waiting = [f"{t.place} waits for {sorted(t.pushes)}" for t in self.trainers if t.pushes]
        if waiting:
            return waiting[0]
        if self.tasks is not None and self.tasks.unfinished:
            return f"tasks {self.tasks.unfinished} are not done and closed"
        # Asked once: a look may start the job again.
        if self.job is not None and (missing := self.job.missing):
            return missing
        if not self.routings:
            return "there is no routing"
        routing = self.routings[-1]
        if routing.restoring.slots:
            return f"slots {routing.restoring.slots} are not loaded"
        living = [one for one in self.processes.values() if one.is_alive]
        alive = len(living)
        plan = plan_of(self)
        leaving = {
            one.instance for one in living if plan and plan.lets_go(one.node_id, one.instance)
        }
        staying = alive - len(leaving)
        if plan is not None and plan.is_under_way and staying >= self.options.replicas:
            return f"{plan}"
        wanted = min(self.options.replicas, staying)
        # No other node takes what the leaving ones cannot give away.
        most = wanted if staying >= self.options.replicas else self.options.replicas
        for slot, held in enumerate(routing.replicas_of_slot):
            if held.master == NO_MASTER:
                return f"slot {slot} has no master"
            if not max(1, wanted) <= len(held.synced) <= most:
                return f"slot {slot} has {len(held.synced)} of {wanted} copies in sync"
            if staying >= self.options.replicas:
                still = {self.processes[routing.nodes[n].instance] for n in held.holders}
                if any(one.instance in leaving for one in still):
                    return f"slot {slot} is on a node that is to hold nothing"
            if not all(one.is_alive for one in self._synced(routing, slot)):
                return f"slot {slot} counts on the dead"
            master = self._synced(routing, slot)[0]
            if master.native.serving_state(slot) != "serving":
                return f"{master.node_id} does not serve slot {slot}"
            ends = {one.native.place(slot) for one in self._synced(routing, slot)}
            if len(ends) != 1:
                return f"replicas of slot {slot} are at {sorted(ends)}"
        # After a loss the cluster says so until its people have seen it.
        if staying >= self.options.replicas and not routing.generation:
            status = self.store.state.get("pserver_cluster_status")
            said = json.loads(status.value) if status else {}
            if said.get("cluster_status") != "OK":
                return f"the cluster says {said}"
        return ""

    def run(self) -> None:
        """Run it all, with faults and without; raises ``Failure``."""
        end = self.options.faults_end
        Faults(self, end)
        Operators(self, self._seed, end)
        self.queue.run_until(end)
        self.queue.log("cluster", lambda: "the faults are over")
        self.network.heal()
        self.store.start()
        for process in list(self.processes.values()):
            process.resume()
            process.work_delay = 150
        dead = {f"ps-{number}" for number in range(self.options.nodes)}
        dead -= {one.node_id for one in self.processes.values() if one.is_alive}
        for node_id in sorted(dead):
            # Before there is a routing table, a cluster waits for all of its first nodes.
            if (
                self.queue.random.random() < 0.7
                or len(dead) == self.options.nodes
                or not self.routings
            ):
                self.start_process(node_id)
        for trainer in self.trainers:
            trainer.stopping = True
        while missing := self.missing():
            if self.job is not None and self.job.failed:
                self.queue.counts["jobs_failed"] += 1
                return
            if self.queue.now > end + self.options.healed_within:
                self.fail(f"liveness: {missing}")
            self.queue.run_until(self.queue.now + 50 * MS)
        if self.job is not None and self.job.failed:
            self.queue.counts["jobs_failed"] += 1
            return
        if self.tasks is not None:
            self.tasks.replay_all()
        if (plan := plan_of(self)) is not None:
            self.queue.counts[f"plan_end_{plan.kind}_{plan.state}"] += 1
        self.check_end()

    def check_end(self) -> None:
        """Check what must hold when nothing is under way any more."""
        self._check_in_sync()
        self._check_digests()
        routing = self.routings[-1]
        if self.job is not None:
            self.job.note_cut()
        for slot in range(self.options.slots):
            keys = self.keys_of.get(slot, [])
            digests = set()
            for process in self._synced(routing, slot):
                counts = [round(one) for one in process.native.peek(self.table, keys)]
                self.history.check_final(process.node_id, keys, counts)
                if self.checkpoints is not None:
                    self.checkpoints.check_final(process.node_id, slot, counts)
                if self.job is not None:
                    self.job.check_end(process.node_id, keys, counts)
                self.deletions.check_final(process, slot, self.history.lost_slots)
                if self.crowd is not None:
                    self.crowd.check_final(process, slot)
                digests.add(process.native.digest(slot))
            if len(digests) != 1:
                self.fail(f"I4: the replicas of slot {slot} differ at rest")
        self._check_fit()
        for process in self.processes.values():
            for table in self.stale_tables_json:
                told, total = process.native.staleness(_native.table_id(json.loads(table)["name"]))
                self.queue.counts["pushes_told"] += told
                self.queue.counts["staleness"] += total


def simulate(
    seed: int,
    *,
    trace: bool = False,
    checkpoints: bool = False,
    tasks: bool = False,
    job: bool = False,
    inexact: bool = False,
    cuts: bool = False,
    deletes: bool = False,
    lifetimes: bool = False,
    stale: bool = False,
    crowded: bool = False,
) -> Outcome:
    """Run one seed.

    Args:
        seed: Of everything.
        trace: Tell what happens.
        checkpoints: With saves and restores as well.
        tasks: With tasks of a master with a perfect memory.
        job: With a job whose masters die.
        inexact: Restores under a job are of some slots, too.
        cuts: Jobs cut passes short, and their checkpoints take time.
        deletes: Trainers delete rows as well.
        lifetimes: The table has a lifetime, and rows expire as well.
        stale: With tables that make up for stale gradients, and trainers that push such.
        crowded: With a table that has more keys than room, and trainers that push to it.
    """
    cluster = Cluster(
        seed,
        trace=trace,
        checkpoints=checkpoints,
        tasks=tasks,
        job=job,
        inexact=inexact,
        cuts=cuts,
        deletes=deletes,
        lifetimes=lifetimes,
        stale=stale,
        crowded=crowded,
    )
    failure = ""
    try:
        cluster.run()
    except Failure as broken:
        failure = str(broken)
    except Exception as broken:
        if trace:
            raise
        failure = f"{type(broken).__name__}: {broken}"
    for process in cluster.processes.values():
        for name, count in process.native.counters().items():
            cluster.queue.counts[f"core_{name}"] += count
    history = cluster.history
    return Outcome(seed, failure, history.pushes, history.reads, cluster.queue.counts)
