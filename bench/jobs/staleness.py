"""Test AUC and logloss when gradients are stale, and what compensation wins back.

A DeepFM on Frappe and on census income. All weights are on a pserver: rows and network have the
optimizer of ``--optimizer``. One process plays all workers by turns, so that one core suffices for
64: at its turn a worker pushes the gradients of its batch, pulls, and computes those of its next
one. So a push of one of n workers is n - 1 steps stale, always. The rules:

- ``sync``: the n workers' gradients are averaged, and pushed at once; no push is stale;
- ``async``: each push has the whole learning rate;
- the others: as ``async``, with that compensation of the tables (``revision``: Adagrad only).

Every rule has the learning rate that is best for one worker, as ``--rates`` has it.

Frappe is not ours to ship: ``--data`` names the folder of frappe_ctr.tsv.gz (see
examples/ctr/README.md). Without it census is measured alone. ``--out`` names a folder for the
table in Markdown, an SVG file for each data set and the runs; with ``--limit-minutes`` the program
begins no run that would end later, reports what is complete, and goes on when it is called again.

Usage: ``python -m bench.jobs.staleness --data FOLDER --out FOLDER [--workers 1 16] [--seeds 1]``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from backstay import tables
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec
from backstay.trainer import Client
from bench.experiments.plot import Line, svg
from bench.jobs.adam_steps import DIM, Ints, initial_rows
from bench.jobs.click_runs import BATCH, Gradients, Job, Model, add_arguments, jobs_of, megabytes
from bench.jobs.kept_runs import Case, Found, Runs, mean_of, measured, report

# What a rule sets as the tables' compensation.
COMPENSATIONS: dict[str, tables.Compensation] = {
    "sync": "ignore",
    "async": "ignore",
    "scale": "scale",
    "delay": tables.DelayCompensated(0.04),
    "delay_adaptive": tables.DelayCompensated(2.0, adaptive=True),
    "revision": tables.AdaptiveRevision(),
}
OPTIMIZERS = {"sgd": tables.SGD, "adagrad": tables.Adagrad}


@dataclass
class Worker:
    """What one worker has: a connection, and the gradients that it has not pushed yet."""

    client: Client
    held: Gradients | None = None


class Training:
    """One run of a job by a number of workers, on a cluster that others have used before."""

    def __init__(self, cluster: LocalCluster, job: Job, case: Case, optimizer: str) -> None:
        self._cluster = cluster
        self._job = job
        self._model = Model(job, case.seed)
        made, compensation = OPTIMIZERS[optimizer](job.rate), COMPENSATIONS[case.rule]
        initial, name = self._model.initial, "-".join(map(str, case))
        self._rows = TableSpec.sparse(
            f"{name}/rows", DIM, optimizer=made, compensation=compensation
        )
        self._network = TableSpec.dense(
            f"{name}/network", initial.shape, optimizer=made, compensation=compensation
        )
        with Client(cluster.endpoints) as client:
            rows = client.create_table(self._rows)
            client.assign(rows, np.arange(job.log.rows), initial_rows(job.log, case.seed))
            client.init_dense(client.create_table(self._network), initial)

    def _pull_and_compute(self, worker: Worker, places: Ints) -> None:
        """Leave a worker with the gradients of a batch."""
        keyed = self._model.keys(places)
        rows = worker.client.pull_async(self._rows.name, keyed[0])
        network = worker.client.pull_dense_async(self._network.name)
        worker.held = self._model.gradients(places, keyed, rows.result(), network.result())

    def _push(self, worker: Worker) -> None:
        """Push what a worker has, if it has something."""
        held, worker.held = worker.held, None
        if held is not None:
            rows = worker.client.push_async(self._rows.name, held.keys, held.rows)
            worker.client.push_dense(self._network.name, held.network)
            rows.result()

    def run(self, workers: int, size: int) -> None:
        """Train with workers by turns."""
        with ExitStack() as stack:
            playing = [
                Worker(stack.enter_context(Client(self._cluster.endpoints))) for _ in range(workers)
            ]
            for number, places in enumerate(self._model.batches(size)):
                worker = playing[number % workers]
                self._push(worker)
                self._pull_and_compute(worker, places)
            for worker in playing:
                self._push(worker)

    def judge(self) -> tuple[float, float]:
        """Return AUC and logloss on the test part."""
        with Client(self._cluster.endpoints) as client:
            rows = client.pull(self._rows.name, np.arange(self._job.log.rows))
            return self._model.judge(rows, client.pull_dense(self._network.name))


def measure(cluster: LocalCluster, job: Job, case: Case, optimizer: str) -> Found:
    """Do one run."""

    def run() -> tuple[float, float]:
        training = Training(cluster, job, case, optimizer)
        if case.rule == "sync":
            training.run(1, BATCH * case.number)
        else:
            training.run(case.number, BATCH)
        return training.judge()

    return measured(run, lambda: megabytes(cluster))


def cases_of(jobs: list[Job], arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield all runs: the whole table with one seed comes before the next seed."""
    for seed in range(arguments.seeds):
        for job in jobs:
            for workers in arguments.workers:
                # With one worker all rules are the same.
                rules = arguments.rules if workers > 1 else ["async"]
                yield from (Case(job.name, rule, workers, seed) for rule in rules)


def won_back(runs: Runs, job: str, rule: str, workers: int) -> float | None:
    """Return the share of async's loss of AUC against one worker that a rule wins back."""
    all_seeds = [runs.seeds(job, "async", 1), runs.seeds(job, "async", workers)]
    all_seeds.append(runs.seeds(job, rule, workers))
    common = set.intersection(*map(set, all_seeds))
    if not common:
        return None
    alone, plain, other = (
        float(np.mean([seeds[seed].auc for seed in sorted(common)])) for seeds in all_seeds
    )
    return (other - plain) / (alone - plain) if plain < alone else None


def table_of(runs: Runs, cases: list[Case], optimizer: str) -> tuple[list[str], dict[str, float]]:
    """Return the table, row by row, and its figures by name."""
    lines = [
        f"All tables have {optimizer}; means over the seeds.",
        "",
        "| data | workers | rule | seeds | AUC | over seeds | logloss | of async's loss won back "
        "| MB | s a run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    figures: dict[str, float] = {}
    for job, rule, workers in dict.fromkeys(case[:3] for case in cases):
        seeds, count = runs.seeds(job, rule, workers), runs.count(job, rule, workers)
        if not seeds:
            if count:
                lines.append(f"| {job} | {workers} | {rule} | {count} | | | | | | |")
            continue
        mean, deviation = mean_of(seeds.values()), np.std([one.auc for one in seeds.values()])
        back = won_back(runs, job, rule, workers) if rule not in ("async", "sync") else None
        shown = "" if back is None else f"{back:.0%}"
        lines.append(
            f"| {job} | {workers} | {rule} | {count} | {mean.auc:.4f} | ±{deviation:.4f} "
            f"| {mean.logloss:.4f} | {shown} | {mean.megabytes:.0f} | {mean.seconds:.1f} |"
        )
        name = f"{job}_{rule}_{workers}"
        figures |= {f"{name}_auc": mean.auc, f"{name}_logloss": mean.logloss}
        if back is not None:
            figures[f"{name}_won_back"] = back
    return lines, figures


def plot(runs: Runs, job: str, rules: list[str], workers: list[int]) -> str:
    """Return the AUC of each rule over the workers, as powers of two."""
    lines = []
    for rule in rules:
        points = runs.points(job, rule, workers, of_one="async")
        if points:
            lines.append(Line(rule, points, dashed=rule == "sync"))
    return svg(f"{job}: test AUC", "workers, log2", "AUC", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_arguments(parser, rates=(0.05, 0.05), passes=(5, 2))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--rules", nargs="+", choices=COMPENSATIONS, default=list(COMPENSATIONS))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    arguments = parser.parse_args()
    if arguments.optimizer != "adagrad":
        arguments.rules = [rule for rule in arguments.rules if rule != "revision"]
    jobs = jobs_of(arguments)
    by_name = {job.name: job for job in jobs}
    cases = list(cases_of(jobs, arguments))
    runs = Runs(arguments, [arguments.optimizer])
    with LocalCluster(servers=1) as cluster:
        runs.do(cases, lambda case: measure(cluster, by_name[case.job], case, arguments.optimizer))
    lines, figures = table_of(runs, cases, arguments.optimizer)
    drawn = [job for job in by_name if runs.has(job)]
    plots = {job: plot(runs, job, arguments.rules, arguments.workers) for job in drawn}
    report(arguments.out, "staleness", lines, plots, figures)


if __name__ == "__main__":
    main()
