"""The records of a job: strict about their form, the same after being written and read."""

from __future__ import annotations

import json
from typing import Protocol

import pytest

from backstay.consensus.records.jobs import (
    JobNameRecord,
    JobSpecRecord,
    JobStateRecord,
    JournalRecord,
    MasterRecord,
    stream_job_of,
)
from backstay.consensus.records.keys import JobKeys
from backstay.errors import InvalidRequest


class Record(Protocol):
    def to_json(self) -> str: ...


RECORDS: list[Record] = [
    JobNameRecord("ab12"),
    JobSpecRecord("ab12", 1_700_000_000_000, '{"name": "census"}'),
    MasterRecord("127.0.0.1:7300", 2**62, "here", 42),
    JournalRecord(7, 3),
    JobStateRecord("running"),
    JobStateRecord(
        "failed",
        "too many damaged records",
        starts=3,
        schedule="{}",
        workers="{}",
        tables=("wide", "deep"),
        data={"training": "0" * 32},
        restore_version=9,
        generation=2,
        checkpoint="ckpt-000007-3fa9c1",
        figures={"examples": 2**40},
        evaluations=({"round": 1, "steps": 2, "records": 3, "metrics": {"auc": "nan"}},),
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_the_same_after_being_written_and_read(record: Record) -> None:
    kind = type(record)
    assert kind.from_json(record.to_json()) == record  # type: ignore[attr-defined]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_of_another_form_is_not_half_understood(record: Record) -> None:
    kind = type(record)
    document = json.loads(record.to_json())
    first = next(iter(document))
    lacking = {name: value for name, value in document.items() if name != first}
    wrong_ones: list[object] = [
        lacking,
        {**document, "more": 1},
        {**document, first: [None]},
        [],
        1,
    ]
    for wrong in wrong_ones:
        with pytest.raises(InvalidRequest):
            kind.from_json(json.dumps(wrong))  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest):
        kind.from_json("{")  # type: ignore[attr-defined]


def test_a_state_that_is_none_is_refused() -> None:
    text = JobStateRecord("running").to_json().replace("running", "sleeping")
    with pytest.raises(InvalidRequest, match="job state: state: Input should be 'running'"):
        JobStateRecord.from_json(text)


def test_streams_of_jobs_differ_and_fit_63_bits() -> None:
    numbers = {stream_job_of(f"{uid:016x}") for uid in range(1000)}
    assert len(numbers) == 1000
    assert all(0 < number < 2**63 for number in numbers)


def test_the_list_of_jobs_is_no_jobs_record() -> None:
    # No name of a job holds an @.
    assert not JobKeys("census").name.startswith(JobKeys("census").root)
    assert JobKeys("census").name.startswith(JobKeys.names())
    assert not JobKeys("a").root.startswith(JobKeys("ab").root)
    assert not JobKeys("ab").root.startswith(JobKeys("a").root)
