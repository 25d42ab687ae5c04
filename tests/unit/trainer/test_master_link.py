"""What a worker believes of its leases, and which of its calls go beside the stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backstay._proto.v1 import job_pb2
from backstay.consensus.records.jobs import JobStateRecord
from backstay.job.calls import JobIsOver
from backstay.job.messages import EvaluationOutputs, Task
from backstay.trainer.worker import master_link
from backstay.trainer.worker.master_link import MasterLink


class Calls:
    """Answers in the place of a job master; what is asked meanwhile is the test's."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.meanwhile = meanwhile
        self.went: list[str] = []
        self.signs: list[job_pb2.RenewLeasesRequest] = []

    def call_on_stream(self, ask: Callable[..., Any], **_: Any) -> Any:
        self.went.append("stream")
        answers = {"GetTask": self.give, "Complete": self.take, "RenewLeases": self.renew}
        return ask(SimpleNamespace(**answers), 1.0)

    def call(self, ask: Callable[..., Any], **_: Any) -> Any:
        self.went.append("alone")
        return ask(SimpleNamespace(Complete=self.take), 1.0)

    def give(self, _: job_pb2.GetTaskRequest, timeout: float) -> job_pb2.GetTaskResponse:
        self.meanwhile()
        lease = job_pb2.TaskLease(kind=job_pb2.TASK_KIND_TRAINING, round=1, number=0, attempt=1)
        return job_pb2.GetTaskResponse(task=job_pb2.Task(lease=lease, shard="a", count=4))

    def renew(
        self, request: job_pb2.RenewLeasesRequest, timeout: float
    ) -> job_pb2.RenewLeasesResponse:
        self.signs.append(request)
        return job_pb2.RenewLeasesResponse(task_lease_ttl_ms=2000)

    def take(self, _: job_pb2.CompleteRequest, timeout: float) -> job_pb2.CompleteResponse:
        return job_pb2.CompleteResponse(first=True)


def link_with(calls: Calls) -> MasterLink:
    link = MasterLink("127.0.0.1:1", "job", "w-0")
    link._calls.close()
    link._calls = calls  # type: ignore[assignment]
    link._ttl_s = 2.0
    return link


def test_a_longer_time_to_live_does_not_lengthen_a_lease_that_was_given_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(master_link, "clock_s", lambda: 100.0)
    calls = Calls()
    link = link_with(calls)

    def a_sign_of_life_is_answered() -> None:
        link._ttl_s = 10.0

    calls.meanwhile = a_sign_of_life_is_answered
    task = link.get_task()
    assert isinstance(task, Task)
    assert 100.0 < task.leased_until <= 102.0


def test_what_is_long_does_not_hold_up_signs_of_life() -> None:
    calls = Calls()
    link = link_with(calls)
    task = link.get_task()
    assert isinstance(task, Task)
    assert link.complete(task, batches=1, examples=4)
    many = np.zeros(100_000, dtype=np.float32)
    outputs = EvaluationOutputs(predictions=many, labels=many, records=len(many))
    assert link.complete(task, batches=1, examples=4, outputs=outputs)
    assert calls.went == ["stream", "stream", "alone"]


def test_a_completion_whose_answer_was_lost_is_no_error_when_the_job_is_over() -> None:
    calls = Calls()
    link = link_with(calls)
    task = link.get_task()
    assert isinstance(task, Task)

    def is_over(_: job_pb2.CompleteRequest, timeout: float) -> job_pb2.CompleteResponse:
        raise JobIsOver("job", JobStateRecord("done", ""))

    calls.take = is_over  # type: ignore[method-assign]
    assert not link.complete(task, batches=1, examples=4)
    assert link.stop_reason is not None
    assert "is done" in link.stop_reason


def test_a_sign_of_life_tells_the_memory_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    link = link_with(calls)
    link._keep_once()
    more = np.ones(100 << 20, dtype=np.uint8)
    link._keep_once()
    before, after = (one.resident_bytes for one in calls.signs)
    assert 80 << 20 < after - before < 120 << 20
    del more
    # Elsewhere than on Linux it is not known.
    monkeypatch.setattr(master_link, "STATM", tmp_path / "none")
    link._keep_once()
    assert calls.signs[-1].resident_bytes == 0
