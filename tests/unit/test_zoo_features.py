"""What the model zoo makes of records: ids and numbers, from columns."""

from __future__ import annotations

import numpy as np
import pytest

from backstay.data.base import Metadata
from backstay.data.batch import Batch
from examples.census import census_features
from examples.ctr.clicks import CRITEO_COLUMNS, FRAPPE_COLUMNS, ids_of, labels_of

CENSUS_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation",
    "relationship", "race", "sex", "capital_gain", "capital_loss", "hours_per_week",
    "native_country", "income",
)  # fmt: skip
PERSON = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, "
    "2174, 0, 40, United-States, <=50K"
)
OTHER = (
    "50, Self-emp-not-inc, 83311, Bachelors, 13, Married-civ-spouse, Exec-managerial, Husband, "
    "White, Male, 0, 0, 13, United-States, >50K."
)


def census(*lines: str, blank: str = " ") -> Batch:
    rows = [line.replace(", ", f",{blank}").split(",") for line in lines]
    return Batch.of_records([dict(zip(CENSUS_COLUMNS, row, strict=True)) for row in rows])


def test_census_features_are_of_the_record_alone() -> None:
    both = census_features.features_of(census(PERSON, OTHER))
    alone = census_features.features_of(census(PERSON))
    # Whether the reader takes the blanks after the commas away does not matter.
    bare = census_features.features_of(census(PERSON, blank=""))
    for index in range(3):
        assert np.array_equal(both[index][:1], alone[index])
        assert np.array_equal(alone[index], bare[index])


def test_census_shapes_and_rows() -> None:
    deep, wide, numbers = census_features.features_of(census(PERSON, OTHER))
    assert deep.shape == (2, census_features.DEEP_FIELDS)
    assert wide.shape == (2, census_features.WIDE_FIELDS)
    assert 0 <= wide.min() <= wide.max() < census_features.ROWS
    assert numbers.shape == (2, len(census_features.NUMBERS))
    assert numbers.dtype == np.float32
    assert abs(numbers).max() < 5
    # Education, its number, race, sex, country, capital loss: what the two have in common.
    assert (deep[0] == deep[1]).sum() == 6


def test_census_labels() -> None:
    assert census_features.labels_of(census(PERSON, OTHER)).tolist() == [0.0, 1.0]


def clicks(columns: tuple[str, ...], *lines: str) -> tuple[Batch, Metadata]:
    rows = [dict(zip(columns, line.split("\t"), strict=True)) for line in lines]
    return Batch.of_records(rows), Metadata(columns)


def criteo_line(label: str = "1", number: str = "5", category: str = "0a1b2c3d") -> str:
    return "\t".join([label, *[number] * 13, *[category] * 26])


def test_criteo_ids() -> None:
    lines = [criteo_line(), criteo_line(number="", category="")]
    lines += [criteo_line(label="0", number=number) for number in ("-1", "0", "5", "1000000")]
    records, metadata = clicks(CRITEO_COLUMNS, *lines)
    ids = ids_of(records, metadata)
    assert ids.shape == (6, 39)
    assert ids.dtype == np.int64
    # No field shares an id with another, and a missing value is a value of its own.
    assert len(np.unique(ids[0])) == len(np.unique(ids[1])) == 39
    assert not np.isin(ids[1], ids[[0, 2, 3, 4, 5]]).any()
    assert len(np.unique(ids[[0, 1, 2, 3, 5], 0])) == 5
    assert (ids[0] == ids[4]).all()
    assert labels_of(records).tolist() == [1, 1, 0, 0, 0, 0]


def test_large_numbers_share_buckets() -> None:
    lines = [criteo_line(number=str(number)) for number in (3, 4, 1000, 1001)]
    ids = ids_of(*clicks(CRITEO_COLUMNS, *lines))[:, 0]
    assert ids[0] == ids[1] != ids[2] == ids[3]


@pytest.mark.parametrize("rows", [1 << 10, 1 << 20])
def test_bounded_ids_fit_their_layer(rows: int) -> None:
    lines = ["1\t957\t4082\tsunset\tfriday\tworkday\thome\tfree\tsunny\tItaly\t0"]
    ids = ids_of(*clicks(FRAPPE_COLUMNS, *lines), rows)
    assert ids.shape == (1, 10)
    assert 0 <= ids.min() <= ids.max() < rows
