"""What a job master writes for users who reach the API of Kubernetes only."""

from __future__ import annotations

import json

import pytest

from backstay._proto.v1 import job_pb2
from backstay.kubernetes.published_status import (
    PublishedStatus,
    may_replace,
    not_over,
    status_data,
)
from backstay.master.hosted_launcher import ExitsSeen
from backstay.runner.audit import audit_mapping, audit_of_mapping
from backstay.trainer.worker.audit import RecordsAudit

AUDIT = RecordsAudit(1, 10, 9, 1, 0, 0, 0, (("a.csv", 3, 0),))


def test_an_audit_comes_back_as_it_was_written() -> None:
    data = {"over": "done", "audit": json.dumps(audit_mapping(AUDIT))}
    published = PublishedStatus.of_data(data)
    assert published.audit is not None
    assert audit_of_mapping(published.audit) == AUDIT
    assert not audit_of_mapping(published.audit).records_counted_once


def test_what_cannot_be_read_counts_as_not_said() -> None:
    for text in ("", "{", "[]"):
        assert PublishedStatus.of_data({"over": "done", "audit": text}).audit is None


def test_a_job_that_goes_on_is_not_over() -> None:
    data = {"over": "unsaved", "reason": "a full disk", "audit": "{}", "workers": "{}"}
    left = {name: text for name, text in data.items() if name not in not_over()}
    published = PublishedStatus.of_data(left)
    assert (published.over, published.reason, published.audit) == ("", "", None)


def said(starts: int, over: str = "") -> dict[str, str]:
    """What the job master of that start writes."""
    data = status_data(job_pb2.JobStatus(job="census", master_starts=starts), ExitsSeen())
    return data | ({"over": over} if over else {})


@pytest.mark.parametrize(
    ("found", "data", "is_written"),
    [
        ({}, said(1), True),
        (said(1), said(1), True),
        (said(1), said(2), True),
        (said(2), said(1), False),
        (said(2), said(1, "done"), False),
        (said(1), said(1, "done"), True),
        (said(1, "done"), said(1), False),
        (said(1, "done"), said(2), False),
        (said(1, "done"), said(1, "done"), True),
        # It could not be opened, so nothing is known of it.
        (said(3), {"over": "failed"}, True),
        ({"over": "failed"}, said(1), False),
    ],
)
def test_the_end_and_the_word_of_a_later_job_master_stay(
    found: dict[str, str], data: dict[str, str], is_written: bool
) -> None:
    assert may_replace(found, data) == is_written
