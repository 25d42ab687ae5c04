"""What is saved by pulling the model each n steps only, and what that costs in AUC.

A DeepFM on Frappe and on census income, with plain SGD, by workers that one process plays by turns
(see ``bench.jobs.staleness``). A worker steps on copies of its own between two pulls. The rules:

- ``pulls``: each step is pushed, and the model is pulled each n steps (``get_model_steps`` of
  ElasticDL);
- ``geo``: each n steps the sum of their gradients is pushed, and the model is pulled (mode ``geo``
  with ``local_steps: n``).

With n = 1 both are mode ``async``. It prints for each n the bytes between clients and servers, by
what factor these are fewer, and the test AUC. ``--data``, ``--out`` and ``--limit-minutes`` as
there.

Usage: ``python -m bench.jobs.model_steps --data FOLDER --out FOLDER [--steps 1 4] [--seeds 1]``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, TableSpec
from backstay.trainer import Client
from backstay.trainer.modes.geo import GeoClient
from bench.experiments.plot import Line, svg
from bench.jobs.adam_steps import DIM, initial_rows
from bench.jobs.click_runs import BATCH, Job, Model, add_arguments, jobs_of, megabytes
from bench.jobs.kept_runs import Case, Found, Runs, mean_of, measured, report

RULES = ("pulls", "geo")


class PullingSeldom(GeoClient):
    """Steps on copies, and pushes each step; an exchange only forgets the copies."""

    def push_async(self, *batch: Any, **more: Any) -> Any:
        """Step on the copies, and push the same."""
        table, keys, gradients = batch
        keys = self.prepared(keys)
        super().push_async(table, keys, gradients, **more)
        return self.behind.push_async(table, keys.batch, gradients, **more)

    def push_dense_async(self, *gradient: Any, **more: Any) -> Any:
        """Step on the copy, and push the same."""
        super().push_dense_async(*gradient, **more)
        return self.behind.push_dense_async(*gradient, **more)

    def exchange(self) -> None:
        """Have the next pulls bring fresh rows and tensors."""
        self.forget()


CLIENTS: dict[str, type[GeoClient]] = {"pulls": PullingSeldom, "geo": GeoClient}


def measure(cluster: LocalCluster, job: Job, case: Case, workers: int) -> Found:
    """Do one run; the case's number is n."""
    return measured(lambda: train(cluster, job, case, workers), lambda: megabytes(cluster))


def train(cluster: LocalCluster, job: Job, case: Case, workers: int) -> tuple[float, float]:
    """Train; return AUC and logloss on the test part."""
    model, name = Model(job, case.seed), "-".join(map(str, case))
    initial = model.initial
    rows = TableSpec.sparse(f"{name}/rows", DIM, optimizer=SGD(job.rate))
    network = TableSpec.dense(f"{name}/network", initial.shape, optimizer=SGD(job.rate))
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(cluster.endpoints)) for _ in range(workers)]
        clients[0].create_table(rows)
        clients[0].assign(rows.name, np.arange(job.log.rows), initial_rows(job.log, case.seed))
        clients[0].create_table(network)
        clients[0].init_dense(network.name, initial)
        playing = [CLIENTS[case.rule](client) for client in clients]
        for number, places in enumerate(model.batches(BATCH)):
            worker, client = playing[number % workers], clients[number % workers]
            keyed = model.keys(places)
            pulled = worker.pull(rows.name, keyed[0]), worker.pull_dense(network.name)
            gradients = model.gradients(places, keyed, *pulled)
            worker.push(rows.name, gradients.keys, gradients.rows)
            worker.push_dense(network.name, gradients.network)
            if (number // workers + 1) % case.number == 0:
                worker.exchange()
            client.flush()
        for worker in playing:
            worker.exchange()
            worker.flush()
        whole = clients[0].pull(rows.name, np.arange(job.log.rows))
        return model.judge(whole, clients[0].pull_dense(network.name))


def cases_of(jobs: list[Job], arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield all runs: the whole table with one seed comes before the next seed."""
    for seed in range(arguments.seeds):
        for job in jobs:
            for rule in RULES:
                # With each step both are the same.
                steps = [n for n in arguments.steps if n > 1 or rule == RULES[0]]
                yield from (Case(job.name, rule, n, seed) for n in steps)


def table_of(runs: Runs, cases: list[Case]) -> tuple[list[str], dict[str, float]]:
    """Return the table, row by row, and its figures by name."""
    lines = [
        "| data | rule | n | seeds | MB | times fewer | AUC | over seeds | against n = 1 | logloss "
        "| s a run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    figures: dict[str, float] = {}
    for job, rule, steps in dict.fromkeys(case[:3] for case in cases):
        seeds, each = runs.seeds(job, rule, steps), runs.seeds(job, RULES[0], 1)
        count = runs.count(job, rule, steps)
        if not seeds:
            if count:
                lines.append(f"| {job} | {rule} | {steps} | {count} | | | | | | | |")
            continue
        mean, deviation = mean_of(seeds.values()), np.std([one.auc for one in seeds.values()])
        common = sorted(set(seeds) & set(each))
        fewer, lost = "", ""
        name = f"{job}_{rule}_{steps}"
        figures |= {f"{name}_mb": mean.megabytes, f"{name}_auc": mean.auc}
        if common:
            here, there = (mean_of(one[seed] for seed in common) for one in (seeds, each))
            factor, gained = there.megabytes / here.megabytes, here.auc - there.auc
            fewer, lost = f"{factor:.2f}", f"{gained:+.4f}"
            figures |= {f"{name}_fewer": factor, f"{name}_auc_gained": gained}
        lines.append(
            f"| {job} | {rule} | {steps} | {count} | {mean.megabytes:.1f} | {fewer} "
            f"| {mean.auc:.4f} | ±{deviation:.4f} | {lost} | {mean.logloss:.4f} "
            f"| {mean.seconds:.1f} |"
        )
    return lines, figures


def plot(runs: Runs, job: str, steps: list[int]) -> str:
    """Return the AUC of each rule over n, as powers of two."""
    lines = []
    for rule in RULES:
        points = runs.points(job, rule, steps, of_one=RULES[0])
        if points:
            lines.append(Line(rule, points))
    return svg(f"{job}: test AUC", "steps between two pulls, log2", "AUC", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_arguments(parser, rates=(0.1, 1.0), passes=(5, 2))
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    jobs = jobs_of(arguments)
    by_name = {job.name: job for job in jobs}
    cases, runs = list(cases_of(jobs, arguments)), Runs(arguments, [arguments.workers])
    with LocalCluster(servers=1) as cluster:
        runs.do(cases, lambda case: measure(cluster, by_name[case.job], case, arguments.workers))
    lines, figures = table_of(runs, cases)
    plots = {job: plot(runs, job, arguments.steps) for job in by_name if runs.has(job)}
    report(arguments.out, "model-steps", lines, plots, figures)


if __name__ == "__main__":
    main()
