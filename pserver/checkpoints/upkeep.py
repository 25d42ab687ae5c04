"""Which checkpoints of a folder may go, and which are removed because newer ones are there.

Synchronous, for threads; called by the node that holds the lock (``lock``).
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from backstay.checkpoint.catalogue import catalogue
from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.retention import surplus
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointRefused,
)

__all__ = ["newest_without", "thin_out"]

log = logging.getLogger(__name__)


def newest_without(storage: CheckpointStorage, checkpoint_id: str) -> Manifest | None:
    """Return the newest of the other checkpoints, if this one may be deleted.

    Raises:
        CheckpointNotFound: It is not there.
        CheckpointRefused: Others add to it.
    """
    entries = catalogue(storage)
    if checkpoint_id not in [*(one.id for one in entries), *storage.unfinished()]:
        raise CheckpointNotFound(f"{storage.url} has no checkpoint {checkpoint_id}")
    others = [one.manifest for one in entries if one.manifest and one.id != checkpoint_id]
    needs = [manifest.id for manifest in others if manifest.base == checkpoint_id]
    if needs:
        raise CheckpointRefused(
            f"checkpoint {checkpoint_id} is needed by {', '.join(needs)}: delete that first"
        )
    return others[-1] if others else None


def thin_out(
    storage: CheckpointStorage, keep_last: int, keep_every: int, *, in_use: Collection[str]
) -> None:
    """Remove what is not to be kept.

    What cannot be restored takes no other one's place, and goes with those of its age. What has
    no readable manifest stays, so that an operator sees it.
    """
    try:
        entries = catalogue(storage)
        readable = [one.manifest for one in entries if one.manifest]
        whole = [one.manifest for one in entries if one.manifest and not one.problem]
        needed = {one.id for one in whole}
        needed -= set(surplus(whole, keep_last, keep_every, in_use=in_use))
        for old in surplus(readable, keep_last, keep_every, in_use=in_use):
            if old in needed:
                continue
            storage.delete(old)
            log.info("checkpoint %s is removed: newer ones are there", old)
    except CheckpointError as error:
        log.warning("old checkpoints could not be removed: %s", error)
