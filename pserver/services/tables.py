"""``TablesService``: creating, changing, listing and describing tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grpc import aio

from backstay._native import DataServer
from backstay._proto.v1 import tables_pb2, tables_pb2_grpc
from backstay.pserver.tables.creation import (
    Declarer,
    OtherSettings,
    TableCreation,
    settings_of,
)
from backstay.pserver.tables.registry import KnownTable, TableRegistry

__all__ = ["TablesService"]

_OTHER_SETTINGS: Mapping[int, OtherSettings] = {
    tables_pb2.OTHER_SETTINGS_REFUSE: "refuse",
    tables_pb2.OTHER_SETTINGS_UPDATE: "update",
    tables_pb2.OTHER_SETTINGS_KEEP: "keep",
}


class TablesService(tables_pb2_grpc.TablesServiceServicer):
    """Creates through ``TableCreation``; the rest it answers from what this node has."""

    def __init__(
        self,
        *,
        registry: TableRegistry,
        creation: TableCreation,
        data_server: DataServer,
    ) -> None:
        """Prepare."""
        self._registry = registry
        self._creation = creation
        self._data_server = data_server

    async def CreateTable(  # noqa: N802 (the name is the service's)
        self,
        request: tables_pb2.CreateTableRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> tables_pb2.CreateTableResponse:
        """Answer when every living node has the table."""
        declarer = Declarer(request.job, request.job_start) if request.job else None
        outcome = await self._creation.create(
            request.spec_json,
            other_settings=_OTHER_SETTINGS.get(request.other_settings, "refuse"),
            declarer=declarer,
        )
        return tables_pb2.CreateTableResponse(
            table=self._message(outcome.table), changed=outcome.changed, kept=outcome.kept
        )

    async def SetTable(  # noqa: N802
        self,
        request: tables_pb2.SetTableRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> tables_pb2.SetTableResponse:
        """Answer when every living node has the new settings."""
        settings = settings_of(request.settings_json)
        outcome = await self._creation.set(request.name, settings, dry_run=request.dry_run)
        return tables_pb2.SetTableResponse(
            table=self._message(outcome.table), changed=outcome.changed
        )

    async def ListTables(  # noqa: N802
        self,
        request: tables_pb2.ListTablesRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> tables_pb2.ListTablesResponse:
        """Return all tables, sorted by name."""
        return tables_pb2.ListTablesResponse(
            tables=[self._message(table) for table in self._registry]
        )

    async def GetTable(  # noqa: N802
        self,
        request: tables_pb2.GetTableRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> tables_pb2.GetTableResponse:
        """Return one table."""
        table = self._registry.get(request.name)
        return tables_pb2.GetTableResponse(table=self._message(table))

    def _message(self, table: KnownTable) -> tables_pb2.Table:
        rows, master_rows, size_bytes = self._data_server.table_usage(table.name)
        counters, counter_bytes, row_bytes = self._of_lifetime(table)
        stale_slots, staleness_sum = self._data_server.table_staleness(table.name)
        return tables_pb2.Table(
            name=table.name,
            id=table.id,
            spec_json=table.spec_json,
            rows=rows,
            master_rows=master_rows,
            bytes=size_bytes,
            revision=table.revision,
            counters=counters,
            counter_bytes=counter_bytes,
            row_bytes=row_bytes,
            stale_slots=stale_slots,
            staleness_sum=staleness_sum,
        )

    def _of_lifetime(self, table: KnownTable) -> tuple[int, int, int]:
        """Return counters of keys without a row on this node, their memory, and that of a row."""
        if "lifetime" not in json.loads(table.spec_json):
            return 0, 0, 0
        for told in json.loads(self._data_server.tables_json()):
            if told["id"] == table.id:
                return told["counters"], told["counter_bytes"], told["row_bytes"]
        return 0, 0, 0
