"""``SettingsService``: the settings of the whole cluster."""

from __future__ import annotations

from typing import Any

from grpc import aio

from backstay._proto.v1 import settings_pb2, settings_pb2_grpc
from backstay.consensus.records import ClusterConfig
from backstay.consensus.records.settings import SettingsRecord
from backstay.pserver.requests.settings import SettingsKeeper

__all__ = ["SettingsService"]


class SettingsService(settings_pb2_grpc.SettingsServiceServicer):
    """Answers through a ``SettingsKeeper``."""

    def __init__(self, keeper: SettingsKeeper) -> None:
        """Prepare."""
        self._keeper = keeper

    async def GetSettings(  # noqa: N802 (the name is the service's)
        self,
        request: settings_pb2.GetSettingsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> settings_pb2.GetSettingsResponse:
        """Return all settings."""
        found, config = await self._keeper.read(), await self._keeper.fixed()
        return settings_pb2.GetSettingsResponse(
            revision=found.revision,
            settings=_messages(found.record),
            fixed=[] if config is None else _fixed(config, found.record),
        )

    async def SetSettings(  # noqa: N802
        self,
        request: settings_pb2.SetSettingsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> settings_pb2.SetSettingsResponse:
        """Change some settings, and return all."""
        found = await self._keeper.change(dict(request.values), request.expected_revision)
        return settings_pb2.SetSettingsResponse(
            revision=found.revision, settings=_messages(found.record)
        )


def _fixed(config: ClusterConfig, record: SettingsRecord) -> list[settings_pb2.Setting]:
    """Return what was fixed when the cluster was created."""
    return [
        settings_pb2.Setting(
            name=name,
            value=str(getattr(config, name)),
            is_number=name != "cluster",
            source=record.sources.get(name, "fixed"),
        )
        for name in ("cluster", "slot_count", "replicas", "initial_nodes")
    ]


def _messages(record: SettingsRecord) -> list[settings_pb2.Setting]:
    return [
        settings_pb2.Setting(
            name=one.name,
            value=one.value,
            default_value=one.default,
            allowed=one.allowed,
            help=one.help,
            is_number=one.is_number,
            source=record.source_of(one.name),
        )
        for one in record.settings.texts()
    ]
