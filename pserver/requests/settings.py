"""Reading and changing the cluster's settings: one record, changed by comparing its revision.

Nodes go by their mirror of the record; who changes it reads it from the store first, so that
nothing is overwritten that was not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from backstay.consensus.records import ClusterConfig
from backstay.consensus.records.keys import Keys
from backstay.consensus.records.settings import ClusterSettings, SettingsRecord
from backstay.consensus.store import CoordinationStore, Get, KeyValue, Put, Txn, mod_revision_is
from backstay.errors import ConfigError, SettingsChanged
from backstay.logs import fields

__all__ = ["SettingsAt", "SettingsKeeper"]

log = logging.getLogger(__name__)


class SettingsAt(NamedTuple):
    """The record of the settings, and its revision in the store; 0 if there is none."""

    record: SettingsRecord
    revision: int

    @property
    def settings(self) -> ClusterSettings:
        """The settings in force."""
        return self.record.settings


class SettingsKeeper:
    """Reads and changes the record."""

    def __init__(self, store: CoordinationStore, keys: Keys) -> None:
        """Prepare; nothing is read yet."""
        self._store = store
        self._key = keys.settings
        self._config_key = keys.config

    async def read(self) -> SettingsAt:
        """Return the settings as the store has them now.

        Raises:
            StoreError: The store does not answer.
            InvalidRequest: The record is of another version.
        """
        return _settings_at(await self._store.get(self._key))

    async def fixed(self) -> ClusterConfig | None:
        """Return what was fixed when the cluster was created.

        Raises:
            StoreError: The store does not answer.
            InvalidRequest: The record is of another version.
        """
        found = await self._store.get(self._config_key)
        return ClusterConfig.from_json(found.value) if found is not None else None

    async def change(self, texts: Mapping[str, str], expected_revision: int) -> SettingsAt:
        """Change some settings, all in one step.

        Args:
            texts: The new values by name.
            expected_revision: Of the record that the caller has seen.

        Raises:
            ConfigError: No name is given, or a name or a value is wrong.
            SettingsChanged: The record is another one by now.
            StoreError: The store does not answer.
        """
        if not texts:
            raise ConfigError("settings: none is given, there is nothing to change")
        before = await self.read()
        after = before.record.changed(texts)
        if before.revision != expected_revision:
            # Ours, if an answer got lost on the way and the call was repeated.
            if after == before.record:
                return before
            raise _changed_since(expected_revision, before)
        result = await self._store.transaction(
            Txn(
                (mod_revision_is(self._key, expected_revision),),
                (Put(self._key, after.to_json()),),
                (Get(self._key),),
            )
        )
        if not result.succeeded:
            present = _settings_at(result.results[0])
            if present.record == after:
                return present
            raise _changed_since(expected_revision, present)
        shown = ", ".join(f"{name}={value}" for name, value in sorted(texts.items()))
        log.info("settings of the cluster: %s", shown, extra=fields(version=result.revision))
        return SettingsAt(after, result.revision)


def _settings_at(item: KeyValue | None) -> SettingsAt:
    if item is None:
        return SettingsAt(SettingsRecord(ClusterSettings()), 0)
    return SettingsAt(SettingsRecord.from_json(item.value), item.mod_revision)


def _changed_since(expected: int, present: SettingsAt) -> SettingsChanged:
    return SettingsChanged(
        f"the settings were changed since revision {expected}, they are at {present.revision} now; "
        "look at them (`pserverctl config get`) and set yours again"
    )
