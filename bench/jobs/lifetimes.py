"""Rows that a lifetime saves on real click data, and what that costs in AUC.

A DeepFM with crossed features is trained under each policy on MovieLens 100k, on Frappe, and on
Frappe with the cross of user and app (``frappe_pairs``): in one pass, as online learning goes over
its data. With several, a key of one example has more occurrences. One trainer has two servers in
processes of their own. At the end of each period, an eighth of the pass, the table decays and
expires as its lifetime says. The data is not ours to ship: ``--data`` names the folder that has
``frappe/frappe_ctr.tsv.gz`` and ``movielens/ml-100k.*.gz``.

Usage: ``python -m bench.jobs.lifetimes --data FOLDER``
"""

from __future__ import annotations

import argparse
import gzip
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backstay import tables
from backstay.config import ClientConfig
from backstay.job.metrics import auc
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import AdmitAfter, Expiry, Lifetime, Score
from backstay.trainer.hashing import hash_ids
from backstay.trainer.torch import DistributedOptimizer, Embedding, init
from bench.jobs.local import print_result

DIM = 16
BATCH = 512
PERIODS = 8
# The score is the number of shows, halved at the end of each period: a key goes that had its only
# show three periods ago.
SHOWS = Score(nonclick_coefficient=1.0, click_coefficient=1.0, decay=0.5)
LOW_SCORE = Expiry(score_below=0.2)
POLICIES: dict[str, Lifetime | None] = {
    "no lifetime": None,
    "admission after 2": Lifetime(AdmitAfter(2)),
    "admission after 2, filter of 1 MiB": Lifetime(AdmitAfter(2, filter_bytes=1 << 20)),
    "expiry": Lifetime(expiry=LOW_SCORE, score=SHOWS),
    "both": Lifetime(AdmitAfter(2), expiry=LOW_SCORE, score=SHOWS),
}


class Data(NamedTuple):
    """Examples of one set: ids int64 [n, fields], labels float32 [n], of training and test."""

    ids: NDArray[np.int64]
    labels: NDArray[np.float32]
    test_ids: NDArray[np.int64]
    test_labels: NDArray[np.float32]


def columns_of(path: Path, separator: str = "\t") -> dict[str, NDArray[Any]]:
    """Return the columns of a gzipped table by the names in its first line, without types."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        names = [name.partition(":")[0] for name in next(file).rstrip("\n").split(separator)]
        rows = [line.rstrip("\n").split(separator) for line in file]
    return {
        name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def ids_of(
    columns: dict[str, NDArray[Any]], features: Sequence[Sequence[str]]
) -> NDArray[np.int64]:
    """Return an id for each feature, a column or a cross of several, [n, features]."""
    return np.stack(
        [hash_ids(*(columns[name] for name in names), field="*".join(names)) for names in features],
        axis=1,
    )


def frappe(folder: Path, crosses: Sequence[tuple[str, ...]] = ()) -> Data:
    """App usage: each column, and crosses with the place. The first 80 %, the last 10."""
    columns = columns_of(folder / "frappe" / "frappe_ctr.tsv.gz")
    labels = columns.pop("label").astype(np.float32)
    places = [("user", "city"), ("item", "country"), ("item", "city")]
    ids = ids_of(columns, [*((name,) for name in columns), *places, *crosses])
    train, test = int(0.8 * len(ids)), int(0.9 * len(ids))
    return Data(ids[:train], labels[:train], ids[test:], labels[test:])


def movielens(folder: Path) -> Data:
    """Ratings of 4 and 5 of MovieLens 100k; crosses with age, occupation, place and genre."""
    columns = columns_of(folder / "movielens" / "ml-100k.inter.gz")
    for file, key in (("user", "user_id"), ("item", "item_id")):
        table = columns_of(folder / "movielens" / f"ml-100k.{file}.gz")
        place = {name: number for number, name in enumerate(table.pop(key))}
        rows = np.array([place[name] for name in columns[key]])
        columns |= {name: column[rows] for name, column in table.items()}
    columns["genre"] = np.array([text.partition(" ")[0] for text in columns["class"]])
    columns["place"] = np.array([text[:3] for text in columns["zip_code"]])
    columns["decade"] = np.array([text[:-1] for text in columns["age"]])
    single = [
        "user_id",
        "item_id",
        "decade",
        "gender",
        "occupation",
        "place",
        "genre",
        "release_year",
    ]
    crosses = [("user_id", "class"), ("item_id", "decade"), ("item_id", "occupation")]
    crosses += [("item_id", "place"), ("user_id", "release_year")]
    ids = ids_of(columns, [*((name,) for name in single), *crosses])
    labels = (columns["rating"].astype(np.float32) >= 4).astype(np.float32)
    rest = np.arange(len(ids)) % 10
    return Data(ids[rest < 8], labels[rest < 8], ids[rest == 9], labels[rest == 9])


def frappe_pairs(folder: Path) -> Data:
    """The same with the cross of user and app, where one example tells much of the next."""
    return frappe(folder, [("user", "item")])


SETS: dict[str, Callable[[Path], Data]] = {
    "movielens": movielens,
    "frappe": frappe,
    "frappe_pairs": frappe_pairs,
}


class DeepFM(nn.Module):  # type: ignore[misc]
    """A row is a weight of the linear part and the factors of the others."""

    def __init__(self, fields: int, lifetime: Lifetime | None, seed: int) -> None:
        super().__init__()
        self.rows = Embedding(
            None, DIM + 1, name="rows", lifetime=lifetime, seed=seed,
            initializer=tables.Normal(0.0, 0.01), optimizer=tables.Adagrad(0.05),
        )  # fmt: skip
        self.network = nn.Sequential(
            nn.Linear(fields * DIM, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids)
        factors = rows[:, :, 1:]
        pairs = 0.5 * (factors.sum(dim=1).square() - factors.square().sum(dim=1)).sum(dim=1)
        linear = rows[:, :, 0].sum(dim=1)
        return linear + pairs + self.network(factors.flatten(1)).squeeze(1)


def train(data: Data, lifetime: Lifetime | None, seed: int) -> tuple[int, int, float]:
    """Train once; return the rows at the end, the counters beside them, and the test AUC."""
    with LocalCluster(2, settings={"replicas": 1, "slot_count": 64}) as cluster:
        with init(cluster.endpoints) as session:
            torch.manual_seed(seed)
            model = DeepFM(data.ids.shape[1], lifetime, seed)
            optimizer = DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.01))
            order = np.random.default_rng(seed).permutation(len(data.ids))
            for period, part in enumerate(np.array_split(order, PERIODS)):
                for first in range(0, len(part), BATCH):
                    chosen = part[first : first + BATCH]
                    labels = torch.from_numpy(data.labels[chosen])
                    loss = nn.functional.binary_cross_entropy_with_logits(
                        model(data.ids[chosen]), labels
                    )
                    loss.backward()
                    optimizer.step(clicks=labels)
                    optimizer.zero_grad()
                if lifetime is not None and lifetime.score is not None:
                    session.client.decay("rows", period=period + 1)
                    session.client.expire("rows")
            model.eval()
            with torch.no_grad():
                parts = np.array_split(data.test_ids, 32)
                scores = np.concatenate([model(part).numpy() for part in parts])
        with ClusterInspection(cluster.endpoints, ClientConfig()) as inspection:
            [rows] = [one for one in inspection.tables()["tables"] if one["name"] == "rows"]
        return rows["rows"], rows["counters"], auc(data.test_labels, scores)


def main() -> None:
    """Print a row for each data set and policy, then all figures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=SETS, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name in arguments.only or SETS:
        data = SETS[name](arguments.data)
        for policy, lifetime in POLICIES.items():
            runs = [train(data, lifetime, seed) for seed in range(arguments.seeds)]
            rows, counters, aucs = zip(*runs, strict=True)
            figures[f"{name}, {policy}"] = {
                "rows": statistics.mean(rows),
                "counters": statistics.mean(counters),
                "auc": statistics.mean(aucs),
                "auc_spread": max(aucs) - min(aucs),
            }
            shown = ", ".join(f"{value:.4f}" for value in aucs)
            print(f"| {name} | {policy} | {statistics.mean(rows):,.0f} | {shown} |", flush=True)
    print_result(figures)


if __name__ == "__main__":
    main()
