"""What checkpoints there are at one place, damaged ones included: for lists and decisions.

Imports the storage and ``backstay.errors``; reads manifests only.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import CheckpointDamaged, CheckpointNotFound

__all__ = ["Entry", "catalogue"]


@dataclass(frozen=True)
class Entry:
    """One checkpoint that has a manifest.

    Attributes:
        id: Its id.
        manifest: What its manifest says; None if that is damaged.
        problem: Why it cannot be restored, as far as manifests tell: its own is damaged, or one
            that it builds on is missing or damaged. Empty if nothing is known to be wrong;
            ``verification.verify`` looks at the parts too.
    """

    id: str
    manifest: Manifest | None
    problem: str = ""

    @property
    def rows(self) -> int:
        """Rows in its own parts, of all tables; 0 if its manifest is damaged."""
        return 0 if self.manifest is None else self.manifest.rows


def catalogue(storage: CheckpointStorage) -> list[Entry]:
    """Return all finished checkpoints, oldest first; each manifest is read once.

    Raises:
        CheckpointUnavailable: The storage cannot be read.
    """
    entries: dict[str, Entry] = {}
    for checkpoint_id in storage.ids():
        try:
            manifest = storage.read_manifest(checkpoint_id)
        except CheckpointDamaged as error:
            entries[checkpoint_id] = Entry(checkpoint_id, None, str(error))
        except CheckpointNotFound:
            continue  # deleted since the ids were read
        else:
            entries[checkpoint_id] = Entry(checkpoint_id, manifest, _of_base(manifest, entries))
    return list(entries.values())


def _of_base(manifest: Manifest, older: dict[str, Entry]) -> str:
    """Return what is wrong with what a checkpoint builds on; a base is older, so it is known."""
    if manifest.base is None:
        return ""
    base = older.get(manifest.base)
    if base is None:
        return f"it builds on {manifest.base}, which is missing"
    return f"it builds on {base.id}: {base.problem}" if base.problem else ""
