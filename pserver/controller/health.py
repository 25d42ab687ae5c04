"""How the cluster does, in one word and with every reason."""

from __future__ import annotations

import numpy as np

from backstay.consensus.records import ClusterHealthRecord, RoutingTable
from backstay.consensus.records.checkpoints import RestorePlan, loss_in_words
from backstay.listing import listed
from backstay.pserver.controller.inputs import ClusterRecords
from backstay.pserver.controller.routing_builder import counted

__all__ = ["health_of", "health_without_routing"]


def health_without_routing(records: ClusterRecords) -> ClusterHealthRecord:
    """Return the health of a cluster whose nodes have not all come yet."""
    nodes = tuple(sorted(records.members))
    serving = [name for name in nodes if records.members[name].status == "serving"]
    wanted = records.config.initial_nodes
    return ClusterHealthRecord(
        "UNKNOWN",
        f"waits for its first nodes: {len(serving)} of {wanted} serve "
        f"({listed(serving) or 'none'})",
        nodes,
    )


def health_of(records: ClusterRecords, routing: RoutingTable) -> ClusterHealthRecord:
    """Return the health of a cluster with this routing."""
    members = records.members
    nodes = tuple(sorted(members))
    wanted = routing.replicas
    reasons = []
    outcast = [
        name
        for name in nodes
        if members[name].instance in routing.gone or members[name].instance in records.gone
    ]
    if outcast:
        reasons.append(
            f"{listed(outcast)}: taken for dead and no longer part of the cluster; start it again"
        )
    serving = [n for n in nodes if members[n].status == "serving" and n not in outcast]
    if records.plan is not None:
        # They are to hold nothing.
        plan = records.plan
        serving = [n for n in serving if not plan.lets_go(n, members[n].instance)]
    if len(serving) < wanted:
        reasons.append(f"{counted(len(serving), 'node')} for {wanted} copies: start more nodes")
    copies = np.array([len(held.in_sync) + 1 if held.master >= 0 else 0 for held in routing.sets])
    copies_of_slot = copies[routing.set_of_slot]
    lost = np.zeros(routing.slot_count, dtype=np.bool_)
    lost[list(routing.lost)] = True
    if routing.lost:
        reasons.append(loss_in_words(len(routing.lost)))
    orphans = int(np.count_nonzero((copies_of_slot == 0) & ~lost))
    if orphans:
        reasons.append(f"{counted(orphans, 'slot')} without a master: {_awaited(routing)}")
    short = int(np.count_nonzero((copies_of_slot > 0) & (copies_of_slot < wanted)))
    if short:
        reasons.append(f"{counted(short, 'slot')} with fewer than {wanted} copies in sync")
    restoring = routing.restoring
    if restoring.slots:
        trouble = sorted({report.load_trouble for report in records.reports.values()} - {""})
        reasons.append(
            f"{counted(len(restoring.slots), 'slot')} to be loaded from checkpoint "
            f"{restoring.checkpoint}{_why_restored(records.restore)}"
            + (f": {'; '.join(trouble)}" if trouble else "")
        )
    epochs = routing.epoch_of_slot
    anew = (epochs > 1) & ((epochs == routing.version) | (copies_of_slot < wanted))
    if records.restore is not None:
        # Those were not lost, but given up for a checkpoint.
        anew &= epochs != (records.restore.version or routing.version)
    anew_count = int(np.count_nonzero(anew & ~lost))
    if anew_count:
        reasons.append(
            f"{counted(anew_count, 'slot')} lost all copies and began anew "
            f"(generation {routing.generation})"
        )
    return ClusterHealthRecord("UNHEALTHY" if reasons else "OK", "; ".join(reasons), nodes)


def _why_restored(plan: RestorePlan | None) -> str:
    if plan is None or not plan.lost or plan.state == "done":
        return ""
    return f" of {plan.created}, because {counted(plan.lost, 'slot')} lost all copies"


def _awaited(routing: RoutingTable) -> str:
    names = sorted(
        {
            routing.nodes[number].node_id
            for held in routing.sets
            if held.master < 0
            for number in held.in_sync
        }
    )
    return f"waits for {listed(names)}" if names else "no node serves"
