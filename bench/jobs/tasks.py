"""The job master's ledger under a million tasks and ten thousand workers.

The job is simulated: time is a number, workers take about ``--task-s`` for a task and renew their
leases every quarter of two seconds, one in a hundred is four times slower, and one task in a
thousand ends with its worker's death. Only the ledger's own time is counted: giving out, taking
back, renewing, and what the journal is told (not written); in processor time, so that other
programs do not count. ``busy`` is that time over the simulated time: how much of one core the
ledger would take in such a job.

``simulate`` takes anything with the ledger's calls, so that it can be pointed at a service.

Usage: ``python -m bench.jobs.tasks [--tasks N] [--workers N]``.
"""

from __future__ import annotations

import argparse
import heapq
import random
import resource
import time
import zlib

from backstay.job_engine.ledger import TaskLedger
from backstay.job_engine.values import Grant, LeasedTask, LedgerLimits
from backstay.schedule.rounds import RoundId, RoundKind
from bench.jobs.local import print_result

LEASE_TTL_S = 2.0
# How long the journal collects changes for one transaction.
JOURNAL_S = 0.01
BATCHES = 16


class Stopwatch:
    """Processor seconds and calls by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def add(self, name: str, begun: float, calls: int = 1) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - begun
        self.calls[name] = self.calls.get(name, 0) + calls


class Simulation:
    """Workers of a job, by their names, and what they are doing."""

    def __init__(self, master: TaskLedger, workers: int, task_s: float) -> None:
        self.master = master
        self.task_s = task_s
        self.watch = Stopwatch()
        self.draw = random.Random(7)
        self.doing: dict[str, Grant] = {}
        self.done = 0
        self.deaths = 0
        self.speculative = 0
        # (when, worker, attempt): the end of what it does, or, with attempt 0, that it asks.
        self.events: list[tuple[float, str, int]] = [(0.0, f"w-{n}", 0) for n in range(workers)]
        self.next_name = workers

    def step(self, now_s: float, worker: str, attempt: int) -> None:
        """Let a worker finish what it does, or die of it, and take the next task."""
        grant = self.doing.pop(worker, None)
        if attempt and grant is not None:
            if self.draw.random() < 0.001:
                self.deaths += 1
                begun = time.thread_time()
                self.master.drop_worker(worker)
                self.watch.add("drop", begun)
                worker, self.next_name = f"w-{self.next_name}", self.next_name + 1
            else:
                begun = time.thread_time()
                first = self.master.complete(worker, grant.task, grant.attempt, now_s, BATCHES)
                self.watch.add("complete", begun)
                if first:
                    self.done += 1
                    begun = time.thread_time()
                    self.master.closed([grant.task])
                    self.watch.add("close", begun)
        begun = time.thread_time()
        grant = self.master.assign(worker, now_s)
        self.watch.add("assign", begun)
        if grant is None:
            heapq.heappush(self.events, (now_s + 0.5, worker, 0))
            return
        self.speculative += grant.speculative
        self.doing[worker] = grant
        slow = 4.0 if zlib.crc32(worker.encode()) % 100 == 0 else 1.0
        took_s = self.task_s * slow * self.draw.uniform(0.5, 1.5)
        heapq.heappush(self.events, (now_s + took_s, worker, grant.attempt))

    def renew(self, now_s: float) -> None:
        """Let every worker renew its lease and report a batch."""
        reports = [
            (worker, [LeasedTask(grant.task, grant.attempt, 1)])
            for worker, grant in self.doing.items()
        ]
        begun = time.thread_time()
        revoked = [worker for worker, leased in reports if self.master.renew(worker, leased, now_s)]
        self.watch.add("renew", begun, len(reports))
        for worker in revoked:  # another worker was faster: it asks at once
            del self.doing[worker]
            heapq.heappush(self.events, (now_s, worker, 0))

    def upkeep(self, now_s: float) -> None:
        begun = time.thread_time()
        self.master.expire(now_s)
        changed = self.master.take_changed()
        # The values that the journal makes of it.
        for number in changed.chunks:
            self.master.done.chunk(number)
        for worker in changed.workers:
            self.master.record_of(worker)
        self.watch.add("journal", begun)


def simulate(master: TaskLedger, tasks: int, workers: int, task_s: float) -> dict[str, float]:
    """Run a round to its end and return the figures."""
    run = Simulation(master, workers, task_s)
    next_renewal_s = next_upkeep_s = now_s = 0.0
    while run.done < tasks:
        now_s, worker, attempt = heapq.heappop(run.events)
        while next_renewal_s <= now_s:
            run.renew(next_renewal_s)
            next_renewal_s += LEASE_TTL_S / 4
        if next_upkeep_s <= now_s:
            run.upkeep(now_s)
            next_upkeep_s = now_s + JOURNAL_S
        leased = run.doing.get(worker)
        if attempt and (leased is None or leased.attempt != attempt):
            continue  # revoked meanwhile; it has another event
        run.step(now_s, worker, attempt)
    seconds, calls = run.watch.seconds, run.watch.calls
    total_s = sum(seconds.values())
    return {
        "tasks": tasks,
        "workers": workers,
        "simulated_s": round(now_s, 1),
        "busy": total_s / now_s,
        # The steps of a task: completed, closed, the next one given, the journal written.
        "tasks_per_s": round(tasks / (total_s - seconds["renew"])),
        "renewals_per_s": round(calls["renew"] / seconds["renew"]),
        "assign_us": round(seconds["assign"] / calls["assign"] * 1e6, 2),
        "complete_us": round(seconds["complete"] / calls["complete"] * 1e6, 2),
        "renew_us": round(seconds["renew"] / calls["renew"] * 1e6, 2),
        "deaths": run.deaths,
        "speculative": run.speculative,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--task-s", type=float, default=10.0)
    given = parser.parse_args()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    ledger = TaskLedger(
        RoundId(RoundKind.TRAINING, 1),
        given.tasks,
        7,
        LedgerLimits(lease_ttl_s=LEASE_TTL_S),
        keeps_streams=True,
    )
    made_s = time.perf_counter() - begun
    figures = simulate(ledger, given.tasks, given.workers, given.task_s)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The simulated workers are in it as well.
    print_result({**figures, "made_s": made_s, "peak_mb": round((peak_kb - before_kb) / 1024, 1)})


if __name__ == "__main__":
    main()
