"""Test AUC of DeepFM on Frappe: 1, 4, a changing number of workers, a pserver killed.

Each is one ``backstay train`` of examples/ctr/frappe.yaml against three pservers with two copies of
each slot on this machine. The data is not ours to ship: BACKSTAY_FRAPPE_DIR names its folder.

Usage: ``BACKSTAY_FRAPPE_DIR=... python -m bench.jobs.convergence``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from backstay.pserver.local_cluster import LocalCluster
from bench.jobs.local import print_result
from examples.common.job_run import JobRun

JOB = Path(__file__).resolve().parents[2] / "examples" / "ctr" / "frappe.yaml"
LOOK_SECONDS = 0.5
# Something happens at these parts of the training.
FIRST, SECOND = 0.3, 0.6

Event = Callable[[LocalCluster, JobRun], None]


def scale_to(workers: int) -> Event:
    """Return what has a job go on with so many workers."""
    return lambda _, job: job.scale(workers)


def kill_server(cluster: LocalCluster, _: JobRun) -> None:
    """Kill a pserver for good measure, and start an empty one in its place."""
    cluster.kill(1)
    cluster.restart(1)


CASES: dict[str, tuple[int, dict[float, Event]]] = {
    "1 worker": (1, {}),
    "4 workers": (4, {}),
    "1, 4, then 2 workers": (1, {FIRST: scale_to(4), SECOND: scale_to(2)}),
    "2 workers, a pserver killed": (2, {FIRST: kill_server}),
}


def part_of(job: JobRun) -> float:
    """Return how much of the training is done."""
    status = job.status
    if not status.passes or not status.records_total or status.kind != 1:
        return 0.0
    return (status.round - 1 + status.records_done / status.records_total) / status.passes


def run(workers: int, events: dict[float, Event], seed: int) -> dict[str, float]:
    """Train once; return the metrics of the last pass."""
    due = sorted(events.items())
    with TemporaryDirectory() as folder:
        arguments = ["train", str(JOB), "--workers", str(workers), "--set", f"seed={seed}"]
        arguments += ["--set", "checkpoint=none"]
        with (
            LocalCluster(3, settings={"replicas": 2}) as cluster,
            JobRun(cluster.endpoints, "frappe", arguments, Path(folder)) as job,
        ):
            while not job.is_over:
                job.look()
                if due and part_of(job) >= due[0][0]:
                    due.pop(0)[1](cluster, job)
                time.sleep(LOOK_SECONDS)
            assert not due, "the job ended before everything had happened"
            metrics: dict[str, float] = job.result()["evaluations"][-1]["metrics"]
            return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    aucs = {}
    for name, (workers, events) in CASES.items():
        aucs[name] = run(workers, events, seed)["auc"]
        print(f"| {name} | {aucs[name]:.4f} |", flush=True)
    print_result({"auc": aucs, "spread": max(aucs.values()) - min(aucs.values())})


if __name__ == "__main__":
    main()
