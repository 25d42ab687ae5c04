"""The decision: from the records of one revision to the routing table that should follow.

Everything is decided from what the records say now, never from how they came to be so, and one
decision after the other comes to rest: with unchanged members and reports, a bounded number of
decisions later there is nothing to change.
"""

from __future__ import annotations

from dataclasses import replace

from backstay.consensus.records import Event, RoutingTable
from backstay.errors import InvalidRequest
from backstay.pserver.controller.balance import (
    balance_masters,
    move_copies,
    relieve_leaving,
    relieve_stopping,
    share_masters_early,
)
from backstay.pserver.controller.failover import fail_over, note_members
from backstay.pserver.controller.first_routing import (
    FIRST_VERSION,
    first_routing,
    restored_routing,
)
from backstay.pserver.controller.health import health_of, health_without_routing
from backstay.pserver.controller.inputs import STEP_SIZES, ClusterRecords, Decision, StepSizes
from backstay.pserver.controller.plans import followed, progressed
from backstay.pserver.controller.repair import add_missing, drop_surplus
from backstay.pserver.controller.reports import follow_reports
from backstay.pserver.controller.restoring import (
    begin_restore,
    decide_losses,
    follow_loads,
    restore_after,
)
from backstay.pserver.controller.routing_builder import RoutingBuilder

__all__ = ["decide"]


def decide(records: ClusterRecords, sizes: StepSizes = STEP_SIZES) -> Decision:
    """Return what is to be written, given what is there.

    Args:
        records: The records, all of one revision.
        sizes: Of steps.

    Raises:
        InvalidRequest: The records are of two clusters, or no node is registered.
    """
    for name, member in records.members.items():
        if name != member.node_id:
            raise InvalidRequest(f"pservers/{name} is the record of {member.node_id!r}")
    if records.routing is None:
        return _begin(records)
    if records.routing.slot_count != records.config.slot_count:
        raise InvalidRequest(
            f"the routing table has {records.routing.slot_count} slots, the cluster "
            f"{records.config.slot_count}: the store holds records of two clusters"
        )
    return _continue(records, records.routing, sizes)


def _begin(records: ClusterRecords) -> Decision:
    config = records.config
    nodes = [
        replace(records.members[name].node(), status="unknown")
        for name in sorted(records.members)
        if records.members[name].status == "serving"
        and records.members[name].instance not in records.gone
    ]
    if len(nodes) < config.initial_nodes:
        return Decision(None, health_without_routing(records))
    routing = first_routing(nodes, config.slot_count, config.replicas)
    restore = records.restore
    if restore is not None and restore.state == "requested":
        routing = restored_routing(routing, restore)
        restore = replace(restore, state="loading", version=FIRST_VERSION)
    else:
        restore = None
    copies = len(routing.replicas_of_slot[0].holders)
    event = Event(
        routing_version=FIRST_VERSION,
        kind="created",
        node="",
        slot_count=config.slot_count,
        slots=(),
        reason=f"{config.slot_count} slots with {copies} of {config.replicas} copies on "
        f"{len(nodes)} nodes: the first nodes serve",
    )
    return Decision(routing, health_of(records, routing), (event,), restore=restore)


def _continue(records: ClusterRecords, before: RoutingTable, sizes: StepSizes) -> Decision:
    plan = followed(records)
    records, known = replace(records, plan=plan), records.plan
    builder = RoutingBuilder(records, before, sizes)
    note_members(builder)
    fail_over(builder, holds_rows=records.has_tables)
    restore = decide_losses(builder, records)
    begin_restore(builder, restore)
    follow_loads(builder, records)
    relies_on = follow_reports(builder, records)
    relieve_stopping(builder)
    drop_surplus(builder)
    short = add_missing(builder)
    # Evening out waits until every slot has its copies: it must not delay what is urgent.
    at_rest = False
    if not short and not builder.changed and _all_in_sync(builder):
        # Moves that begin before all nodes have come would be made again when they have.
        waits = plan is not None and plan.state == "waiting_for_nodes"
        if not waits:
            relieve_leaving(builder)
        if not builder.changed:
            moving = builder.copying.any() if waits else move_copies(builder)
            if not moving:
                balance_masters(builder)
                at_rest = not builder.changed
    if builder.copying.any():
        share_masters_early(builder)
    if plan is not None and plan.is_under_way:
        plan = progressed(plan, builder, at_rest=at_rest)
    news = None if plan == known else plan
    routing, events = builder.finish()
    restore = restore_after(builder, restore, before.version + 1)
    health = health_of(replace(records, restore=restore or records.restore), routing or before)
    if routing is None:
        return Decision(None, health, events, restore=restore, plan=news)
    given_up = tuple(sorted(builder.name(number) for number in builder.given_up))
    return Decision(routing, health, events, relies_on, given_up, restore, news)


def _all_in_sync(builder: RoutingBuilder) -> bool:
    """Whether each slot has a master, and only copies that move are catching up."""
    return all(
        held.master >= 0 and (not held.catching_up or len(held.in_sync) + 1 >= builder.wanted)
        for held in builder.held
    )
