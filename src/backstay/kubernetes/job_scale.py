"""Changes the numbers of a job's workers and servers by themselves, as ``scaling.decide`` says.

It puts together what the launcher, the workers and the servers tell, and carries decisions out.
It decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from backstay.job_engine.scaling import ScalingNotes, ScalingPolicy, Seen, decide
from backstay.kubernetes.server_scale import ServerScale, ServersSeen
from backstay.master.host import MasterHost
from backstay.master.job import Job
from backstay.schedule.rounds import RoundKind

__all__ = ["JobScale", "least_text", "seen_of", "waits_text"]


class JobScale:
    """Looks at one job, and changes its numbers; belongs to one event loop."""

    def __init__(
        self,
        host: MasterHost,
        policy: ScalingPolicy,
        servers: ServerScale | None,
        on_change: Callable[[str, str], object] = lambda _reason, _told: None,
    ) -> None:
        """Prepare.

        Args:
            host: Serves the job.
            policy: What the job file says.
            servers: Of the job's own; None: it has none.
            on_change: Told of each change, as a reason in one word and as a text.
        """
        self._host = host
        self._policy = policy
        self._servers = servers
        self._on_change = on_change
        self._notes = ScalingNotes()

    async def look(self) -> None:
        """Look once, and change what is to be changed.

        Raises:
            BackstayError: Servers or the API do not answer, or refuse a change.
        """
        servers = ServersSeen()
        if self._servers is not None:
            try:
                servers = await asyncio.to_thread(self._servers.look)
            except Exception:
                self._host.note_store_away_for_all(False)
                raise
        job = self._host.job
        if job is None or job.is_over:
            return
        if self._servers is not None:
            self._host.note_store_away_for_all(servers.are_all_away)
            job.note_trouble("servers", waits_text(servers, self._policy.servers_least))
        seen = seen_of(job, servers, time.monotonic_ns() // 1_000_000)
        job.note_trouble("workers", least_text(seen, self._policy.workers_least))
        self._notes, decision = decide(self._policy, self._notes, seen)
        if decision is None:
            return
        workers, lent = decision.workers, decision.lent
        if decision.servers != seen.servers and self._servers is not None:
            await asyncio.to_thread(self._servers.resize, decision.servers)
            # A user may have said another number of workers meanwhile.
            workers, lent = job.workers.desired, job.workers.lent
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        told = decision.told(seen)
        job.follow_scaling(workers, lent, f"{when}: {told}")
        self._on_change("RoleChanged" if decision.lent != seen.lent else "Scaled", told)


def seen_of(job: Job, servers: ServersSeen, now_ms: int) -> Seen:
    """Return what is seen of a job.

    Args:
        job: The job.
        servers: Its own servers.
        now_ms: The time.
    """
    running = set(job.reported.running)
    wanted = {one for one in running if job.workers.has_place(one)}
    waiting = wanted.intersection(job.reported.waiting)
    ttl_s, now_s = job.task_lease_ttl_ms / 1000, job.now()
    working = [one for one in job.known if one.id in wanted and now_s - one.heard_s < ttl_s]
    return Seen(
        now_ms=now_ms,
        workers=job.workers.desired,
        lent=job.workers.lent,
        placed=len(wanted - waiting),
        waiting=len(waiting),
        ending=len(running - wanted),
        working=len(working),
        examples_per_s=sum(one.examples_per_s for one in working),
        is_training=any(one.kind is RoundKind.TRAINING for one in job.schedule.open_rounds),
        servers=servers.wanted,
        serving=servers.serving,
        servers_waiting=servers.no_room,
        is_planning=servers.is_planning,
        memory_share=servers.memory_share,
        cpu_share=servers.cpu_share,
    )


def least_text(seen: Seen, least: int) -> str:
    """Return that fewer workers have room than a job is to keep, for people; empty: enough have it.

    The job goes on with those that there are.

    Args:
        seen: What is seen of it.
        least: How many it is to keep.
    """
    if not seen.waiting or seen.placed >= least:
        return ""
    return f"{seen.placed} of at least {least} workers have room"


def waits_text(servers: ServersSeen, least: int) -> str:
    """Return what a job's own servers lack, for people; empty: nothing.

    Args:
        servers: How they do.
        least: With how many the job begins.
    """
    counts = Counter(why for why in servers.waits.values() if why)
    waits = [
        f"{count} server{'s wait' if count > 1 else ' waits'} for {why}"
        for why, count in sorted(counts.items())
    ]
    # Before all that are needed have come, none serves.
    run = servers.serving + sum(not why for why in servers.waits.values())
    if run < least:
        waits.insert(0, f"{run} of at least {least} servers run")
    return "; ".join(waits)
