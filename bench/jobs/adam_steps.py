"""Test AUC on Frappe of Adam's rules for rows: dense, lazy by the row's steps, by the trainer's.

DeepFM as in examples/ctr, one trainer, one pserver. Only what steps the rows differs:

- ``dense``: PyTorch's Adam, which moves every row in every step;
- ``row``, ``global``: the servers' Adam with these ``steps``;
- ``decayed``: as ``global``, but the moments of a row first decay for the steps that it missed;
- ``mean_decayed``, ``square_decayed``: only one of the two moments does;
- ``adagrad``: the servers' Adagrad.

The network has PyTorch's Adam at 0.001 with each. The log is split by position: 80 % for training,
10 % for choosing a rate (valid), 10 % for the test. The data is not ours to ship: ``--data`` names
the folder of frappe_ctr.tsv.gz (examples/ctr/README.md).

Usage: ``python -m bench.jobs.adam_steps --data FOLDER [--rules row global] [--rates 0.01 0.03]``
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from backstay import tables
from backstay.job.metrics import auc
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from bench.jobs.local import print_result

# Weights of a row: factors, then one of the linear part.
FACTORS, DIM = 16, 17
BATCH, NETWORK_RATE, BETA1, BETA2 = 512, 0.001, 0.9, 0.999

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Log:
    """Ids [records, fields], from 0 to ``rows``, and labels [records]."""

    ids: Ints
    labels: Floats
    rows: int

    @classmethod
    def read(cls, path: Path) -> Log:
        """Read the log; each value of each column gets a number of its own."""
        with gzip.open(path, "rt") as file:
            next(file)
            table = np.array([line.rstrip("\n").split("\t") for line in file])
        ids, rows = np.empty((len(table), table.shape[1] - 1), np.int64), 0
        for field in range(ids.shape[1]):
            values, numbers = np.unique(table[:, field + 1], return_inverse=True)
            ids[:, field] = numbers + rows
            rows += len(values)
        return cls(ids, table[:, 0].astype(np.float32), rows)

    def cuts(self) -> tuple[int, int]:
        """Return where the validation and the test part begin."""
        return int(0.8 * len(self.ids)), int(0.9 * len(self.ids))


class Rows(Protocol):
    """What steps the rows."""

    def pull(self, keys: Ints) -> Floats:
        """Return rows [n, DIM] of different keys."""

    def push(self, keys: Ints, gradients: Floats) -> None:
        """Step the rows of different keys."""


class ServedRows:
    """Rows on a pserver."""

    def __init__(self, client: Client, initial: Floats, optimizer: tables.Optimizer) -> None:
        self._client = client
        self._table = client.create_table(tables.TableSpec.sparse("rows", DIM, optimizer=optimizer))
        client.assign(self._table, np.arange(len(initial)), initial)

    def pull(self, keys: Ints) -> Floats:
        return self._client.pull(self._table, keys)

    def push(self, keys: Ints, gradients: Floats) -> None:
        self._client.push(self._table, keys, gradients)


class DenseRows:
    """PyTorch's Adam, with a gradient of 0 for every other row."""

    def __init__(self, initial: Floats, rate: float, epsilon: float) -> None:
        self._weights = torch.nn.Parameter(torch.from_numpy(initial.copy()))
        self._weights.grad = torch.zeros_like(self._weights)
        self._optimizer = torch.optim.Adam([self._weights], rate, (BETA1, BETA2), epsilon)

    def pull(self, keys: Ints) -> Floats:
        rows: Floats = self._weights.detach().numpy()[keys]
        return rows

    def push(self, keys: Ints, gradients: Floats) -> None:
        whole = self._weights.grad
        whole.zero_()
        whole[torch.from_numpy(keys)] = torch.from_numpy(gradients)
        self._optimizer.step()


class DecayedRows:
    """Adam by the trainer's steps, whose moments decay for missed steps at the next one."""

    def __init__(
        self, initial: Floats, rate: float, epsilon: float, *, means: bool, squares: bool
    ) -> None:
        self._weights = initial.copy()
        self._means, self._squares = np.zeros_like(initial), np.zeros_like(initial)
        self._last = np.zeros(len(initial), np.int64)
        self._step = 0
        self._rate, self._epsilon = rate, epsilon
        self._decays = means, squares

    def pull(self, keys: Ints) -> Floats:
        return self._weights[keys]

    def push(self, keys: Ints, gradients: Floats) -> None:
        self._step += 1
        missed = (self._step - 1 - self._last[keys])[:, None]
        self._last[keys] = self._step
        decay1, decay2 = (BETA1**missed, BETA2**missed)
        mean = self._means[keys] * (decay1 if self._decays[0] else 1.0)
        square = self._squares[keys] * (decay2 if self._decays[1] else 1.0)
        mean = BETA1 * mean + (1.0 - BETA1) * gradients
        square = BETA2 * square + (1.0 - BETA2) * gradients**2
        self._means[keys], self._squares[keys] = mean, square
        corrected = mean / (1.0 - BETA1**self._step)
        root = np.sqrt(square / (1.0 - BETA2**self._step))
        self._weights[keys] -= self._rate * corrected / (root + self._epsilon)


RULES = ("dense", "row", "global", "decayed", "mean_decayed", "square_decayed", "adagrad")
SERVED: dict[str, Callable[[float, float], tables.Optimizer]] = {
    "row": lambda rate, epsilon: tables.Adam(rate, BETA1, BETA2, epsilon, steps="row"),
    "global": lambda rate, epsilon: tables.Adam(rate, BETA1, BETA2, epsilon, steps="global"),
    "adagrad": lambda rate, _: tables.Adagrad(rate),
}


class DeepFM(torch.nn.Module):  # type: ignore[misc]
    """H. Guo et al., arXiv:1703.04247, of rows that are given."""

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(fields * FACTORS, 128), torch.nn.ReLU(), torch.nn.Dropout(0.2),
            torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Dropout(0.2),
            torch.nn.Linear(128, 1),
        )  # fmt: skip

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n] of rows [n, fields, DIM]."""
        factors = rows[..., :FACTORS]
        pairs = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1)
        return self.network(factors.flatten(1)).squeeze(1) + pairs + rows[..., FACTORS].sum(1)


def initial_rows(log: Log, seed: int) -> Floats:
    rows = np.random.default_rng(seed).normal(0.0, 0.01, (log.rows, DIM)).astype(np.float32)
    rows[:, FACTORS] = 0.0
    return rows


def made_rows(rule: str, rate: float, epsilon: float, initial: Floats, stack: ExitStack) -> Rows:
    if rule == "dense":
        return DenseRows(initial, rate, epsilon)
    if rule in SERVED:
        cluster = stack.enter_context(LocalCluster(servers=1))
        client = stack.enter_context(Client(cluster.endpoints))
        return ServedRows(client, initial, SERVED[rule](rate, epsilon))
    means, squares = rule != "square_decayed", rule != "mean_decayed"
    return DecayedRows(initial, rate, epsilon, means=means, squares=squares)


def train(log: Log, rows: Rows, seed: int, passes: int) -> DeepFM:
    """Train; the order of records and the network's weights depend on the seed only."""
    torch.manual_seed(seed)
    order = np.random.default_rng(seed)
    model = DeepFM(log.ids.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), NETWORK_RATE)
    end, _ = log.cuts()
    for _ in range(passes):
        shuffled = order.permutation(end)
        for begin in range(0, end, BATCH):
            places = shuffled[begin : begin + BATCH]
            keys, inverse = np.unique(log.ids[places], return_inverse=True)
            pulled = torch.from_numpy(rows.pull(keys)).requires_grad_()
            looked_up = pulled[torch.from_numpy(inverse.reshape(len(places), -1))]
            labels = torch.from_numpy(log.labels[places])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(looked_up), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert pulled.grad is not None
            rows.push(keys, pulled.grad.numpy())
    return model


def evaluate(log: Log, rows: Rows, model: DeepFM) -> dict[str, float]:
    model.eval()
    begin, test = log.cuts()
    whole = torch.from_numpy(rows.pull(np.arange(log.rows)))
    with torch.no_grad():
        logits = model(whole[torch.from_numpy(log.ids[begin:])]).numpy()
    labels, cut = log.labels[begin:], test - begin
    losses = np.logaddexp(0.0, logits) - labels * logits
    return {
        "valid_auc": auc(labels[:cut], logits[:cut]),
        "auc": auc(labels[cut:], logits[cut:]),
        "logloss": float(losses[cut:].mean()),
    }


def measure(log: Log, rule: str, rate: float, arguments: Any) -> dict[str, float]:
    """Return mean metrics over the seeds, and the test AUC's standard deviation."""
    found = []
    for seed in range(arguments.seeds):
        with ExitStack() as stack:
            rows = made_rows(rule, rate, arguments.epsilon, initial_rows(log, seed), stack)
            found.append(evaluate(log, rows, train(log, rows, seed, arguments.passes)))
    means = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    return {**means, "auc_deviation": float(np.std([one["auc"] for one in found]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="folder of frappe_ctr.tsv.gz")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES[:4])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.003, 0.01, 0.03])
    parser.add_argument("--epsilon", type=float, default=1e-8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=5)
    arguments = parser.parse_args()
    log = Log.read(arguments.data / "frappe_ctr.tsv.gz")
    print("| rule | learning rate | valid AUC | test AUC | over seeds | logloss |", flush=True)
    figures = {}
    for rule in arguments.rules:
        for rate in arguments.rates:
            one = figures[f"{rule} {rate:g}"] = measure(log, rule, rate, arguments)
            print(
                f"| {rule} | {rate:g} | {one['valid_auc']:.4f} | {one['auc']:.4f} | "
                f"±{one['auc_deviation']:.4f} | {one['logloss']:.3f} |",
                flush=True,
            )
    print_result(figures)


if __name__ == "__main__":
    main()
