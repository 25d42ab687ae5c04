"""What programs share that train a DeepFM on click data many times: the data and the model.

All weights are on a pserver. ``kept_runs`` has the runs.
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from backstay.job.metrics import auc
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.local_cluster import LocalCluster
from bench.jobs.adam_steps import DeepFM, Floats, Ints, Log
from bench.programs import REPOSITORY

__all__ = ["BATCH", "Gradients", "Job", "Model", "add_arguments", "jobs_of", "megabytes"]

# Records of a step.
BATCH = 128
CENSUS = REPOSITORY / "examples" / "census" / "data" / "adult.data.gz"
# Columns of adult.data that are numbers with many values: each becomes one of twenty ranges.
CENSUS_RANGES = (0, 10, 11, 12)
# The weight of the census bureau, and the education as a number, which stands there as a word.
CENSUS_LEFT_OUT = (2, 4)


class Job(NamedTuple):
    """What is trained, and how."""

    name: str
    log: Log
    rate: float
    passes: int


class Gradients(NamedTuple):
    """Those of a batch: of rows by key, and of the network."""

    keys: Ints
    rows: Floats
    network: Floats


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


def add_arguments(
    parser: argparse.ArgumentParser, rates: tuple[float, float], passes: tuple[int, int]
) -> None:
    """Add what all these programs take."""
    parser.add_argument("--data", type=Path, help="folder of frappe_ctr.tsv.gz")
    parser.add_argument("--rates", nargs=2, type=float, default=rates, help="census, Frappe")
    parser.add_argument("--passes", nargs=2, type=int, default=passes, help="census, Frappe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--limit-minutes", type=float, help="begin no run that would end later; default: no limit"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="keep runs, table and plots there; the same command goes on with what is missing",
    )


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """Read the data that there is."""
    jobs = [Job("census", census(), arguments.rates[0], arguments.passes[0])]
    if arguments.data is None:
        print("Frappe is left out: --data names no folder of it", file=sys.stderr)
    else:
        log = Log.read(arguments.data / "frappe_ctr.tsv.gz")
        jobs.append(Job("frappe", log, arguments.rates[1], arguments.passes[1]))
    return jobs


def megabytes(cluster: LocalCluster) -> float:
    """Return what the servers have received from clients and sent to them so far."""
    with ClusterInspection(cluster.endpoints, cluster.client_config()) as inspection:
        nodes = inspection.status()["nodes"]
    moved = [node["stats"]["bytes_received"] + node["stats"]["bytes_sent"] for node in nodes]
    return float(sum(moved)) / 1e6


class Model:
    """The network of one run, and the order of its records; both by the seed."""

    def __init__(self, job: Job, seed: int) -> None:
        # More threads would only wait for each other: the network is small.
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._job = job
        self._order = np.random.default_rng(seed)
        self._network = DeepFM(job.log.ids.shape[1])

    @property
    def initial(self) -> Floats:
        """The weights of the network, flat."""
        flat = torch.nn.utils.parameters_to_vector(self._network.parameters())
        values: Floats = flat.detach().numpy()
        return values

    def batches(self, size: int) -> list[Ints]:
        """Return the places of the records of all batches, in order."""
        end, _ = self._job.log.cuts()
        batches = []
        for _ in range(self._job.passes):
            shuffled = self._order.permutation(end)
            batches += [shuffled[at : at + size] for at in range(0, end - size + 1, size)]
        return batches

    def keys(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the different keys of a batch, and where each id is among them."""
        return np.unique(self._job.log.ids[places], return_inverse=True)

    def gradients(
        self, places: Ints, keyed: tuple[Ints, Ints], pulled: Floats, network: Floats
    ) -> Gradients:
        """Return the gradients of a batch, given the weights that it is computed with."""
        rows = torch.from_numpy(pulled).requires_grad_()
        self._take(network)
        looked_up = rows[torch.from_numpy(keyed[1].reshape(len(places), -1))]
        labels = torch.from_numpy(self._job.log.labels[places])
        self._network.zero_grad()
        logits = self._network(looked_up)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        assert rows.grad is not None
        own = [one.grad.reshape(-1) for one in self._network.parameters()]
        return Gradients(keyed[0], rows.grad.numpy(), torch.cat(own).numpy())

    def judge(self, rows: Floats, network: Floats) -> tuple[float, float]:
        """Return AUC and logloss on the test part; ``rows`` are all rows."""
        log = self._job.log
        _, begin = log.cuts()
        self._take(network)
        self._network.eval()
        with torch.no_grad():
            logits = self._network(torch.from_numpy(rows)[torch.from_numpy(log.ids[begin:])])
        logits, labels = logits.numpy(), log.labels[begin:]
        losses = np.logaddexp(0.0, logits) - labels * logits
        return auc(labels, logits), float(losses.mean())

    def _take(self, network: Floats) -> None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(network), self._network.parameters())
