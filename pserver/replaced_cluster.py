"""Removes what an earlier cluster has left in an etcd, once the last of its nodes has gone.

Each run of a job with servers of its own on Kubernetes is a cluster of its own. Without this the
records of all of them would stay. Imports the stores; never touches the records of this cluster.
"""

from __future__ import annotations

import asyncio
import logging

from backstay.config import ServerConfig
from backstay.consensus.records.keys import Keys
from backstay.consensus.store.opening import open_etcd
from backstay.errors import StoreError

__all__ = ["remove_replaced"]

LOOK_PAUSE_S = 2.0
# Nodes that end take less; one that still serves is to keep its records.
LIMIT_S = 600.0

log = logging.getLogger(__name__)


async def remove_replaced(config: ServerConfig) -> None:
    """Remove the records of the cluster that this one replaces, if it replaces one.

    It waits for nodes that end, and leaves a cluster alone whose nodes do not. A failure is told
    in the log and harms nobody.
    """
    earlier = config.replaces_cluster
    if earlier is None:
        return
    store = open_etcd(config, earlier)
    loop, why = asyncio.get_running_loop(), ""
    ends_s = loop.time() + LIMIT_S
    try:
        while loop.time() < ends_s:
            try:
                registered = (await store.range(Keys(earlier).members)).items
                if not registered:
                    removed = await store.clear()
                    log.info("%d records of cluster %r are removed", removed, earlier)
                    return
                why = f"{len(registered)} of its nodes are registered"
            except StoreError as error:
                why = str(error)
            await asyncio.sleep(LOOK_PAUSE_S)
    finally:
        await store.close()
    log.warning("the records of cluster %r stay: %s", earlier, why)
