"""The list of running exports, while a folder stands still."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from backstay._proto.v1 import export_pb2
from backstay.consensus.records.exports import ExportRecord
from backstay.pserver.checkpoints.disk import THREADS, in_disk_thread
from backstay.pserver.services import export as service_module
from backstay.pserver.services.export import ExportParts, ExportService

RECORD = ExportRecord("serve", "r", "/served", 1.0, ("*",), False, None, "2026-11-26")


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
