"""Tables with a lifetime in a job: clicks of examples, and the rows at the end of each pass.

Shows are counted exactly, so what the last checkpoint has of them tells how often each example and
each decay counted, whoever was killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backstay.checkpoint.reading import CheckpointReader
from backstay.checkpoint.statistics import statistics_of
from backstay.checkpoint.storage import CheckpointStorage
from backstay.job_spec import DataSpec, JobSpec, LifetimeSpec, ModeSpec
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.job_processes import JobProcesses
from tests.integration.tiny_jobs import write_clicks

RECORDS = 2000
PASSES = 3
# Examples of an id in a pass so that its row stays: below, it goes at the end of each.
KEPT = 3

MODEL = """
import numpy as np
import torch
from torch import nn

from backstay.tables import Expiry, Lifetime, Normal, Score, ScoreFunction
from backstay.trainer.torch import Embedding


def examples(show, click):
    return (show - click) + click


LIFETIME = Lifetime(expiry=Expiry(score_below={below}), score=Score({score}, decay=0.5))


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        make = dict(initializer=Normal(0.0, 0.1), lifetime=LIFETIME)
        self.users = Embedding(None, 4, name="users", **make)
        self.head = nn.Linear(4, 1)

    def forward(self, users):
        return torch.sigmoid(self.head(self.users(users))).squeeze(1)


def custom_model():
    return Clicks()


def loss(labels, predictions):
    return nn.functional.binary_cross_entropy(predictions, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def feed(records, mode, metadata):
    return {{"users": records.column("user").astype(np.int64)}}, records.column("click").astype(
        np.float32
    )


def clicks(labels):
    return labels
"""


BUILT_IN = "nonclick_coefficient=1.0, click_coefficient=1.0"
OWN = "function=ScoreFunction.of(examples)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[LocalCluster]:
    pytest.importorskip("torch")
    settings = {"slot_count": 16, "replicas": 2, "checkpoint_url": str(folder)}
    with LocalCluster(servers=2, settings=settings) as running:
        yield running


def job(
    folder: Path, name: str, mode: ModeSpec, lifetime: LifetimeSpec, score: str = BUILT_IN
) -> JobSpec:
    model = folder / "model.py"
    model.write_text(MODEL.format(below=KEPT / 2, score=score), encoding="utf-8")
    return JobSpec(
        name=name,
        model=str(model),
        training=DataSpec(paths=(str(write_clicks(folder / "train.csv", RECORDS)),)),
        epochs=PASSES,
        batch_size=50,
        records_per_task=200,
        task_lease_ttl_ms=1000,
        mode=mode,
        lifetime=lifetime,
    )


def users_of(spec: JobSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The users in the data, the examples of each in a pass, and its clicks."""
    [path] = spec.training.paths if spec.training is not None else ()
    rows = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64)
    users, place = np.unique(rows[:, 0], return_inverse=True)
    return users, np.bincount(place), np.bincount(place, rows[:, 2])


def saved_rows(folder: Path, table: str) -> dict[int, tuple[float, float]]:
    """Show and click of each row in the newest checkpoint."""
    storage = CheckpointStorage(str(folder))
    with CheckpointReader(storage, storage.ids()[-1]) as reader:
        found = {}
        spec = reader.manifest.table(table)
        for rows in reader.rows(table):
            kept = statistics_of(spec, rows.state)
            for key, show, click in zip(rows.keys, kept["show"], kept["click"], strict=True):
                found[int(key)] = float(show), float(click)
        return found


@pytest.mark.parametrize(
    ("mode", "score"),
    [("async", BUILT_IN), ("sync", BUILT_IN), ("geo", BUILT_IN), ("async", OWN)],
    ids=["async", "sync", "geo", "own score"],
)
def test_shows_and_decays_count_once_though_the_job_master_dies(
    cluster: LocalCluster, folder: Path, tmp_path: Path, mode: str, score: str
) -> None:
    name = f"lives-{mode}-{'own' if score == OWN else 'built-in'}"
    spec = job(tmp_path, name, ModeSpec(kind=mode), LifetimeSpec(), score)
    with JobProcesses(cluster, spec, tmp_path) as running:
        for worker in ("w1", "w2"):
            running.start_worker(worker)
        running.until(lambda status: status.round >= 2 or status.state != "running")
        running.kill("master")
        running.start("master", "-m", "backstay.cli", "master", str(tmp_path / "job.json"))
        running.until(lambda status: status.round >= 3 or status.state != "running")
        running.kill("w1")
        status = running.over()
        assert status.state == "done", status.reason
    users, examples, clicks = users_of(spec)
    # A row that stays has the shows of each pass, halved at the end of it and of each later one.
    share = sum(0.5**later for later in range(1, PASSES + 1))
    wanted = {
        int(user): (shown * share, clicked * share)
        for user, shown, clicked in zip(users, examples, clicks, strict=True)
        if shown >= KEPT
    }
    assert 100 < len(wanted) < len(users)
    assert saved_rows(folder, f"{spec.name}/users") == wanted


def test_a_job_that_leaves_rows_alone_keeps_them_all(
    cluster: LocalCluster, folder: Path, tmp_path: Path
) -> None:
    spec = job(tmp_path, "leaves", ModeSpec(), LifetimeSpec(every="none"))
    with JobProcesses(cluster, spec, tmp_path) as running:
        running.start_worker("w1")
        assert running.over().state == "done"
    users, examples, clicks = users_of(spec)
    wanted = {
        int(user): (float(PASSES * shown), float(PASSES * clicked))
        for user, shown, clicked in zip(users, examples, clicks, strict=True)
    }
    assert saved_rows(folder, f"{spec.name}/users") == wanted
