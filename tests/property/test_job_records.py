"""Records of jobs and of checkpoints survive their JSON form, every field of them.

Each field is drawn, so one that ``from_json`` forgets is found; a new field without a strategy
here fails the test, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.consensus.records.checkpoints import (
    RESTORE_STATES,
    CheckpointRecord,
    LossAcceptance,
    RestorePlan,
    SaveRecord,
)
from backstay.consensus.records.jobs import (
    RUN_STATES,
    JobNameRecord,
    JobSpecRecord,
    JobStateRecord,
    JournalRecord,
    MasterRecord,
    StreamRecord,
)
from backstay.job_engine.values import DeadLetter, Failure, LeasedTask, WorkerRecord

TEXTS = st.text(max_size=12)
NUMBERS = st.integers(0, 2**63 - 1)
FIGURES = st.dictionaries(TEXTS, NUMBERS, max_size=3)
TASKS = 20


def tuples(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=3).map(tuple)


FAILURES = st.builds(Failure, error=TEXTS, worker=TEXTS, records=tuples(NUMBERS))
DEAD_LETTERS = st.builds(
    DeadLetter, task=NUMBERS, failures=NUMBERS, failure=FAILURES, acknowledged=NUMBERS
)
STREAM: Mapping[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("positions", "started"), FIGURES),
    **dict.fromkeys(("sealed", "began_s"), NUMBERS),
    "stopping": TEXTS,
    "is_replaced": st.booleans(),
}
# A field of each record -> what it may hold.
RECORDS: Mapping[type[Any], Mapping[str, st.SearchStrategy[Any]]] = {
    JobNameRecord: {"uid": TEXTS},
    JobSpecRecord: {"uid": TEXTS, "created_ms": NUMBERS, "spec": TEXTS},
    MasterRecord: {"address": TEXTS, "instance": NUMBERS, "host": TEXTS, "pid": NUMBERS},
    JournalRecord: {"instance": NUMBERS, "number": NUMBERS},
    JobStateRecord: {
        "state": st.sampled_from(RUN_STATES),
        **dict.fromkeys(("reason", "schedule", "workers", "inexact"), TEXTS),
        **dict.fromkeys(("checkpoint", "checkpoint_url", "owner"), TEXTS),
        **dict.fromkeys(("starts", "restore_version", "generation"), NUMBERS),
        **dict.fromkeys(("passes_begun", "task_lease_ttl_ms"), NUMBERS),
        **dict.fromkeys(("tables", "table_notes"), tuples(TEXTS)),
        "data": st.dictionaries(TEXTS, TEXTS, max_size=3),
        **dict.fromkeys(("figures", "pass_starts", "pass_ends"), FIGURES),
        "evaluations": tuples(st.dictionaries(TEXTS, NUMBERS | TEXTS, max_size=3)),
        "progressive": st.dictionaries(TEXTS, NUMBERS | TEXTS | st.none(), max_size=3),
        "stream": st.none() | st.builds(StreamRecord, **STREAM),
    },
    StreamRecord: STREAM,
    CheckpointRecord: {"url": TEXTS, "id": TEXTS, "created": TEXTS},
    SaveRecord: {"id": TEXTS, "node": TEXTS, "instance": NUMBERS, "started": TEXTS},
    RestorePlan: {
        "url": TEXTS,
        "checkpoint": TEXTS,
        "slots": tuples(NUMBERS),
        "state": st.sampled_from(RESTORE_STATES),
        "version": NUMBERS,
        "generation": NUMBERS,
        "created": TEXTS,
        "lost": NUMBERS,
    },
    LossAcceptance: {"version": NUMBERS, "slots": NUMBERS, "time": TEXTS},
    DeadLetter: {
        "task": NUMBERS,
        "failures": NUMBERS,
        "failure": FAILURES,
        "acknowledged": NUMBERS,
    },
    WorkerRecord: {
        "leased": tuples(st.builds(LeasedTask, NUMBERS, NUMBERS, NUMBERS)),
        "to_close": tuples(st.tuples(NUMBERS, NUMBERS)),
    },
}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_is_drawn(kind: type[Any]) -> None:
    assert RECORDS[kind].keys() == {field.name for field in fields(kind)}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_json_leads_back(kind: type[Any], data: st.DataObject) -> None:
    record = data.draw(st.builds(kind, **RECORDS[kind]))
    again = kind.from_json(record.to_json())
    assert again == record
    assert again.to_json() == record.to_json()
