"""What is told of an export that cannot be written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from backstay.consensus.records.exports import ExportRecord
from backstay.job_spec import ExportsSpec
from backstay.pserver.exports.records import ExportRecords
from backstay.pserver.exports.schedule import ExportSchedule
from backstay.pserver.metrics.export_figures import ExportsFigures
from backstay.pserver.snapshots.due import Due
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.memory_nodes import KEYS, run, until


class Broken:
    """Cannot write, and raises an error without a text."""

    async def write(self) -> None:
        raise OSError

    async def close(self) -> None:
        """Nothing is open."""


def test_an_error_without_a_text_is_told_by_its_name() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        records = ExportRecords(MemoryStore(backend), KEYS)
        record = await records.start(
            "serve", ExportsSpec(url="/served", every_s=60.0, tables=("*",))
        )
        snapshot = SimpleNamespace(exports={"serve": record}, revision=1)

        async def never(_revision: int) -> None:
            await asyncio.Event().wait()

        view: Any = SimpleNamespace(snapshot=lambda: snapshot, newer_than=never)
        nothing: Any = None

        def exporter(_record: ExportRecord, _counter: object) -> Any:
            return Broken()

        schedule = ExportSchedule(
            view,
            records,
            exporter,
            nothing,
            lambda: Due(nothing),
            lambda: True,
            ExportsFigures(),
        )
        running = asyncio.ensure_future(schedule.run())

        async def is_told() -> bool:
            return (await records.all())["serve"].trouble == "OSError"

        await until(is_told)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(scenario)
