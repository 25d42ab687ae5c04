"""The counters of records on a real server, judged by what each task may have counted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from backstay.errors import UnknownTable
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from backstay.trainer.worker import audit
from backstay.trainer.worker.audit import RecordCounter, RecordsAudit, TaskCount, audit_records

JOB = 77


@pytest.fixture
def client(one_server: LocalCluster) -> Iterator[Client]:
    with Client(one_server.endpoints) as client:
        yield client


def judged(client: Client, job: str, *tasks: TaskCount) -> RecordsAudit:
    return audit_records(client, job, JOB, tasks, passes=2)


def test_each_record_is_judged_by_its_task(client: Client) -> None:
    counter = RecordCounter(client, "judged", JOB)
    for _ in range(2):
        counter.count("a", 0, np.arange(4))
    # The third of four records is damaged: the others have the numbers 0 to 2.
    counter.count("a", 4, np.arange(3))
    counter.count("a", 4, np.arange(3))
    # Half of a task that the second pass dropped.
    counter.count("a", 8, np.arange(4))
    counter.count("a", 8, np.arange(2))
    client.flush()
    whole, damaged = TaskCount("a", 0, 4, 0, 2, 2), TaskCount("a", 4, 4, 1, 2, 2)
    dropped = TaskCount("a", 8, 4, 0, 1, 2)
    found = judged(client, "judged", whole, damaged, dropped)
    assert found.records_counted_once, found
    assert (found.records, found.right, found.damaged, found.unfinished) == (12, 11, 1, 4)
    # The same counters, if the dropped task were done, or had never been begun.
    found = judged(client, "judged", whole, damaged, dropped._replace(least=2))
    assert (found.missing, found.doubled) == (2, 0)
    assert found.first_wrong == (("a", 10, 1), ("a", 11, 1))
    found = judged(client, "judged", whole, damaged, dropped._replace(most=1))
    assert (found.missing, found.doubled) == (0, 2)
    # A number that stands for no record must not be counted.
    found = judged(client, "judged", whole._replace(damaged=1), damaged, dropped)
    assert (found.doubled, found.first_wrong) == (1, (("a", 3, 2),))
    assert not found.records_counted_once


def test_tasks_of_any_size_are_read_in_parts(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "RECORDS_AT_ONCE", 8)
    counter = RecordCounter(client, "parts", JOB)
    counter.count("a", 0, np.arange(17))
    counter.count("a", 20, np.arange(5))
    counter.count("b", 0, np.arange(3))
    client.flush()
    tasks = (
        TaskCount("a", 0, 20, 3, 1, 1),
        TaskCount("a", 20, 5, 0, 1, 1),
        TaskCount("b", 0, 3, 0, 1, 1),
    )
    found = judged(client, "parts", *tasks)
    assert found.records_counted_once, found
    assert (found.records, found.right, found.damaged) == (28, 25, 3)
    counter.count("a", 0, np.array([16]))
    client.flush()
    assert judged(client, "parts", *tasks).first_wrong == (("a", 16, 2),)


def test_a_job_that_is_begun_anew_begins_with_no_counters(client: Client) -> None:
    counter = RecordCounter(client, "anew", JOB)
    counter.count("a", 0, np.arange(4))
    client.flush()
    tasks = [TaskCount("a", 0, 4, 0, 1, 1)]
    with pytest.raises(UnknownTable):
        audit_records(client, "anew", JOB + 1, tasks, passes=1)
    again = RecordCounter(client, "anew", JOB + 1)
    again.count("a", 0, np.arange(4))
    client.flush()
    assert audit_records(client, "anew", JOB + 1, tasks, passes=1).records_counted_once
