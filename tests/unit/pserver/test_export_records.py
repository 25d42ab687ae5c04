"""Which exports may be started beside those that go on, against the store in memory."""

from __future__ import annotations

import pytest

from backstay.errors import ExportRefused
from backstay.pserver.exports.records import ExportRecords
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.memory_nodes import KEYS, run


def test_two_exports_share_no_folder_and_no_tables() -> None:
    async def started(backend: MemoryBackend) -> None:
        records = ExportRecords(MemoryStore(backend), KEYS)
        await records.start("a", "/served/a", every_s=1.0, tables=("a/*",))
        for url in ("/served/a", "/served/a/", "file:///served/a"):
            with pytest.raises(ExportRefused, match=r"the export a goes to .*: choose another"):
                await records.start("b", url, every_s=1.0, tables=("b/*",))
        with pytest.raises(ExportRefused, match=r"a/\* is in the export a already"):
            await records.start("b", "/served/b", every_s=1.0, tables=("b/*", "a/*"))
        await records.start("b", "s3://bucket/served", every_s=1.0, tables=("b/*",))
        assert set(await records.all()) == {"a", "b"}

    run(started)
