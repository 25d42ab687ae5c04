"""Data cut into tasks, bits for tasks, seeds and names of rounds."""

from dataclasses import dataclass

import numpy as np
import pytest

from backstay.errors import InvalidRequest, LimitExceeded
from backstay.job_engine.task_store import CHUNK_TASKS, TaskBits
from backstay.schedule.orders import order_seed, permutation, shuffle_seed
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.task_table import TASKS_MAX, TaskRecords, TaskTable


@dataclass(frozen=True)
class Shard:
    name: str
    records: int


def table(*records: int, per_task: int = 10) -> TaskTable:
    return TaskTable.from_shards(
        [Shard(f"s{number}", count) for number, count in enumerate(records)], per_task
    )


def test_every_record_is_in_one_task() -> None:
    cut = table(25, 0, 10, 0, 1, 0)
    assert [cut[task] for task in range(len(cut))] == [
        TaskRecords("s0", 0, 10),
        TaskRecords("s0", 10, 10),
        TaskRecords("s0", 20, 5),
        TaskRecords("s2", 0, 10),
        TaskRecords("s4", 0, 1),
    ]
    assert cut.records == 36


@pytest.mark.parametrize("task", [-1, 5])
def test_there_are_no_other_tasks(task: int) -> None:
    with pytest.raises(IndexError, match=f"task {task} of 5"):
        table(25, 20)[task]


def test_data_without_records_has_no_tasks() -> None:
    assert len(table()) == len(table(0, 0)) == len(table(0).first_task_only()) == 0


def test_the_end_of_training_has_the_first_records_only() -> None:
    assert list(map(table(0, 25, 9).first_task_only().__getitem__, range(1))) == [
        TaskRecords("s1", 0, 10)
    ]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="records_per_task: 0"):
        table(1, per_task=0)
    with pytest.raises(InvalidRequest, match="'a' is there twice"):
        TaskTable.from_shards([Shard("a", 1), Shard("b", 1), Shard("a", 1)], 5)
    with pytest.raises(InvalidRequest, match="'s0' has -1 records"):
        table(-1)
    with pytest.raises(LimitExceeded, match="raise records_per_task"):
        table(TASKS_MAX + 1, per_task=1)


def test_a_table_comes_back_from_its_records() -> None:
    cut = table(25, 0, 10, 3)
    for per_chunk in (1, 2, 100):
        again = TaskTable.from_chunks(cut.to_chunks(per_chunk))
        assert [again[task] for task in range(len(again))] == [
            cut[task] for task in range(len(cut))
        ]
        assert again.digest() == cut.digest()
    assert len(TaskTable.from_chunks(table().to_chunks())) == 0


def test_records_of_some_tasks_are_counted() -> None:
    cut = table(25, 0, 10, 3)
    for tasks in ([], [0], [2, 4], [0, 1, 2, 3, 4]):
        mask = np.zeros(len(cut), bool)
        mask[tasks] = True
        assert cut.records_of(mask) == sum(cut[task].count for task in tasks)
    assert table().records_of(np.zeros(0, bool)) == 0


def test_the_first_of_some_tasks_is_found_in_each_shard() -> None:
    cut = table(25, 0, 10, 0, 1, 0)
    assert cut.firsts(np.array([False, True, True, False, True])) == [("s0", 10), ("s4", 0)]
    assert cut.firsts(np.zeros(5, bool)) == []
    assert table().firsts(np.zeros(0, bool)) == []


@pytest.mark.parametrize("batch_size", [1, 3, 10, 64])
def test_each_task_has_the_batches_of_its_records(batch_size: int) -> None:
    cut = table(25, 0, 10, 3, 0)
    expected = [-(-cut[task].count // batch_size) for task in range(len(cut))]
    assert cut.batches(batch_size).tolist() == expected


def test_other_data_has_another_digest() -> None:
    digests = {
        table(*records, per_task=size).digest() for records in ((9,), (8, 1)) for size in (9, 8)
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        ['{"records_per_task":1,"names":["a"],"records":["1"]}'],
        ['{"records_per_task":1,"names":["a"],"records":[]}'],
        [*table(1, per_task=1).to_chunks(), *table(1, per_task=2).to_chunks()],
    ],
)
def test_damaged_records_of_a_table_are_refused(chunks: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        TaskTable.from_chunks(chunks)


def test_bits_come_back_from_their_chunks() -> None:
    bits = TaskBits(2 * CHUNK_TASKS + 3)
    tasks = {0, 7, 8, CHUNK_TASKS - 1, CHUNK_TASKS, 2 * CHUNK_TASKS + 2}
    for task in [*tasks, 0]:
        bits.add(task)
    again = TaskBits.from_chunks(bits.size, bits.chunks())
    assert {task for task in range(bits.size) if task in again} == tasks
    assert len(again) == len(bits) == len(tasks)
    assert set(np.flatnonzero(again.to_array())) == tasks
    assert bits.chunk(0).startswith("8101")
    assert TaskBits(9).chunks() == {}


def test_a_copy_of_bits_is_its_own() -> None:
    bits = TaskBits(9)
    copy = bits.copy()
    copy.add(8)
    assert 8 not in bits
    assert (len(bits), len(copy), copy.size) == (0, 1, 9)


def test_bits_grow() -> None:
    bits = TaskBits(0)
    for size in (3, 8, 9, CHUNK_TASKS + 1):
        bits.grow(size)
        bits.add(size - 1)
        assert bits.size == size
    assert set(np.flatnonzero(bits.to_array())) == {2, 7, 8, CHUNK_TASKS}
    assert TaskBits.from_chunks(bits.size, bits.chunks()).chunks() == bits.chunks()


@pytest.mark.parametrize("chunks", [{0: "xy"}, {0: "ff03"}, {1: "01"}, {-1: "01"}, {0: "01" * 600}])
def test_bits_of_tasks_that_are_none_are_refused(chunks: dict[int, str]) -> None:
    with pytest.raises(InvalidRequest, match="tasks done"):
        TaskBits.from_chunks(9, chunks)


def test_rounds_have_names() -> None:
    round_id = RoundId(RoundKind.TRAIN_END, 12)
    assert str(round_id) == "train_end-12"
    assert RoundId.parse("train_end-12") == round_id


@pytest.mark.parametrize(
    "text", ["", "training", "training-0", "training-01", "lunch-1", "training-x"]
)
def test_other_texts_name_no_round(text: str) -> None:
    with pytest.raises(InvalidRequest, match="round"):
        RoundId.parse(text)


def test_an_order_has_every_task_once_and_depends_on_the_seed() -> None:
    orders = [permutation(seed, 1000).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(1000))
    # Neighbours do not stay neighbours: about 2 of 999 by chance.
    assert sum(abs(a - b) == 1 for a, b in zip(orders[0], orders[0][1:], strict=False)) < 20


def test_seeds_differ_by_job_round_and_task_and_never_change() -> None:
    rounds = [RoundId(kind, number) for kind in RoundKind for number in (1, 2)]
    seeds = {shuffle_seed(job, each, task) for job in (0, 1) for each in rounds for task in (0, 1)}
    seeds |= {order_seed(job, each) for job in (0, 1) for each in rounds}
    assert len(seeds) == 2 * len(rounds) * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    # A restarted master of another version must find the same batches.
    assert shuffle_seed(7, RoundId(RoundKind.TRAINING, 3), 11) == SEED_OF_7_3_11
    assert permutation(7, 6).tolist() == ORDER_OF_7


SEED_OF_7_3_11 = 7_861_903_426_384_688_015
ORDER_OF_7 = [1, 5, 0, 4, 3, 2]
