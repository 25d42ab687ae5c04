"""Creating a table on every node of a fixed cluster.

The first node of the list serialises creation: it checks the table, takes it in itself, then
has every other node take it in, and says yes when all have. Other nodes pass the call on to it.
Every step can be repeated, so a creation cut short by a node that is down is completed by the
same call later, or by that node itself, which asks its peers for their tables when it starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from backstay.errors import BackstayError, DeadlineExceeded, NotMaster, ServerUnavailable
from backstay.pserver.peers import PeerLink
from backstay.pserver.table_registry import KnownTable

__all__ = ["TableCreation"]

log = logging.getLogger(__name__)


class TableCreation:
    """One node's part in creating tables."""

    def __init__(
        self,
        *,
        others: Sequence[PeerLink],
        first: PeerLink | None,
        apply_here: Callable[[str], KnownTable],
        missing: Callable[[], str],
    ) -> None:
        """Prepare.

        Args:
            others: All other nodes.
            first: The first node of the list; None if this node is the first.
            apply_here: Checks a description and takes the table in on this node.
            missing: Says which nodes were never met; empty if all were.
        """
        self._others = others
        self._first = first
        self._apply_here = apply_here
        self._missing = missing
        self._one_at_a_time = asyncio.Lock()

    async def create(self, spec_json: str, *, forwarded: bool) -> str:
        """Have the table on every node and return its canonical description.

        Raises:
            TableConflict: The name is taken with other settings.
            ServerUnavailable: A node is down; some may have the table. Repeat the call.
            NotMaster: Another node takes this one for the first in the list.
        """
        if self._first is not None:
            if forwarded:
                raise NotMaster(
                    "this node is not the first in its list of peers; "
                    "the nodes were started with different lists"
                )
            return await self._pass_on(self._first, spec_json)
        async with self._one_at_a_time:
            # Whoever was never met may know tables that this node, just started, does not.
            missing = self._missing()
            if missing:
                raise ServerUnavailable(
                    f"no table can be created before all nodes are met: {missing}"
                )
            table = self._apply_here(spec_json)
            await self._apply_elsewhere(table)
            return table.spec_json

    async def _pass_on(self, first: PeerLink, spec_json: str) -> str:
        try:
            return (await first.create_table(spec_json)).spec_json
        except (ServerUnavailable, DeadlineExceeded) as error:
            raise ServerUnavailable(
                f"passed on to the first node, {_named_failure(first, error)}"
            ) from error

    async def _apply_elsewhere(self, table: KnownTable) -> None:
        outcomes = await asyncio.gather(
            *(link.apply_table(table.spec_json) for link in self._others), return_exceptions=True
        )
        silent = []
        for link, outcome in zip(self._others, outcomes, strict=True):
            if outcome is None:
                continue
            if not isinstance(outcome, BackstayError) or not outcome.retry_safe:
                raise outcome
            silent.append(_named_failure(link, outcome))
        if silent:
            raise ServerUnavailable(
                f"table {table.name!r} is not on every node yet; repeat the call. "
                + "; ".join(silent)
            )
        log.info("table %r is on all nodes", table.name)


def _named_failure(link: PeerLink, error: BackstayError) -> str:
    """Return which node it was, where, and what it said, with the address once."""
    address = link.peer.control_address
    return f"{link.peer.node_id} at {address}: {str(error).removeprefix(address + ': ')}"
