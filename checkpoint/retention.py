"""Which snapshots are old enough to go: a decision from manifests, or ids, alone. Pure.

Imports ``backstay.checkpoint.manifest`` and ``backstay.errors``; deletes nothing itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from backstay.checkpoint.manifest import Manifest, kind_of, number_of
from backstay.errors import InvalidRequest

__all__ = ["surplus", "surplus_of_export"]

FULL_KEPT = 2


def surplus(
    manifests: Iterable[Manifest],
    keep_last: int,
    keep_every: int = 0,
    *,
    in_use: Collection[str] = (),
) -> list[str]:
    """Return the ids of the checkpoints that need not be kept.

    Kept are the newest ``keep_last``, every ``keep_every``-th by number, and all that these
    build on. The newest is always kept.

    Args:
        manifests: Of all finished checkpoints of one root, in any order.
        keep_last: At least 1.
        keep_every: Keep those whose number is a multiple of it; 0: none for that reason.
        in_use: Ids to keep in any case, with all that these build on.

    Returns:
        In the order in which to delete them, newest first: one that was interrupted then leaves
        no checkpoint without its base.

    Raises:
        InvalidRequest: A number is out of range.
    """
    if keep_last < 1 or keep_every < 0:
        raise InvalidRequest(
            f"keep_last is {keep_last}, keep_every {keep_every}; at least 1 and 0 are allowed"
        )
    newest_first = sorted(manifests, key=lambda each: (each.number, each.id), reverse=True)
    by_id = {manifest.id: manifest for manifest in newest_first}
    kept: set[str] = set()
    for index, manifest in enumerate(newest_first):
        if (
            index < keep_last
            or (keep_every and manifest.number % keep_every == 0)
            or manifest.id in in_use
        ):
            kept.add(manifest.id)
        # A base is older than what builds on it, so its turn comes later in this loop.
        if manifest.id in kept and manifest.base in by_id:
            kept.add(manifest.base)
    return [manifest.id for manifest in newest_first if manifest.id not in kept]


def surplus_of_export(finished: Iterable[str], keep: int = FULL_KEPT) -> list[str]:
    """Return the snapshots of an export that need not be kept, in the order in which to delete.

    Kept are the newest ``keep`` full ones, and the deltas that come after the oldest of these.

    Args:
        finished: Ids of the snapshots that have a manifest.
        keep: How many full ones; at least 1.
    """
    in_order = sorted(finished, key=number_of)
    full = [each for each in in_order if kind_of(each) == "full"]
    if len(full) <= keep:
        return []
    oldest = number_of(full[-keep])
    return [each for each in in_order if number_of(each) < oldest]
