"""How many workers and servers a job is to have, and why.

``decide`` takes what is seen now and what it noted before, and returns at most one change with its
reason. Its rules, in their order: a worker gives its room to a server that finds none and comes
back later; workers follow ``autoscale.workers``; servers follow ``autoscale.servers``.
Time is an argument. Imports ``backstay.job_spec``; does no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from backstay.job_spec import AutoscaleSpec, ServerCounts, WorkersSpec

__all__ = ["Decision", "ScalingNotes", "ScalingPolicy", "Seen", "decide"]

# Kubernetes needs this long to place new Pods, or to say that it cannot.
PLACEMENT_MS = 5_000
# A server that is not placed so long after the last worker left waits for something else.
IN_VAIN_MS = 120_000
# The number of workers is tried again if the examples/s change by this share.
DRIFT = 0.25


@dataclass(frozen=True)
class ScalingPolicy:
    """What a job file says of its numbers.

    Attributes:
        workers: Rule for the workers: ``fixed``, ``fill`` or ``throughput``.
        servers: Rule for the servers: ``fixed`` or ``load``.
        gain: throughput: the share of a worker's examples/s that one more must bring.
        load_low, load_high: load: the shares of memory and CPU between which nothing changes.
        cool_down_ms: How long a state must last before it changes a number.
        workers_least, workers_most: Bounds of the workers.
        servers_least, servers_most: Bounds of the servers.
    """

    workers: str = "fixed"
    servers: str = "fixed"
    gain: float = 0.5
    load_low: float = 0.4
    load_high: float = 0.8
    cool_down_ms: int = 60_000
    workers_least: int = 1
    workers_most: int = 1
    servers_least: int = 1
    servers_most: int = 1

    @classmethod
    def of(
        cls, autoscale: AutoscaleSpec | None, workers: WorkersSpec, servers: ServerCounts
    ) -> ScalingPolicy:
        """Return what a job file says; without ``autoscale`` both numbers are fixed."""
        rules = autoscale if autoscale is not None else AutoscaleSpec()
        return cls(
            workers=rules.workers,
            servers=rules.servers,
            gain=rules.gain,
            load_low=rules.load_low,
            load_high=rules.load_high,
            cool_down_ms=round(rules.cool_down_s * 1000),
            workers_least=workers.min,
            workers_most=workers.max,
            servers_least=servers.least,
            servers_most=servers.most,
        )


@dataclass(frozen=True)
class Seen:
    """What is seen of a job at one moment.

    Attributes:
        now_ms: The time, from any beginning.
        workers: How many are wanted.
        lent: How many more were wanted, before servers got their room.
        placed: Wanted workers that have a place on a machine.
        waiting: Wanted workers for which there is no room.
        ending: Workers that were told to end and have not yet.
        working: Workers that answer.
        examples_per_s: Of all of them.
        is_training: Whether training tasks are under way; else the rate says nothing.
        servers: How many servers of its own are wanted; 0: it has none.
        serving: How many of them serve.
        servers_waiting: How many of them find no room.
        is_planning: Whether the servers carry out a plan.
        memory_share: Share of the servers' memory for rows that the rows take; None: not known.
        cpu_share: Share of the servers' CPU that they use; None: not known.
    """

    now_ms: int
    workers: int
    lent: int = 0
    placed: int = 0
    waiting: int = 0
    ending: int = 0
    working: int = 0
    examples_per_s: float = 0.0
    is_training: bool = False
    servers: int = 0
    serving: int = 0
    servers_waiting: int = 0
    is_planning: bool = False
    memory_share: float | None = None
    cpu_share: float | None = None


class Decision(NamedTuple):
    """What a job is to have from now on.

    Attributes:
        workers: Number of workers.
        lent: How many more it has when its servers need their room no more.
        servers: Number of servers.
        reason: Why, for people.
    """

    workers: int
    lent: int
    servers: int
    reason: str

    def told(self, seen: Seen) -> str:
        """Return what changes and why, for people."""
        counts = (
            ("workers", self.workers, seen.workers),
            ("servers", self.servers, seen.servers),
        )
        changes = [f"{now} {what} wanted, {was} before" for what, now, was in counts if now != was]
        return f"{'; '.join(changes) or 'nothing changes'}: {self.reason}"


class Rate(NamedTuple):
    """What so many workers train together."""

    workers: int
    examples_per_s: float


@dataclass(frozen=True)
class ScalingNotes:
    """What ``decide`` remembers from one look to the next; begin with ``ScalingNotes()``.

    Attributes:
        no_room_ms: Since when servers find no room; None: all do.
        room_ms: Since when all find it, after workers gave theirs; None: not so.
        lent_ms: When a worker gave its room last.
        is_in_vain: Whether that did not help the servers that wait.
        grown_ms: When the number of workers was last changed by a rule; None: never.
        step: fill: by how many workers to grow next.
        crowded_ms: Since when more than one worker waits for room; None: at most one does.
        measured_ms: throughput: since when this number of workers is measured; None: it is not.
        best_rate: The highest rate since then.
        before: The rate before one more worker was tried; None: none was.
        rate_at_limit: The rate at which one more worker brought too little; None: not known.
        load: Which way the servers' load points: 1 up, -1 down, 0 neither.
        load_ms: Since when.
    """

    no_room_ms: int | None = None
    room_ms: int | None = None
    lent_ms: int = 0
    is_in_vain: bool = False
    grown_ms: int | None = None
    step: int = 1
    crowded_ms: int | None = None
    measured_ms: int | None = None
    best_rate: float = 0.0
    before: Rate | None = None
    rate_at_limit: Rate | None = None
    load: int = 0
    load_ms: int = 0


_Outcome = tuple[ScalingNotes, Decision | None]


def decide(policy: ScalingPolicy, notes: ScalingNotes, seen: Seen) -> _Outcome:
    """Return what to remember, and what to change now; None: nothing."""
    notes, change = _change_roles(policy, notes, seen)
    if change is not None:
        # Another number of workers is measured anew.
        return replace(notes, measured_ms=None, before=None, crowded_ms=None), change
    if seen.lent or (notes.no_room_ms is not None and not notes.is_in_vain):
        # Other workers would take the room that the servers need.
        return replace(notes, measured_ms=None, crowded_ms=None), None
    notes, change = _scale_workers(policy, notes, seen)
    if change is not None:
        return notes, change
    return _scale_servers(policy, notes, seen)


# A worker's room for a server.


def _change_roles(policy: ScalingPolicy, notes: ScalingNotes, seen: Seen) -> _Outcome:
    if not seen.servers_waiting:
        notes = replace(notes, no_room_ms=None, is_in_vain=False)
        if not seen.lent:
            return replace(notes, room_ms=None), None
        since_ms = seen.now_ms if notes.room_ms is None else notes.room_ms
        notes = replace(notes, room_ms=since_ms)
        if seen.now_ms - since_ms < PLACEMENT_MS:
            return notes, None
        return replace(notes, room_ms=None), _take_back(policy, seen, "all servers have room again")
    since_ms = seen.now_ms if notes.no_room_ms is None else notes.no_room_ms
    notes = replace(notes, no_room_ms=since_ms, room_ms=None)
    changed_ms = max(since_ms, notes.lent_ms)
    if notes.is_in_vain or seen.ending or seen.now_ms - changed_ms < PLACEMENT_MS:
        return notes, None
    if not (seen.placed or seen.waiting):
        # No worker has a Pod, or the launcher has not told of them yet.
        return notes, None
    # A worker that waits would take the room, so it goes as well.
    wanted = max(1, policy.workers_least, seen.placed - 1)
    if wanted < seen.workers:
        lent = seen.lent + seen.workers - wanted
        reason = f"{_servers(seen.servers_waiting)} no room: a worker gives up its room"
        notes = replace(notes, lent_ms=seen.now_ms)
        return notes, Decision(wanted, lent, seen.servers, reason)
    if seen.now_ms - changed_ms < IN_VAIN_MS:
        return notes, None
    notes = replace(notes, is_in_vain=True)
    if not seen.lent:
        return notes, None
    why = f"{_servers(seen.servers_waiting)} no room without these workers either"
    return notes, _take_back(policy, seen, why)


def _take_back(policy: ScalingPolicy, seen: Seen, why: str) -> Decision:
    # The job file may have changed since.
    wanted = max(seen.workers, min(policy.workers_most, seen.workers + seen.lent))
    back = f"{_workers(seen.lent)} back" if seen.lent > 1 else "the worker comes back"
    return Decision(wanted, 0, seen.servers, f"{why}: {back}")


# Workers.


def _scale_workers(policy: ScalingPolicy, notes: ScalingNotes, seen: Seen) -> _Outcome:
    if policy.workers == "fixed":
        return notes, None
    notes, change = _give_back_waiting(policy, notes, seen)
    if change is not None:
        return notes, change
    if seen.waiting or seen.ending or seen.placed < seen.workers:
        # One that waits stays: it is placed as soon as there is room.
        return replace(notes, step=1, measured_ms=None), None
    if policy.workers == "fill":
        return _fill(policy, notes, seen)
    return _follow_throughput(policy, notes, seen)


def _give_back_waiting(policy: ScalingPolicy, notes: ScalingNotes, seen: Seen) -> _Outcome:
    """Want no more than one worker without room, if that lasts."""
    wanted = max(policy.workers_least, seen.placed + 1)
    if seen.waiting <= 1 or wanted >= seen.workers:
        return replace(notes, crowded_ms=None), None
    since_ms = seen.now_ms if notes.crowded_ms is None else notes.crowded_ms
    notes = replace(notes, crowded_ms=since_ms)
    if seen.now_ms - since_ms < policy.cool_down_ms:
        return notes, None
    notes = replace(notes, crowded_ms=None, grown_ms=seen.now_ms, step=1)
    reason = f"{seen.waiting} workers find no room: one of them goes on waiting"
    return notes, _workers_change(seen, wanted, reason)


def _fill(policy: ScalingPolicy, notes: ScalingNotes, seen: Seen) -> _Outcome:
    """Want more workers while each finds room; twice as many more each time."""
    if seen.workers >= policy.workers_most:
        return notes, None
    if notes.grown_ms is not None and seen.now_ms - notes.grown_ms < PLACEMENT_MS:
        return notes, None
    wanted = min(policy.workers_most, seen.workers + notes.step)
    notes = replace(notes, grown_ms=seen.now_ms, step=2 * notes.step)
    reason = f"every worker has room: {wanted - seen.workers} more may have it, too"
    return notes, _workers_change(seen, wanted, reason)


def _follow_throughput(policy: ScalingPolicy, notes: ScalingNotes, seen: Seen) -> _Outcome:
    """Try one more worker; keep it if it brings enough."""
    if not seen.is_training or seen.working < seen.workers or not seen.workers:
        return replace(notes, measured_ms=None), None
    if notes.measured_ms is None:
        return replace(notes, measured_ms=seen.now_ms, best_rate=seen.examples_per_s), None
    # The best and not the last: a pause for a checkpoint says nothing of the workers.
    notes = replace(notes, best_rate=max(notes.best_rate, seen.examples_per_s))
    if seen.now_ms - (notes.measured_ms or 0) < policy.cool_down_ms or notes.best_rate <= 0:
        return notes, None
    now, before = Rate(seen.workers, notes.best_rate), notes.before
    notes = replace(notes, measured_ms=None, before=None)
    if before is not None and before.workers < now.workers:
        brought = _gain(before, now)
        said = f"the last worker brought {brought:.0%} of what one brings on average"
        if brought < policy.gain:
            notes = replace(notes, rate_at_limit=before, grown_ms=seen.now_ms)
            reason = f"{said}, less than {policy.gain:.0%}"
            return notes, _workers_change(seen, max(before.workers, policy.workers_least), reason)
        reason = f"{said}: one more is tried"
    elif notes.rate_at_limit is not None and _is_alike(notes.rate_at_limit, now):
        return notes, None
    else:
        reason = f"{now.examples_per_s:,.0f} examples/s: one more worker is tried"
    if now.workers >= policy.workers_most:
        return replace(notes, rate_at_limit=now), None
    notes = replace(notes, before=now, rate_at_limit=None, grown_ms=seen.now_ms)
    return notes, _workers_change(seen, now.workers + 1, reason)


def _gain(before: Rate, now: Rate) -> float:
    """Return what each further worker brought, as a share of what one brought before."""
    each = before.examples_per_s / before.workers
    return (now.examples_per_s - before.examples_per_s) / (now.workers - before.workers) / each


def _is_alike(known: Rate, now: Rate) -> bool:
    changed = abs(now.examples_per_s - known.examples_per_s)
    return known.workers == now.workers and changed <= DRIFT * known.examples_per_s


def _workers_change(seen: Seen, wanted: int, reason: str) -> Decision | None:
    if wanted == seen.workers:
        return None
    return Decision(wanted, seen.lent, seen.servers, reason)


# Servers.


def _scale_servers(policy: ScalingPolicy, notes: ScalingNotes, seen: Seen) -> _Outcome:
    at_rest = seen.serving == seen.servers and not (seen.is_planning or seen.servers_waiting)
    shares = [one for one in (seen.memory_share, seen.cpu_share) if one is not None]
    if policy.servers == "fixed" or not seen.servers or not at_rest or not shares:
        return replace(notes, load=0), None
    worst = max(shares)
    wanted = _servers_for(policy, seen.servers, worst)
    load = (wanted > seen.servers) - (wanted < seen.servers)
    if load != notes.load:
        notes = replace(notes, load=load, load_ms=seen.now_ms)
    if not load or seen.now_ms - notes.load_ms < policy.cool_down_ms:
        return notes, None
    what = "the rows take" if worst == seen.memory_share else "the servers use"
    of = "their memory" if worst == seen.memory_share else "their CPU"
    bound = f"more than {policy.load_high:.0%}"
    if load < 0:
        bound = f"with {wanted} servers still less than {policy.load_low:.0%}"
    reason = f"{what} {worst:.0%} of {of}, {bound}"
    return replace(notes, load=0), Decision(seen.workers, seen.lent, wanted, reason)


def _servers_for(policy: ScalingPolicy, servers: int, share: float) -> int:
    """Return how many servers a load asks for.

    A load that is too low for so many is still low for one fewer, so the answer to it never calls
    for that one again.
    """
    if share > policy.load_high:
        # At most twice as many at once.
        asked = min(2 * servers, math.ceil(servers * share / policy.load_high))
        return max(servers, min(asked, policy.servers_most))
    may_shrink = servers > max(1, policy.servers_least)
    if may_shrink and share * servers / (servers - 1) < policy.load_low:
        return servers - 1
    return servers


def _servers(count: int) -> str:
    return f"{count} server{'s find' if count > 1 else ' finds'}"


def _workers(count: int) -> str:
    return f"{count} worker{'s come' if count > 1 else ' comes'}"
