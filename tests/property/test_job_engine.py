"""A job in one process and a job with a master and one worker: the same tasks in the same order.

Both are the same engine. What the journal would write is not looked at here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from backstay.consensus.job_records import JobSpecRecord
from backstay.consensus.keys import JobKeys
from backstay.consensus.memory_store import MemoryBackend, MemoryStore
from backstay.job_engine.engine import JobEngine
from backstay.job_engine.opened_job import OpenedJob, new_job
from backstay.job_engine.records import MemoryRecords
from backstay.job_spec import CheckpointSpec, DataSpec, EarlyStop, JobSpec
from backstay.master.job import Job
from backstay.master.journal import Journal
from backstay.schedule.task_table import TaskRecords, TaskTable, cut_data
from tests.unit.memory_nodes import run

METRIC = "auc"
EARLY_STOPS = st.builds(
    EarlyStop,
    metric=st.just(METRIC),
    mode=st.sampled_from(["max", "min"]),
    patience=st.integers(1, 3),
    min_delta=st.sampled_from([0.0, 0.1]),
)
# A schedule that never ends is a fault, too.
TURNS_MAX = 2000


@dataclass(frozen=True)
class Shard:
    name: str
    records: int


@dataclass(frozen=True)
class Turn:
    """What is done next: a task, or (with a negative number) the end of an evaluation."""

    round: str
    number: int
    records: TaskRecords | None = None
    shuffle_seed: int = 0
    steps: int = 0


@st.composite
def jobs(
    draw: st.DrawFn,
    kinds: Sequence[str] = ("train", "train and evaluate", "evaluate", "predict"),
    *,
    ends_early: bool = True,
) -> tuple[JobSpec, dict[str, TaskTable]]:
    """A job of any kind, and its data cut into tasks."""
    data = DataSpec(paths=("somewhere.csv",))
    kind = draw(st.sampled_from(kinds))
    fields: dict[str, object] = {
        "train": {"training": data},
        "train and evaluate": {"training": data, "validation": data},
        "evaluate": {"validation": data},
        "predict": {"prediction": data},
    }[kind]  # type: ignore[assignment]
    if kind.startswith("train"):
        fields["epochs"] = draw(st.integers(1, 4))
        fields["max_steps"] = draw(st.sampled_from([0, 0, 1, 7, 30])) if ends_early else 0
    if kind == "train and evaluate":
        fields["evaluation_every_steps"] = draw(st.sampled_from([0, 0, 1, 5, 40]))
        fields["early_stop"] = draw(st.none() | EARLY_STOPS if ends_early else st.none())
    spec = JobSpec(
        name="local",
        model="model.py",
        records_per_task=draw(st.integers(1, 8)),
        batch_size=draw(st.integers(1, 4)),
        shuffle=draw(st.sampled_from(["tasks_and_records", "tasks", "none"])),
        seed=draw(st.integers(0, 2**63 - 1)),
        checkpoint=CheckpointSpec(every="none"),
        **fields,  # type: ignore[arg-type]
    )
    # With an evaluation after each step, the turns are the square of the tasks.
    sizes = st.lists(st.integers(0, 8), min_size=1, max_size=2).filter(any)
    tables = {
        name: cut_data(name, [Shard(f"s{n}", size) for n, size in enumerate(draw(sizes))], spec)
        for name in spec.data
    }
    return spec, tables


def batches_of(spec: JobSpec, records: int) -> int:
    return -(-records // spec.batch_size)


def advance(job: JobEngine, turns: list[Turn], left: list[float]) -> None:
    while due := job.advance():
        for opened in due:
            turns.append(Turn(str(opened.id), -1, steps=job.schedule.steps))
            job.evaluated(opened, {METRIC: left.pop(0)} if left else {})


def played(job: JobEngine, values: Sequence[float]) -> tuple[list[Turn], str]:
    """Return what the only worker of a job does, and why the job ended."""
    turns, left = list[Turn](), list(values)
    advance(job, turns, left)
    while not job.is_over:
        assert len(turns) < TURNS_MAX
        task = job.assign("the only one")
        assert task is not None
        opened, lease, _ = task
        part = opened.table[lease.task]
        seed = opened.seed_of(job.spec, lease.task)
        turns.append(Turn(str(opened.id), lease.task, part, seed, job.schedule.steps))
        done = lease._replace(acknowledged=batches_of(job.spec, part.count))
        assert job.complete("the only one", opened.id, done, part.count) == (True, True)
        job.closed([(opened.id.number, lease.task)])
        advance(job, turns, left)
    assert job.state.state == "done"
    return turns, job.schedule.reason


def begun(spec: JobSpec, tables: dict[str, TaskTable]) -> OpenedJob:
    return new_job(spec, tables, JobSpecRecord("ab12", 1, spec.to_json()))


def alone(
    spec: JobSpec, tables: dict[str, TaskTable], values: Sequence[float]
) -> tuple[list[Turn], str]:
    """Over memory, as in one process."""
    opened = begun(spec, tables)
    return played(JobEngine(opened, JobKeys(spec.name), MemoryRecords(), lambda: 100.0), values)


def with_a_master(
    spec: JobSpec, tables: dict[str, TaskTable], values: Sequence[float]
) -> tuple[list[Turn], str]:
    """Over the coordination store, as in a job master."""
    found: list[tuple[list[Turn], str]] = []

    async def inside(backend: MemoryBackend) -> None:
        keys = JobKeys(spec.name)
        journal = Journal(MemoryStore(backend), keys, 1)
        found.append(played(Job(begun(spec, tables), keys, journal, lambda: 100.0), values))

    run(inside)
    return found[0]


@settings(max_examples=50, deadline=None)
@given(jobs(), st.lists(st.floats(allow_infinity=False), max_size=12))
def test_one_process_does_what_one_worker_of_a_cluster_does(
    job: tuple[JobSpec, dict[str, TaskTable]], values: list[float]
) -> None:
    spec, tables = job
    assert alone(spec, tables, values) == with_a_master(spec, tables, values)


@settings(deadline=None)
@given(jobs(("train", "train and evaluate"), ends_early=False))
def test_each_pass_goes_once_over_every_record(job: tuple[JobSpec, dict[str, TaskTable]]) -> None:
    spec, tables = job
    turns, reason = alone(spec, tables, [])
    assert reason == ""
    table = tables["training"]
    for number in range(1, spec.epochs + 1):
        tasks = sorted(turn.number for turn in turns if turn.round == f"training-{number}")
        assert tasks == list(range(len(table)))
