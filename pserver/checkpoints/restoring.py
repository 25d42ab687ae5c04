"""Asking for a restore: which checkpoint, is it sound, and then one record for the controller."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from backstay import _native
from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.verification import verify
from backstay.config import ServerConfig
from backstay.consensus.records import TableRecord
from backstay.consensus.records.checkpoints import CheckpointRecord, RestorePlan
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import (
    Compare,
    CoordinationStore,
    Get,
    Put,
    Txn,
    absent,
    mod_revision_is,
)
from backstay.errors import CheckpointDamaged, CheckpointNotFound, CheckpointRefused
from backstay.pserver.snapshots.disk import in_disk_thread

__all__ = ["CheckpointChoice", "FirstRestore", "choose", "request_restore", "unused_restore"]

# Records of tables in one transaction.
TABLES_PER_WRITE = 50

log = logging.getLogger(__name__)


class CheckpointChoice(NamedTuple):
    """The checkpoint to restore.

    Attributes:
        manifest: Its manifest.
        passed_over: Why newer ones were passed over, a sentence for each.
    """

    manifest: Manifest
    passed_over: tuple[str, ...]


def choose(
    storage: CheckpointStorage,
    checkpoint_id: str,
    *,
    slot_count: int,
    fallback: bool,
    read_all: bool = True,
) -> CheckpointChoice:
    """Return the checkpoint that is wanted, after a look at it; call it in a thread.

    Args:
        storage: The folder.
        checkpoint_id: Its id; empty: the newest.
        slot_count: Of the cluster.
        fallback: If it is damaged, take the newest one before it that is not.
        read_all: Read every file of it, not just the manifests.

    Raises:
        CheckpointNotFound: There is none.
        CheckpointDamaged: It is damaged; the message names the file.
        CheckpointRefused: It is of another number of slots.
    """
    ids = storage.ids()
    if checkpoint_id and checkpoint_id not in ids:
        raise CheckpointNotFound(f"{storage.url} has no finished checkpoint {checkpoint_id}")
    candidates = ids[: ids.index(checkpoint_id) + 1] if checkpoint_id else ids
    if not candidates:
        raise CheckpointNotFound(f"{storage.url} has no finished checkpoint")
    passed_over: list[str] = []
    for candidate in reversed(candidates):
        try:
            manifest = _sound(storage, candidate, read_all=read_all)
        except CheckpointDamaged as error:
            if not fallback:
                raise
            log.warning("checkpoint %s is passed over: %s", candidate, error)
            passed_over.append(f"{candidate}: {error}")
            continue
        if manifest.slot_count != slot_count:
            raise CheckpointRefused(
                f"checkpoint {candidate} has {manifest.slot_count} slots, this cluster "
                f"{slot_count}: restore it into a cluster made with slot_count = "
                f"{manifest.slot_count}"
            )
        return CheckpointChoice(manifest, tuple(passed_over))
    raise CheckpointDamaged("no checkpoint is sound: " + "; ".join(passed_over))


async def request_restore(
    store: CoordinationStore,
    keys: Keys,
    chosen: CheckpointChoice,
    *,
    url: str,
    slots: Sequence[int],
    create_table: Callable[[str], Awaitable[object]],
    is_stuck: bool = False,
) -> RestorePlan:
    """Have the checkpoint's tables, and leave the rest to the controller.

    Args:
        store: The coordination store.
        keys: Where the records are.
        chosen: The checkpoint.
        url: Its folder.
        slots: Only these; none: all.
        create_table: Makes a table, by its description.
        is_stuck: Slots cannot be loaded from the checkpoint that is being restored: this one
            may take its place.

    Raises:
        TableConflict: The cluster has a table of the same name with other settings.
        CheckpointRefused: Another restore is under way.
        StoreUnavailable: The store does not answer.
    """
    plan = RestorePlan(url, chosen.manifest.id, tuple(sorted(set(slots))))
    found = await store.get(keys.restore)
    under_way = RestorePlan.from_json(found.value) if found is not None else None
    if under_way is not None and under_way.state != "done":
        if replace(under_way, state=plan.state, version=plan.version) == plan:
            return under_way
        if not is_stuck:
            raise CheckpointRefused(
                f"checkpoint {under_way.checkpoint} is being restored; wait until that is done"
            )
        log.warning("checkpoint %s cannot be loaded and is given up", under_way.checkpoint)
    for spec in chosen.manifest.tables:
        await create_table(spec.to_json())
    condition = absent(keys.restore)
    if found is not None:
        condition = mod_revision_is(keys.restore, found.mod_revision)
    puts = [Put(keys.restore, plan.to_json())]
    if not plan.slots:
        puts.append(_as_newest(keys, plan, chosen.manifest))
    result = await store.transaction(Txn((condition,), tuple(puts), (Get(keys.restore),)))
    if not result.succeeded:
        raise CheckpointRefused("another restore was begun at this moment; look at that one first")
    log.info("checkpoint %s is to be restored", plan.checkpoint)
    return plan


def unused_restore(wanted: str, plan: RestorePlan | None) -> str:
    """Return what to tell of the setting ``restore`` where a cluster exists already.

    Args:
        wanted: The setting.
        plan: What the cluster was restored from last.

    Returns:
        For people; empty if the checkpoint was used, or none is named.
    """
    if wanted in ("no", "latest") or (plan is not None and plan.checkpoint == wanted):
        return ""
    return (
        f"nothing is restored from {wanted}: `restore` is for a new cluster, and the store knows "
        f"this one; `pserverctl checkpoint restore {wanted}` restores it"
    )


class FirstRestore:
    """What a new cluster begins with: decided by the controller before the first routing table."""

    def __init__(self, config: ServerConfig, store: CoordinationStore, keys: Keys) -> None:
        """Prepare; nothing is read before ``request``."""
        self._config = config
        self._store = store
        self._keys = keys
        self.is_decided = config.restore_wanted == "no"

    async def request(self, condition: Compare) -> bool:
        """Write the tables and the plan, or find that there is nothing to begin with.

        Args:
            condition: Must hold: that this node is the controller.

        Returns:
            Whether there is something; the records tell what.

        Raises:
            CheckpointError: It cannot be restored; the message says why. Nothing is begun.
            StoreUnavailable: The store does not answer.
        """
        chosen = await in_disk_thread(self._choose)
        if chosen is None:
            log.warning(
                "there is no checkpoint at %s: beginning empty", self._config.checkpoint_url
            )
            self.is_decided = True
            return False
        manifest = chosen.manifest
        specs = [spec.to_json() for spec in manifest.tables]
        tables = [
            Put(
                self._keys.table(spec.name),
                TableRecord(text, _native.table_id(spec.name)).to_json(),
            )
            for spec, text in zip(manifest.tables, specs, strict=True)
        ]
        conditions = (condition, absent(self._keys.routing))
        for start in range(0, len(tables), TABLES_PER_WRITE):
            batch = tuple(tables[start : start + TABLES_PER_WRITE])
            await self._store.transaction(Txn(conditions, batch, ()))
        url = self._config.checkpoint_url or ""
        plan = RestorePlan(url, manifest.id)
        puts = (Put(self._keys.restore, plan.to_json()), _as_newest(self._keys, plan, manifest))
        result = await self._store.transaction(
            Txn((*conditions, absent(self._keys.restore)), puts, ())
        )
        if result.succeeded:
            self.is_decided = True
            log.info("the cluster begins with checkpoint %s", manifest.id)
        return True

    def _choose(self) -> CheckpointChoice | None:
        wanted = self._config.restore_wanted
        storage = CheckpointStorage(self._config.checkpoint_url or "")
        if wanted == "latest" and not storage.ids():
            return None
        return choose(
            storage,
            "" if wanted == "latest" else wanted,
            slot_count=self._config.slot_count,
            fallback=self._config.restore_fallback,
            # Nothing is lost yet, and who loads a file looks at its checksum: no need to read
            # everything twice.
            read_all=self._config.restore_fallback,
        )


def _as_newest(keys: Keys, plan: RestorePlan, manifest: Manifest) -> Put:
    """Return what lets slots that are lost later come from this one too.

    Not from one that was newest before: what all slots are restored from is what counts now.
    """
    record = CheckpointRecord(plan.url, plan.checkpoint, manifest.created)
    return Put(keys.checkpoint, record.to_json())


def _sound(storage: CheckpointStorage, checkpoint_id: str, *, read_all: bool) -> Manifest:
    """Return the manifest of a checkpoint whose files are all as they should be.

    Raises:
        CheckpointDamaged: One is not; the message names it.
    """
    manifest = storage.chain(checkpoint_id)[-1]
    if not read_all:
        return manifest
    found = verify(storage, checkpoint_id)
    if not found.ok:
        raise CheckpointDamaged("; ".join(found.complaints))
    return manifest
