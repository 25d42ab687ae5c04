"""Test AUC and logloss when gradients are stale, and what compensation wins back.

A DeepFM on Frappe and on census income. All weights are on a pserver: rows and network have the
optimizer of ``--optimizer``. One process plays all workers by turns, so that two cores suffice for
64: at its turn a worker pushes the gradients of its batch, pulls, and computes those of its next
one. So a push of one of n workers is n - 1 steps stale, always. The rules:

- ``sync``: the n workers' gradients are averaged, and pushed at once; no push is stale;
- ``async``: each push has the whole learning rate;
- the others: as ``async``, with that compensation of the tables.

Every rule has the learning rate that is best for one worker, as ``--rates`` has it.

Frappe is not ours to ship: ``--data`` names the folder of frappe_ctr.tsv.gz (see
examples/ctr/README.md). Without it census is measured alone. ``--plots`` writes an SVG file
for each data set.

Usage: ``python -m bench.jobs.staleness --data FOLDER [--workers 1 16] [--rules async scale]``
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from backstay import tables
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec
from backstay.trainer import Client
from bench.experiments.plot import Line, svg
from bench.jobs.adam_steps import DIM, DeepFM, Floats, Ints, Log, auc, initial_rows
from bench.jobs.local import print_result
from bench.programs import REPOSITORY

CENSUS = REPOSITORY / "examples" / "census" / "data" / "adult.data.gz"
# Columns of adult.data that are numbers with many values: each becomes one of twenty ranges.
CENSUS_RANGES = (0, 10, 11, 12)
# The weight of the census bureau, and the education as a number, which stands there as a word.
CENSUS_LEFT_OUT = (2, 4)
BATCH = 128
# What a rule sets as the tables' staleness.
STALENESS: dict[str, tables.Staleness] = {
    "sync": "ignore",
    "async": "ignore",
    "scale": "scale",
    "delay": tables.DelayCompensated(0.04),
    "delay_adaptive": tables.DelayCompensated(2.0, adaptive=True),
}


class Job(NamedTuple):
    """What is trained, and how."""

    name: str
    log: Log
    rate: float
    passes: int


class Found(NamedTuple):
    """Of one run."""

    auc: float
    logloss: float


def census() -> Log:
    """Read the records, shuffled once, so that their last tenth is a fair test."""
    with gzip.open(CENSUS, "rt") as file:
        lines = [line.strip().split(", ") for line in io.StringIO(file.read()) if line.strip()]
    table = np.array(lines)[np.random.default_rng(0).permutation(len(lines))]
    columns = []
    for number in range(table.shape[1] - 1):
        if number in CENSUS_LEFT_OUT:
            continue
        column: NDArray[np.generic] = table[:, number]
        if number in CENSUS_RANGES:
            values = column.astype(np.float64)
            column = np.digitize(values, np.unique(np.quantile(values, np.linspace(0, 1, 21))))
        columns.append(column)
    ids, rows = np.empty((len(table), len(columns)), np.int64), 0
    for field, column in enumerate(columns):
        names, numbers = np.unique(column, return_inverse=True)
        ids[:, field] = numbers.reshape(-1) + rows
        rows += len(names)
    return Log(ids, np.char.startswith(table[:, -1], ">").astype(np.float32), rows)


class Gradients(NamedTuple):
    """Those of a batch: of rows by key, and of the network."""

    keys: Ints
    rows: Floats
    network: Floats


@dataclass
class Worker:
    """What one worker has: a connection, and the gradients that it has not pushed yet."""

    client: Client
    held: Gradients | None = None


class Training:
    """One run of a job by a number of workers."""

    def __init__(self, endpoints: str, job: Job, rule: str, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self._endpoints = endpoints
        self._job = job
        self._order = np.random.default_rng(seed)
        self.model = DeepFM(job.log.ids.shape[1])
        flat = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().numpy()
        made = {"sgd": tables.SGD, "adagrad": tables.Adagrad}[optimizer](job.rate)
        staleness = STALENESS[rule]
        self._rows = TableSpec.sparse("rows", DIM, optimizer=made, staleness=staleness)
        self._network = TableSpec.dense("network", flat.shape, optimizer=made, staleness=staleness)
        with Client(endpoints) as client:
            client.create_table(self._rows)
            client.assign("rows", np.arange(job.log.rows), initial_rows(job.log, seed))
            client.create_table(self._network)
            client.init_dense("network", flat)

    def batches(self, size: int) -> list[Ints]:
        """Return the places of the records of all batches, in order."""
        end, _ = self._job.log.cuts()
        batches = []
        for _ in range(self._job.passes):
            shuffled = self._order.permutation(end)
            batches += [shuffled[at : at + size] for at in range(0, end - size + 1, size)]
        return batches

    def pull_and_compute(self, worker: Worker, places: Ints) -> None:
        """Leave a worker with the gradients of a batch."""
        log = self._job.log
        keys, inverse = np.unique(log.ids[places], return_inverse=True)
        rows = torch.from_numpy(worker.client.pull("rows", keys)).requires_grad_()
        network = torch.from_numpy(worker.client.pull_dense("network"))
        torch.nn.utils.vector_to_parameters(network, self.model.parameters())
        looked_up = rows[torch.from_numpy(inverse.reshape(len(places), -1))]
        labels = torch.from_numpy(log.labels[places])
        self.model.zero_grad()
        logits = self.model(looked_up)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        assert rows.grad is not None
        gradients = [one.grad.reshape(-1) for one in self.model.parameters()]
        worker.held = Gradients(keys, rows.grad.numpy(), torch.cat(gradients).numpy())

    def push(self, worker: Worker) -> None:
        """Push what a worker has, if it has something."""
        held, worker.held = worker.held, None
        if held is not None:
            worker.client.push("rows", held.keys, held.rows)
            worker.client.push_dense("network", held.network)

    def run(self, workers: int, size: int) -> None:
        """Train with workers by turns."""
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(self._endpoints)) for _ in range(workers)]
            for client in clients:
                client.create_table(self._rows)
                client.create_table(self._network)
            playing = [Worker(client) for client in clients]
            for number, places in enumerate(self.batches(size)):
                worker = playing[number % workers]
                self.push(worker)
                self.pull_and_compute(worker, places)
            for worker in playing:
                self.push(worker)

    def evaluate(self) -> Found:
        """Judge the model on the test part."""
        log = self._job.log
        _, begin = log.cuts()
        with Client(self._endpoints) as client:
            client.create_table(self._rows)
            client.create_table(self._network)
            whole = torch.from_numpy(client.pull("rows", np.arange(log.rows)))
            network = torch.from_numpy(client.pull_dense("network"))
        torch.nn.utils.vector_to_parameters(network, self.model.parameters())
        self.model.eval()
        with torch.no_grad():
            logits = self.model(whole[torch.from_numpy(log.ids[begin:])]).numpy()
        labels = log.labels[begin:]
        losses = np.logaddexp(0.0, logits) - labels * logits
        return Found(auc(labels, logits), float(losses.mean()))


def measure(job: Job, rule: str, workers: int, optimizer: str, seeds: int) -> tuple[Found, float]:
    """Return the means over the seeds, and the deviation of the AUC."""
    found = []
    for seed in range(seeds):
        with LocalCluster(servers=1) as cluster:
            training = Training(cluster.endpoints[0], job, rule, optimizer, seed)
            if rule == "sync":
                training.run(1, BATCH * workers)
            else:
                training.run(workers, BATCH)
            found.append(training.evaluate())
    mean = Found(*(float(np.mean(values)) for values in zip(*found, strict=True)))
    return mean, float(np.std([one.auc for one in found]))


def won_back(figures: dict[tuple[str, int], Found], rule: str, workers: int) -> float | None:
    """Return the share of async's loss of AUC against one worker that a rule wins back."""
    alone = figures.get(("async", 1))
    plain, other = figures.get(("async", workers)), figures.get((rule, workers))
    if alone is None or plain is None or other is None or plain.auc >= alone.auc:
        return None
    return (other.auc - plain.auc) / (alone.auc - plain.auc)


def measure_all(job: Job, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure a data set, print its table and write its plot."""
    print(f"\n{job.name}: {arguments.optimizer}, rate {job.rate:g}, {job.passes} passes\n")
    print("| workers | rule | AUC | over seeds | logloss | of async's loss won back |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    figures: dict[tuple[str, int], Found] = {}
    plain: dict[str, float] = {}
    for workers in arguments.workers:
        for rule in arguments.rules:
            if workers == 1 and rule != "async":
                continue
            found, deviation = measure(job, rule, workers, arguments.optimizer, arguments.seeds)
            figures[rule, workers] = found
            back = won_back(figures, rule, workers) if rule not in ("async", "sync") else None
            shown = "" if back is None else f"{back:.0%}"
            print(
                f"| {workers} | {rule} | {found.auc:.4f} | ±{deviation:.4f} | {found.logloss:.4f} "
                f"| {shown} |",
                flush=True,
            )
            plain[f"{job.name}_{rule}_{workers}_auc"] = found.auc
            plain[f"{job.name}_{rule}_{workers}_logloss"] = found.logloss
            if back is not None:
                plain[f"{job.name}_{rule}_{workers}_won_back"] = back
    if arguments.plots is not None:
        path = arguments.plots / f"staleness-{job.name}.svg"
        path.write_text(plot(job, arguments.rules, figures), encoding="utf-8")
    return plain


def plot(job: Job, rules: list[str], figures: dict[tuple[str, int], Found]) -> str:
    """Return the AUC of each rule over the workers, as powers of two."""
    lines = []
    for rule in rules:
        # With one worker all rules are the same.
        of_rule = {n: one.auc for (name, n), one in figures.items() if name == rule or n == 1}
        points = tuple((float(np.log2(n)), of_rule[n]) for n in sorted(of_rule))
        lines.append(Line(rule, points, dashed=rule == "sync"))
    return svg(f"{job.name}: test AUC", "workers, log2", "AUC", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", type=Path, help="folder of frappe_ctr.tsv.gz")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--rules", nargs="+", choices=STALENESS, default=STALENESS)
    parser.add_argument("--optimizer", choices=("sgd", "adagrad"), default="adagrad")
    parser.add_argument("--rates", nargs=2, type=float, default=(0.05, 0.05), help="census, Frappe")
    parser.add_argument("--passes", nargs=2, type=int, default=(5, 2), help="census, Frappe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    jobs = [Job("census", census(), arguments.rates[0], arguments.passes[0])]
    if arguments.data is None:
        print("Frappe is left out: --data names no folder of it", file=sys.stderr)
    else:
        log = Log.read(arguments.data / "frappe_ctr.tsv.gz")
        jobs.append(Job("frappe", log, arguments.rates[1], arguments.passes[1]))
    figures: dict[str, float] = {}
    for job in jobs:
        figures |= measure_all(job, arguments)
    print_result(figures)


if __name__ == "__main__":
    main()
