"""Starts and ends exports: their records in the coordination store, changed by revision."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from backstay.consensus.records.exports import ExportRecord
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore, Delete, Put, Txn, absent, mod_revision_is
from backstay.errors import ExportRefused, ServerUnavailable
from backstay.job_spec import ExportsSpec
from backstay.pserver.membership.departures import now_text

__all__ = ["ExportRecords"]

# Records that others change at the same moment are read again so often.
TRIES = 5

log = logging.getLogger(__name__)


class ExportRecords:
    """The records of exports, as requests and the controller change them."""

    def __init__(self, store: CoordinationStore, keys: Keys) -> None:
        """Prepare; nothing is read yet."""
        self._store = store
        self._keys = keys

    async def all(self) -> dict[str, ExportRecord]:
        """Return the exports by name, as the store has them now.

        Raises:
            StoreError: The store does not answer.
        """
        found = await self._store.range(self._keys.exports)
        records = (ExportRecord.from_json(one.value) for one in found.items)
        return {record.name: record for record in records}

    async def start(
        self,
        name: str,
        spec: ExportsSpec,
        *,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> ExportRecord:
        """Start an export; the same again changes nothing.

        Args:
            name: Its name.
            spec: What is exported, where and when.
            check: Is called before an export is started that is not there yet, to refuse it.

        Raises:
            InvalidRequest: A setting is wrong.
            ExportRefused: There is one of that name or folder with other settings, or one that is
                ending.
            StoreError: The store does not answer.
        """
        wanted = ExportRecord(name=name, run=secrets.token_hex(8), spec=spec, started=now_text())
        present = await self.all()
        if (known := present.get(name)) is not None:
            same = replace(wanted, run=known.run, started=known.started, trouble=known.trouble)
            if same == known:
                return known
            what = f"goes to {known.spec.url} with other settings: stop it first"
            if known.stopping:
                what = "writes its last increment: wait for it, or end it at once"
            now = " --now" if known.stopping else ""
            raise ExportRefused(
                f"there is an export {name}, which {what} (pserverctl export stop {name}{now}), or "
                "choose another name"
            )
        _refuse_shared(wanted, present.values())
        if check is not None:
            await check()
        key = self._keys.export(name)
        result = await self._store.transaction(Txn((absent(key),), (Put(key, wanted.to_json()),)))
        if not result.succeeded:
            raise ServerUnavailable("another request came first; repeat the call")
        log.info("export %s to %s is started", name, spec.url)
        return wanted

    async def stop(self, name: str, *, now: bool) -> None:
        """Let an export end after one more increment, or at once.

        Raises:
            ExportRefused: There is none of that name.
            StoreError: The store does not answer.
        """
        changed = await self._change(
            name, lambda known: None if now else replace(known, stopping=True)
        )
        if not changed:
            raise ExportRefused(f"there is no export {name}; pserverctl export status lists them")
        log.info("export %s %s", name, "is stopped" if now else "ends with its next increment")

    async def end(self, record: ExportRecord) -> None:
        """Remove the record of an export that has written its last increment."""
        await self._change(record.name, lambda known: None if known.run == record.run else known)

    async def tell(self, record: ExportRecord, trouble: str) -> None:
        """Note why the last increment of an export could not be written, or that it was."""
        await self._change(
            record.name,
            lambda known: replace(known, trouble=trouble) if known.run == record.run else known,
        )

    async def _change(
        self, name: str, change: Callable[[ExportRecord], ExportRecord | None]
    ) -> bool:
        """Change a record, or remove it; whether there is one."""
        key = self._keys.export(name)
        for _ in range(TRIES):
            found = await self._store.get(key)
            if found is None:
                return False
            known = ExportRecord.from_json(found.value)
            wanted = change(known)
            if wanted == known:
                return True
            operation = Delete(key) if wanted is None else Put(key, wanted.to_json())
            condition = mod_revision_is(key, found.mod_revision)
            if (await self._store.transaction(Txn((condition,), (operation,)))).succeeded:
                return True
        raise ServerUnavailable(f"others change the export {name} all the time; repeat the call")


def _place(url: str) -> str:
    """Return what two ways to write the same folder have in common."""
    return url.removeprefix("file://").rstrip("/")


def _refuse_shared(wanted: ExportRecord, others: Iterable[ExportRecord]) -> None:
    """Refuse an export to where another one goes, or of the same tables.

    Raises:
        ExportRefused: The two would share a folder, a table or a topic.
    """
    spec = wanted.spec
    for other in others:
        if _place(other.spec.url) == _place(spec.url):
            raise ExportRefused(
                f"the export {other.name} goes to {spec.url}: choose another folder"
            )
        if shared := sorted(set(other.spec.tables) & set(spec.tables)):
            raise ExportRefused(f"{shared[0]} is in the export {other.name} already")
        if spec.topic is not None and spec.topic.is_same(other.spec.topic):
            raise ExportRefused(
                f"the export {other.name} goes to the topic {spec.topic.name}: choose another one"
            )
