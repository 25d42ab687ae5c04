"""Which exports may be started beside those that go on, against the store in memory."""

from __future__ import annotations

import pytest

from backstay.errors import ExportRefused
from backstay.job_spec import ExportsSpec
from backstay.pserver.exports.records import ExportRecords
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.memory_nodes import KEYS, run


def spec(url: str, *tables: str) -> ExportsSpec:
    return ExportsSpec(url=url, tables=tables)


def test_two_exports_share_no_folder_and_no_tables() -> None:
    async def started(backend: MemoryBackend) -> None:
        records = ExportRecords(MemoryStore(backend), KEYS)
        await records.start("a", spec("/served/a", "a/*"))
        for url in ("/served/a", "/served/a/", "file:///served/a"):
            with pytest.raises(ExportRefused, match=r"the export a goes to .*: choose another"):
                await records.start("b", spec(url, "b/*"))
        with pytest.raises(ExportRefused, match=r"a/\* is in the export a already"):
            await records.start("b", spec("/served/b", "b/*", "a/*"))
        await records.start("b", spec("s3://bucket/served", "b/*"))
        assert set(await records.all()) == {"a", "b"}

    run(started)
