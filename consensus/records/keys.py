"""Where each record stands in the coordination store: its key.

The store itself puts ``/<cluster>/`` before each key, where it is shared with others. Pure;
imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["JOBS", "JobKeys", "Keys"]

# Keys of jobs lie below it. In a store that is shared with others, programs that are not servers
# may reach only these.
JOBS = "jobs/"
# Stands for no worker.
NO_WORKER = "@"


@dataclass(frozen=True)
class Keys:
    """The keys of one cluster."""

    cluster: str

    @property
    def root(self) -> str:
        """The prefix that the store puts before each key, for messages."""
        return f"/{self.cluster}/"

    @property
    def config(self) -> str:
        """What is fixed when the cluster is created."""
        return "config"

    @property
    def routing(self) -> str:
        """The routing table."""
        return "routing"

    @property
    def settings(self) -> str:
        """What may change while the cluster runs."""
        return "settings"

    @property
    def controller(self) -> str:
        """The election key."""
        return "controller"

    @property
    def status(self) -> str:
        """How the cluster does."""
        return "pserver_cluster_status"

    @property
    def members(self) -> str:
        """The prefix of the nodes that are registered."""
        return "pservers/"

    @property
    def trainers(self) -> str:
        """The prefix of the trainers that are alive."""
        return "trainers/"

    @property
    def reports(self) -> str:
        """The prefix of what masters report."""
        return "reports/"

    @property
    def deaths(self) -> str:
        """The prefix of the processes that are known to be gone."""
        return "gone/"

    @property
    def tables(self) -> str:
        """The prefix of the tables."""
        return "tables/"

    @property
    def checkpoint(self) -> str:
        """The newest whole checkpoint."""
        return "checkpoint"

    @property
    def plans(self) -> str:
        """The prefix of what is under way on request."""
        return "plans/"

    @property
    def save(self) -> str:
        """The checkpoint that is being written."""
        return "plans/save"

    @property
    def restore(self) -> str:
        """The checkpoint that is being restored, or was restored last."""
        return "plans/restore"

    @property
    def loss(self) -> str:
        """The loss of slots that an operator accepted last."""
        return "plans/loss"

    @property
    def plan(self) -> str:
        """The plan of a resize, a drain or a rebalance."""
        return "plans/resize"

    @property
    def repairs(self) -> str:
        """The prefix of the newest repairs."""
        return "plans/repair/"

    @property
    def shards(self) -> str:
        """The prefix of the readable view of the routing table."""
        return "pshards/"

    @property
    def events(self) -> str:
        """The prefix of what the controller decided."""
        return "events/"

    def member(self, node_id: str) -> str:
        """Return the key of a node's registration."""
        return f"pservers/{node_id}"

    def trainer(self, trainer_id: str) -> str:
        """Return the key of a trainer."""
        return f"trainers/{trainer_id}"

    def incarnation(self, node_id: str) -> str:
        """Return the key that counts how often a node has registered."""
        return f"incarnations/{node_id}"

    def report(self, instance: int) -> str:
        """Return the key of a process's report."""
        return f"reports/{instance}"

    def death(self, instance: int) -> str:
        """Return the key that says that a process is gone."""
        return f"gone/{instance}"

    def table(self, name: str) -> str:
        """Return the key of a table."""
        return f"tables/{name}"

    def shard(self, slot: int, replica: int) -> str:
        """Return the key of one replica in the readable view."""
        return f"pshards/{slot}/{replica}"

    def repair(self, repair_id: int) -> str:
        """Return the key of a repair; the order of the keys is the order of the repairs."""
        return f"plans/repair/{repair_id:019d}"

    def event(self, routing_version: int, number: int) -> str:
        """Return the key of an event; the order of the keys is the order of the events."""
        return f"events/{routing_version * 1000 + number:019d}"


@dataclass(frozen=True)
class JobKeys:
    """The keys of one job; names of jobs hold neither a slash nor an ``@``."""

    job: str

    @staticmethod
    def names() -> str:
        """Return the prefix of the list of jobs: one small key for each."""
        return f"{JOBS}@/"

    @property
    def name(self) -> str:
        """The job's entry in the list of jobs."""
        return f"{JOBS}@/{self.job}"

    @property
    def root(self) -> str:
        """The prefix of all records of the job, but for its entry in the list."""
        return f"{JOBS}{self.job}/"

    @property
    def spec(self) -> str:
        """What the job is."""
        return f"{self.root}spec"

    @property
    def master(self) -> str:
        """The process that is its job master; bound to its lease."""
        return f"{self.root}master"

    @property
    def journal(self) -> str:
        """Number of the last transaction that a job master wrote, and which master."""
        return f"{self.root}journal"

    @property
    def state(self) -> str:
        """Where the job stands, but for the tasks."""
        return f"{self.root}state"

    @property
    def all_shards(self) -> str:
        """The prefix of what the index scans of the data found."""
        return f"{self.root}shards/"

    @property
    def all_takes(self) -> str:
        """The prefix of what periods have taken of data without an end."""
        return f"{self.root}takes/"

    @property
    def all_done(self) -> str:
        """The prefix of the bitmaps of tasks that are done."""
        return f"{self.root}done/"

    @property
    def all_leased(self) -> str:
        """The prefix of the leases of workers."""
        return f"{self.root}leased/"

    @property
    def all_dead_letters(self) -> str:
        """The prefix of the tasks that failed for good."""
        return f"{self.root}dead_letters/"

    @property
    def all_damaged(self) -> str:
        """The prefix of how many damaged records tasks have."""
        return f"{self.root}damaged/"

    @property
    def all_progressive(self) -> str:
        """The prefix of what is counted of predictions before training."""
        return f"{self.root}progressive/"

    def shards(self, data: str, chunk: int) -> str:
        """Return the key of a part of the shards of ``training``, ``validation``, ..."""
        return f"{self.root}shards/{data}/{chunk:06d}"

    def shard_count(self, data: str) -> str:
        """Return the key that says how many such parts there are, written after them."""
        return f"{self.root}shard_counts/{data}"

    def takes(self, round_name: str, chunk: int) -> str:
        """Return the key of a part of what a period has taken."""
        return f"{self.root}takes/{round_name}/{chunk:06d}"

    def done(self, round_name: str, chunk: int) -> str:
        """Return the key of the bitmap of a round's tasks chunk * 4096 and on."""
        return f"{self.root}done/{round_name}/{chunk:06d}"

    def leased(self, round_name: str, worker: str) -> str:
        """Return the key of a worker's leases; "" stands for no worker."""
        return f"{self.root}leased/{round_name}/{worker or NO_WORKER}"

    @staticmethod
    def worker_of(name: str) -> str:
        """Return whose leases a record has, by the last part of its key; "": no worker's."""
        return "" if name == NO_WORKER else name

    def dead_letters(self, round_name: str, task: int) -> str:
        """Return the key of a task that failed for good."""
        return f"{self.root}dead_letters/{round_name}/{task}"

    def damaged(self, data: str, part: int) -> str:
        """Return the key of the damaged records of some tasks of ``training``, ..."""
        return f"{self.root}damaged/{data}/{part:06d}"

    def progressive_counts(self, number: int) -> str:
        """Return the key of all counts of predictions, up to the task of that number."""
        return f"{self.all_progressive}counts/{number:019d}"

    def progressive_task(self, number: int) -> str:
        """Return the key of the scores of one task: the one that was counted as that number."""
        return f"{self.all_progressive}tasks/{number:019d}"

    def progressive_begun(self, round_name: str, task: int, batch: int) -> str:
        """Return the key of the scores of a task's batches before the one of that number."""
        return f"{self.all_progressive}begun/{round_name}/{task}/{batch}"
