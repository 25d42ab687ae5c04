"""Accepting that slots lost their content: checked here, written once, carried out elsewhere.

From then on it is the controller's: such slots begin anew, empty.
"""

from __future__ import annotations

import logging

from backstay.consensus import ClusterView
from backstay.consensus.records.checkpoints import LossAcceptance
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore, Put, Txn, mod_revision_is
from backstay.errors import ServerUnavailable, StoreUnavailable
from backstay.pserver.membership.departures import now_text

__all__ = ["accept_loss"]

log = logging.getLogger(__name__)


async def accept_loss(store: CoordinationStore, keys: Keys, view: ClusterView, version: int) -> int:
    """Accept what was lost up to a routing version, and return how many slots that is.

    Args:
        store: The coordination store.
        keys: Where the records are.
        view: The cluster as this node sees it.
        version: Of the routing table that the operator saw.

    Raises:
        ServerUnavailable: This node knows no routing, or the store does not answer; repeat the
            call.
    """
    routing = view.snapshot().routing
    if routing is None:
        raise ServerUnavailable("this node knows no routing yet; repeat the call")
    slots = sum(int(routing.epoch_of_slot[slot]) <= version for slot in routing.lost)
    if not slots:
        return 0
    try:
        found = await store.get(keys.loss)
        if found is not None and LossAcceptance.from_json(found.value).version >= version:
            return slots
        revision = found.mod_revision if found is not None else 0
        record = LossAcceptance(version, slots, now_text())
        result = await store.transaction(
            Txn((mod_revision_is(keys.loss, revision),), (Put(keys.loss, record.to_json()),))
        )
    except StoreUnavailable as error:
        raise ServerUnavailable(
            "no loss can be accepted while the coordination store does not answer; repeat the "
            f"call. {error}"
        ) from error
    if not result.succeeded:
        raise ServerUnavailable("another request came first; repeat the call")
    log.warning("the loss of %d slots is accepted: they begin anew, empty", slots)
    return slots
