"""What the controllers decided, read from the coordination store.

Reading only: the controller writes these records (``controller_host``).
"""

from __future__ import annotations

from backstay.consensus.keys import Keys
from backstay.consensus.records import Event
from backstay.consensus.store import CoordinationStore

__all__ = ["read_events"]


async def read_events(store: CoordinationStore, keys: Keys) -> list[Event]:
    """Return the events that are kept, oldest first.

    Raises:
        StoreUnavailable: The store does not answer.
        InvalidRequest: A record is of another version.
    """
    found = await store.range(keys.events)
    items = sorted(found.items, key=lambda item: item.key)
    return [Event.from_json(item.value) for item in items]
