"""Asking for a resize, a drain or a rebalance: checked here, written once, carried out elsewhere.

The node that is asked refuses what cannot be done and writes the plan in a transaction, so that
of two requests at once one is refused. From then on the plan is the controller's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from backstay.consensus import ClusterSnapshot, ClusterView
from backstay.consensus.records import MemberRecord, RoutingTable
from backstay.consensus.records.keys import Keys
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.consensus.records.repairs import RepairRecord
from backstay.consensus.store import CoordinationStore, Put, Txn, mod_revision_is
from backstay.errors import BackstayError, ResizeRefused, ServerUnavailable, StoreUnavailable
from backstay.pserver.controller import leaving_of, living
from backstay.pserver.membership.departures import now_text
from backstay.pserver.peers import PeerCalls

__all__ = ["PlanRequests"]

# Each comparison that is lost is another writer's success; so many in a row are given up.
ATTEMPTS_MAX = 5
WAIT_S = 600

log = logging.getLogger(__name__)


class PlanRequests:
    """One node's part in plans, as the node that was asked."""

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        view: ClusterView,
        calls: PeerCalls,
        *,
        numbered: bool = False,
    ) -> None:
        """Prepare.

        Args:
            store: The coordination store.
            keys: Where the records are.
            view: Who is in the cluster.
            calls: Asks the other nodes.
            numbered: Whether nodes leave by their numbers, and something else ends them.
        """
        self._store = store
        self._keys = keys
        self._view = view
        self._calls = calls
        self._numbered = numbered

    async def current(self) -> ResizePlan | None:
        """Return the plan that was asked for last.

        Raises:
            ServerUnavailable: The store does not answer.
        """
        return (await self._read())[0]

    def repairs(self) -> list[RepairRecord]:
        """Return the newest repairs as this node sees them, oldest first."""
        found = self._view.snapshot().repairs
        return [found[name] for name in sorted(found)]

    async def resize(self, nodes: int, *, stop: bool, pause: bool, wait_s: int = 0) -> ResizePlan:
        """Have the rows on so many nodes, and return the plan for it.

        Raises:
            ResizeRefused: It cannot be done; the message says why.
            ServerUnavailable: The store does not answer; repeat the call.
        """
        snapshot, routing = self._known()
        _check_count(nodes, snapshot, routing)
        wanted = ResizePlan(
            secrets.token_hex(8),
            "resize",
            nodes,
            # A process that ended by itself would be started again.
            stop=stop and not self._numbered,
            pause=pause,
            wait_s=wait_s or WAIT_S,
            state="waiting_for_nodes",
            numbered=self._numbered,
        )
        serving = _serving(snapshot)
        leaving = leaving_of(wanted, serving, routing)
        if len(serving) - len(leaving) > nodes:
            raise ResizeRefused(
                f"a resize to {nodes} is refused: of {len(serving)} nodes only {len(leaving)} may "
                "leave, because the others keep the cluster's store; resize to "
                f"{len(serving) - len(leaving)} or more"
            )
        await self._check_memory(serving, leaving, f"a resize to {nodes}")
        return await self._write(wanted)

    async def drain(self, node_id: str, *, stop: bool, pause: bool) -> ResizePlan:
        """Have a node hold nothing, and return the plan for it. Raises as ``resize``."""
        snapshot, routing = self._known()
        serving = _serving(snapshot)
        what = f"a drain of {node_id}"
        member = serving.get(node_id)
        if member is None:
            raise ResizeRefused(
                f"{what} is refused: no node of that name serves; these do: "
                f"{', '.join(sorted(serving))}"
            )
        if stop and member.keeps_store:
            raise ResizeRefused(
                f"{what} with its end is refused: it keeps the cluster's store; drain it without, "
                "and it holds no rows but goes on"
            )
        before = (await self._read())[0]
        drained = _drained(before, serving) - {node_id}
        if stop and drained:
            raise ResizeRefused(
                f"{what} with its end is refused: {', '.join(sorted(drained))}, drained before, "
                "would end, too; drain it without, and stop it when it holds nothing"
            )
        stays = serving.keys() - drained - {node_id}
        if len(stays) < routing.replicas:
            raise ResizeRefused(
                f"{what} is refused: {len(stays)} nodes would stay, and the cluster keeps "
                f"{routing.replicas} copies of each slot, each on a node of its own; add a node "
                "first"
            )
        await self._check_memory(serving, [*drained, node_id], what)
        leaving = tuple(LeavingNode(name, 0) for name in sorted({*drained, node_id}))
        return await self._write(
            ResizePlan(secrets.token_hex(8), "drain", len(stays), leaving, stop=stop, pause=pause)
        )

    async def rebalance(self, *, pause: bool) -> ResizePlan:
        """Spread everything over all nodes, and return the plan for it. Raises as ``resize``."""
        snapshot, _ = self._known()
        return await self._write(
            ResizePlan(secrets.token_hex(8), "rebalance", len(_serving(snapshot)), pause=pause)
        )

    async def cancel(self, plan_id: str) -> ResizePlan:
        """End the plan that is under way.

        Args:
            plan_id: Only if it is this one; empty: whichever it is.

        Raises:
            ResizeRefused: It is not under way.
            ServerUnavailable: The store does not answer; repeat the call.
        """
        for _ in range(ATTEMPTS_MAX):
            plan, revision = await self._read()
            if plan is None or plan_id not in ("", plan.plan_id):
                raise ResizeRefused(f"there is no plan {plan_id or 'to cancel'}")
            if plan.state == "cancelled":
                return plan
            if not plan.is_under_way:
                raise ResizeRefused(f"the {plan.kind} is {plan.state} already: {plan.reason}")
            reason = f"cancelled with {plan.moves_left} of {plan.moves_total} copies still to move"
            ended = replace(plan, state="cancelled", reason=reason, leaving=())
            if await self._put(ended, revision):
                log.info("the %s is cancelled", plan.kind)
                return ended
        raise ServerUnavailable("the plan changes all the time; repeat the call")

    def _known(self) -> tuple[ClusterSnapshot, RoutingTable]:
        snapshot = self._view.snapshot()
        if snapshot.routing is None:
            raise ServerUnavailable(f"there is no routing yet: {snapshot.health.reason}")
        return snapshot, snapshot.routing

    async def _write(self, wanted: ResizePlan) -> ResizePlan:
        """Write a plan unless another one is under way; return it, or the equal one under way."""
        wanted = replace(wanted, started=now_text())
        for _ in range(ATTEMPTS_MAX):
            there, revision = await self._read()
            if there is not None and there.is_under_way:
                if _is_same(there, wanted):
                    return there
                raise ResizeRefused(
                    f"a {there.kind} is under way ({there.reason or there.state}); wait for its "
                    "end, or cancel it: pserverctl plan --cancel"
                )
            if await self._put(wanted, revision):
                log.info("a %s to %d nodes was asked for", wanted.kind, wanted.nodes)
                return wanted
        raise ServerUnavailable("another request came first; repeat the call")

    async def _read(self) -> tuple[ResizePlan | None, int]:
        try:
            found = await self._store.get(self._keys.plan)
        except StoreUnavailable as error:
            raise _no_store(error) from error
        if found is None:
            return None, 0
        return ResizePlan.from_json(found.value), found.mod_revision

    async def _put(self, plan: ResizePlan, revision: int) -> bool:
        key = self._keys.plan
        try:
            result = await self._store.transaction(
                Txn((mod_revision_is(key, revision),), (Put(key, plan.to_json()),))
            )
        except StoreUnavailable as error:
            raise _no_store(error) from error
        return result.succeeded

    async def _check_memory(
        self, serving: Mapping[str, MemberRecord], leaving: Collection[str], what: str
    ) -> None:
        """Refuse if the rows do not fit into the memory of the remaining nodes.

        A node that does not answer counts as one without rows and without a limit.
        """
        if not leaving:
            return
        names = sorted(serving)
        memory = await asyncio.gather(*(self._memory(serving[name]) for name in names))
        rows = sum(row_bytes for row_bytes, _ in memory)
        rooms = [room for name, (_, room) in zip(names, memory, strict=True) if name not in leaving]
        room = sum(one for one in rooms if one is not None)
        if None not in rooms and rows > room:
            raise ResizeRefused(
                f"{what} is refused: all copies together are {rows:,} bytes, and the "
                f"{len(rooms)} nodes that would stay have room for {room:,} (memory_limit_bytes "
                "less what their processes take); raise their limits, or keep more nodes"
            )

    async def _memory(self, member: MemberRecord) -> tuple[int, int | None]:
        """Return the bytes of a node's rows, and for how many it has room (None: no limit)."""
        try:
            answer = await self._calls.node_stats(member.control_address)
        except BackstayError as error:
            log.warning("%s does not say how much memory it has: %s", member.node_id, error)
            return 0, None
        limit = int(json.loads(answer.control_plane_json).get("memory_limit_bytes", 0))
        stats = json.loads(answer.data_plane_json)
        process = int(stats["memory"]["process"])
        return int(stats["row_bytes"]), max(limit - process, 0) if limit else None


def _no_store(error: StoreUnavailable) -> ServerUnavailable:
    return ServerUnavailable(
        f"nothing can be planned while the coordination store does not answer; repeat the call. "
        f"{error}"
    )


def _serving(snapshot: ClusterSnapshot) -> dict[str, MemberRecord]:
    alive = living(snapshot.members, frozenset(snapshot.deaths))
    return {name: one for name, one in alive.items() if one.status == "serving"}


def _drained(plan: ResizePlan | None, serving: Iterable[str]) -> set[str]:
    """Return which nodes a drain that is done keeps empty."""
    if plan is None or plan.state != "done" or plan.stop:
        return set()
    return {one.node_id for one in plan.leaving} & set(serving)


def _is_same(there: ResizePlan, wanted: ResizePlan) -> bool:
    if (there.kind, there.stop, there.pause) != (wanted.kind, wanted.stop, wanted.pause):
        return False
    if wanted.kind == "drain":
        return {one.node_id for one in wanted.leaving} <= {one.node_id for one in there.leaving}
    return wanted.kind == "rebalance" or there.nodes == wanted.nodes


def _check_count(nodes: int, snapshot: ClusterSnapshot, routing: RoutingTable) -> None:
    what = f"a resize to {nodes} is refused"
    if nodes < routing.replicas or nodes < 1:
        raise ResizeRefused(
            f"{what}: the cluster keeps {routing.replicas} copies of each slot, each on a node of "
            f"its own; resize to {routing.replicas} or more"
        )
    if nodes > routing.slot_count:
        raise ResizeRefused(
            f"{what}: the cluster has {routing.slot_count} slots, and each node needs one; resize "
            f"to {routing.slot_count} or fewer"
        )
    keepers = sorted(name for name, one in snapshot.members.items() if one.keeps_store)
    if nodes < len(keepers):
        raise ResizeRefused(
            f"{what}: {', '.join(keepers)} keep the cluster's store and cannot leave; resize to "
            f"{len(keepers)} or more"
        )
