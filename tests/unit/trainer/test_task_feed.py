"""The batches of a task: every record once, in an order that only the seed decides."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay.data import BadRecords, Metadata, Shard
from backstay.data.batch import Column, Record
from backstay.errors import DataDamaged, TooManyBadRecords
from backstay.job.model_definition import ModelDefinition, load
from backstay.trainer.worker.task_feed import FeedFailed, TaskFeed, TaskRange, record_order
from tests.waiting import wait_until


class Numbers:
    """A reader in memory: record n is the number n; those in ``damaged`` are."""

    metadata = Metadata(("n",))

    def __init__(self, damaged: tuple[int, ...] = ()) -> None:
        self.damaged = damaged

    def shards(self) -> Iterable[Shard]:
        return [Shard("numbers", 1000)]

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        if shard != "numbers":
            raise DataDamaged(f"{shard} is not of numbers")
        for n in range(start, start + count):
            if n in self.damaged:
                bad.add(shard, n, "damaged", unit="row")
            else:
                yield {"n": n}

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> Mapping[str, Column] | None:
        return None


@pytest.fixture
def definition(tmp_path: Path) -> ModelDefinition:
    """Its feed returns the numbers of a batch twice, and fails on 666."""
    file = tmp_path / "numbers_model.py"
    file.write_text(
        "def custom_model(): return None\n"
        "def loss(labels, predictions): return None\n"
        "def optimizer(parameters): return None\n"
        "def feed(records, mode, metadata):\n"
        "    n = records.column(metadata.column_names[0])\n"
        "    if 666 in n:\n"
        "        raise ValueError('the beast')\n"
        "    return n if mode == 'prediction' else (n, n)\n",
        encoding="utf-8",
    )
    return load(file)


def fed(definition: ModelDefinition, part: TaskRange, **options: Any) -> list[list[int]]:
    """Return the numbers in each batch."""
    damaged = options.pop("damaged", ())
    settings = {"batch_size": 10, **options}
    with TaskFeed(lambda: Numbers(damaged), definition, "training", part, **settings) as feed:
        batches = list(feed)
        total = feed.batches
    first = settings.get("first_batch", 0)
    assert [batch.number for batch in batches] == list(range(first, total))
    assert feed.all_made
    return [batch.features.tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    """Return the numbers of all batches in their order."""
    return list(itertools.chain.from_iterable(batches))


def test_each_record_once_in_order(definition: ModelDefinition) -> None:
    batches = fed(definition, TaskRange("numbers", 5, 34))
    assert [len(batch) for batch in batches] == [10, 10, 10, 4]
    assert flat(batches) == list(range(5, 39))


def test_shuffled_by_the_seed_alone(definition: ModelDefinition) -> None:
    part = TaskRange("numbers", 100, 95, shuffle_seed=7)
    batches = fed(definition, part)
    assert sorted(flat(batches)) == list(range(100, 195))
    assert flat(batches) != list(range(100, 195))
    assert fed(definition, part) == batches
    assert fed(definition, TaskRange("numbers", 100, 95, shuffle_seed=8)) != batches


def test_an_attempt_that_goes_on_gets_the_same_batches(definition: ModelDefinition) -> None:
    part = TaskRange("numbers", 0, 95, shuffle_seed=7)
    assert fed(definition, part, first_batch=4) == fed(definition, part)[4:]
    assert fed(definition, part, first_batch=10) == []


def test_damaged_records_do_not_change_what_a_replay_gets(definition: ModelDefinition) -> None:
    part = TaskRange("numbers", 0, 50, shuffle_seed=3)
    damaged = (0, 17, 18)
    batches = fed(definition, part, damaged=damaged, bad_records_max=3)
    assert sorted(flat(batches)) == [n for n in range(50) if n not in damaged]
    assert fed(definition, part, damaged=damaged, bad_records_max=3) == batches


def test_places_name_the_records(definition: ModelDefinition) -> None:
    part = TaskRange("numbers", 30, 25, shuffle_seed=9)
    with TaskFeed(lambda: Numbers(), definition, "training", part, batch_size=10) as feed:
        for batch in feed:
            assert (batch.places + 30).tolist() == batch.features.tolist()


def test_a_failing_feed_names_its_records(definition: ModelDefinition) -> None:
    with pytest.raises(FeedFailed) as caught:
        fed(definition, TaskRange("numbers", 660, 20))
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.places.tolist() == list(range(10))  # 660 to 669


def test_data_that_cannot_be_read(definition: ModelDefinition) -> None:
    with pytest.raises(FeedFailed) as caught:
        fed(definition, TaskRange("letters", 0, 20))
    assert isinstance(caught.value.__cause__, DataDamaged)
    with pytest.raises(FeedFailed) as caught:
        fed(definition, TaskRange("numbers", 0, 20), damaged=(1,))
    assert isinstance(caught.value.__cause__, TooManyBadRecords)


def test_an_empty_task(definition: ModelDefinition) -> None:
    assert fed(definition, TaskRange("numbers", 0, 3), damaged=(0, 1, 2), bad_records_max=3) == []


def test_close_in_the_middle_ends_the_thread(definition: ModelDefinition) -> None:
    part = TaskRange("numbers", 0, 600)
    feed = TaskFeed(lambda: Numbers(), definition, "training", part, batch_size=1)
    assert next(iter(feed)).number == 0
    feed.close()
    assert not feed._thread.is_alive()


def test_the_order_is_part_of_the_contract() -> None:
    """Another version of numpy, or of us, must cut a task in the same way."""
    assert record_order(6, 0).tolist() == [0, 1, 2, 3, 4, 5]
    assert record_order(8, 1).tolist() == ORDER_OF_SEED_1
    assert np.array_equal(np.sort(record_order(1000, 12345)), np.arange(1000))


ORDER_OF_SEED_1 = [2, 4, 7, 5, 0, 6, 3, 1]


@pytest.mark.parametrize("count", [0, 10, 25])
def test_the_first_batch_can_be_looked_at_before_its_turn(
    definition: ModelDefinition, count: int
) -> None:
    part = TaskRange("numbers", 100, count)
    with TaskFeed(lambda: Numbers(), definition, "training", part, batch_size=10) as feed:
        wait_until(lambda: feed.all_made)
        first = feed.first_ready()
        assert feed.first_ready() is first
        batches = list(feed)
    assert (first is None) == (count == 0)
    assert not batches or batches[0] is first
    assert flat([batch.features.tolist() for batch in batches]) == list(range(100, 100 + count))


def test_a_feed_that_fails_at_once_has_no_first_batch(definition: ModelDefinition) -> None:
    part = TaskRange("letters", 0, 10)
    with TaskFeed(lambda: Numbers(), definition, "training", part, batch_size=10) as feed:
        wait_until(lambda: feed.all_made)
        assert feed.first_ready() is None
        with pytest.raises(FeedFailed):
            list(feed)
