"""The list of running exports, while a folder stands still."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from backstay._proto.v1 import export_pb2
from backstay.consensus.records.exports import ExportRecord, export_spec
from backstay.errors import InvalidRequest
from backstay.job_spec import ExportsSpec, ExportTopicSpec
from backstay.message_fields import fill, values_of
from backstay.pserver.services import export as service_module
from backstay.pserver.services.export import ExportParts, ExportService
from backstay.pserver.snapshots.disk import THREADS, in_disk_thread
from backstay.settings import to_mapping

SPEC = ExportsSpec(url="/served", tables=("*",))
RECORD = ExportRecord(name="serve", run="r", spec=SPEC, started="2026-11-26")


class Records:
    async def all(self) -> dict[str, ExportRecord]:
        return {RECORD.name: RECORD}


def test_a_folder_that_stands_still_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(service_module, "LOOK_S", 0.01)
    # A network file system whose server is away.
    monkeypatch.setattr(service_module, "_newest_at", lambda _: goes_on.wait() and None)
    view: Any = SimpleNamespace(snapshot=lambda: SimpleNamespace(tables=()))
    nothing: Any = None
    records: Any = Records()
    service = ExportService(ExportParts(records, view, nothing, nothing, "ps-0"))

    async def told() -> str:
        request = export_pb2.ListExportsRequest()
        answer = await service.ListExports(request, None)  # type: ignore[arg-type]
        return answer.exports[0].trouble

    async def asked() -> None:
        for _ in range(2):
            troubles = set(await asyncio.gather(*(told() for _ in range(THREADS))))
            assert troubles == {"/served has not answered for 0.01 s"}
        # Checkpoints have the others.
        assert await in_disk_thread(lambda: "free") == "free"
        goes_on.set()
        await asyncio.gather(*service._looks.values())
        assert await told() == ""

    try:
        asyncio.run(asyncio.wait_for(asked(), 60.0))
    finally:
        goes_on.set()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"every_s": 0.0}, "every_s"),
        ({"every_pushes": 10**12 + 1}, "every_pushes"),
        ({"url": ""}, "url"),
        ({"topic": export_pb2.ExportTopic(name="t", brokers=[])}, "no brokers"),
        (
            {"topic": export_pb2.ExportTopic(name="t", brokers=["a:1"], settings={"acks": "1"})},
            "backstay decides it",
        ),
    ],
)
def test_a_call_with_a_wrong_setting_is_refused(change: dict[str, Any], what: str) -> None:
    right = {"name": "n", "url": "/served", "every_s": 1.0, "tables": ["*"]}
    request = export_pb2.StartExportRequest(**{**right, **change})
    nothing: Any = None
    service = ExportService(ExportParts(nothing, nothing, nothing, nothing, "ps-0"))
    with pytest.raises(InvalidRequest, match=what):
        asyncio.run(service.StartExport(request, nothing))


def test_a_spec_travels_whole() -> None:
    topic = ExportTopicSpec(name="t", brokers=("a:1",), settings={"linger.ms": "5"})
    whole = ExportsSpec(
        url="/x",
        every_pushes=7,
        statistics=True,
        score_at_least=0.5,
        tables=("a", "b"),
        topic=topic,
    )
    for spec in (SPEC, whole):
        request = export_pb2.StartExportRequest(name="n")
        fill(request, to_mapping(spec))
        values = values_of(export_pb2.StartExportRequest.FromString(request.SerializeToString()))
        assert values.pop("name") == "n"
        record = ExportRecord(name="n", run="r", spec=export_spec(values), started="now")
        assert record.spec == spec
        assert ExportRecord.from_json(record.to_json()) == record
