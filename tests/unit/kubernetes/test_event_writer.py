"""The Events of a job as they reach the API, which forgets, refuses and is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from backstay.backoff import Backoff
from backstay.errors import KubernetesError
from backstay.job_engine.launch import ExitReason, WorkerExit
from backstay.kubernetes import event_writer, job_events
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.event_writer import EventWriter
from backstay.kubernetes.objects import Owner
from tests.waiting import wait_until

OWNER = Owner("backstay-census", "0f8fa")


class Api:
    """Keeps Events; ``refuse`` is what each call raises."""

    namespace = "team"

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.refuse: Exception | None = None

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._called("create", kind)
        name = body["metadata"]["name"]
        if name in self.events:
            raise KubernetesError("already exists", status=409)
        self.events[name] = dict(body)
        return self.events[name]

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        self._called("patch", kind)
        if name not in self.events:
            raise KubernetesError("not found", status=404)
        self.events[name] |= change
        return self.events[name]

    def told(self) -> dict[str, int]:
        return {one["message"]: one["count"] for one in self.events.values()}

    def _called(self, verb: str, kind: str) -> None:
        assert kind == "events"
        self.calls.append(verb)
        if self.refuse is not None:
            raise self.refuse


def writer(api: Api) -> EventWriter:
    return EventWriter(cast(KubernetesApi, api), OWNER)


def run_until(events: EventWriter, holds: Callable[[], bool]) -> None:
    async def run() -> None:
        running = asyncio.create_task(events.run())
        try:
            await asyncio.to_thread(wait_until, holds)
        finally:
            running.cancel()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "CALL_PAUSE_S", 0.01)
    monkeypatch.setattr(job_events, "REWRITE_S", 0.02)
    monkeypatch.setattr(job_events, "RETRY", Backoff(0.01, 300.0))


def test_the_end_of_a_worker_and_a_change_are_told_and_counted() -> None:
    api = Api()
    events = writer(api)
    events.note_exit(WorkerExit("w-1", ExitReason.PREEMPTED, last_words="by a better one"))
    events.note("Scaled", "3 workers wanted, 4 before")
    events.note("Scaled", "3 workers wanted, 4 before")
    ended = "worker w-1 was preempted: by a better one"
    run_until(events, lambda: api.told() == {ended: 1, "3 workers wanted, 4 before": 2})
    events.note("Scaled", "3 workers wanted, 4 before")
    run_until(events, lambda: api.told()["3 workers wanted, 4 before"] == 3)
    assert api.calls == ["create", "create", "patch"]
    # The next job master hears of the same end from the Pod that is kept.
    before = dict(api.told())
    events = writer(api)
    events.note_exit(WorkerExit("w-1", ExitReason.PREEMPTED, last_words="its Pod was deleted"))
    events.write_rest()
    assert api.calls[-1] == "create"
    assert api.told() == before


def test_an_event_that_kubernetes_has_removed_is_made_again() -> None:
    api = Api()
    events = writer(api)
    events.note("Scaled", "a")
    run_until(events, lambda: api.told() == {"a": 1})
    api.events.clear()
    events.note("Scaled", "a")
    run_until(events, lambda: api.told() == {"a": 2})


@pytest.mark.parametrize(
    "refuse",
    [KubernetesError("away"), KubernetesError("forbidden", status=403), TypeError("a fault")],
)
def test_what_the_api_refuses_is_told_when_it_is_taken(refuse: Exception) -> None:
    api = Api()
    api.refuse = refuse
    events = writer(api)
    events.note("Scaled", "a")
    run_until(events, lambda: len(api.calls) >= 3)
    events.write_rest()
    assert api.told() == {}
    api.refuse = None
    run_until(events, lambda: api.told() == {"a": 1})


def test_the_last_events_are_written_at_the_end_and_not_without_a_limit() -> None:
    api = Api()
    events = writer(api)
    for number in range(2 * event_writer.LAST_CALLS_MAX):
        events.note(f"Reason{number}", "a")
    events.write_rest()
    assert len(api.calls) == event_writer.LAST_CALLS_MAX
    api.refuse = KubernetesError("away")
    events.write_rest()
    assert len(api.calls) == event_writer.LAST_CALLS_MAX + 1


def test_a_fault_after_an_event_was_written_does_not_end_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = Api()
    events = writer(api)
    events.note("Scaled", "a")

    def fail(*_: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(job_events.EventLog, "written", fail)
    events.write_rest()
    assert api.told() == {"a": 1}
