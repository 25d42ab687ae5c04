"""Every model of the zoo learns by its job file, on real data or generated files of its format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from backstay.job.model_definition import load
from backstay.master.job_file import load_job
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.adapter import session
from backstay.trainer.worker.local_run import LocalRun
from examples.common.split import split
from examples.ctr.generate import write_criteo
from tests.e2e.zoo_data import write_digits, write_frappe, write_ratings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# PyTorch says so wherever gradients are sparse.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

CTR_MODELS = [
    *("deepfm_torch.py", "deepfm_paddle.py", "dcn.py"),
    pytest.param("xdeepfm.py", marks=pytest.mark.slow),
]
Fields = dict[str, Any]


@pytest.fixture
def server() -> Iterator[session.SessionFactory]:
    """A server that is started when a model asks for one, as ``backstay train --local`` does."""
    with ExitStack() as stack:

        def connect() -> session.Session:
            cluster = stack.enter_context(LocalCluster(servers=1, settings={"replicas": 1}))
            return session.init(cluster.endpoints, trainer_id=0, trainers_num=1)

        yield connect


def metrics_of(job: str, given: Fields, factory: session.SessionFactory) -> dict[str, float]:
    """Train here as the job file says, with the framework alone, and evaluate."""
    spec = load_job(EXAMPLES / job, given, folder=EXAMPLES)
    # Paddle is an extra of its own; a model file that needs it cannot be loaded without.
    pytest.importorskip("paddle")
    definition = load(spec.model, model_params=spec.model_params)
    result = LocalRun(spec, definition, session_factory=factory).run()
    assert result.passes == spec.epochs
    return result.evaluations[-1]


@pytest.mark.parametrize("framework", ["paddle", "torch"])
def test_wide_and_deep_on_census(framework: str, server: session.SessionFactory) -> None:
    given: Fields = {"model": f"census/wide_deep_{framework}.py", "epochs": 2}
    metrics = metrics_of("census/job.yaml", given, server)
    assert metrics["auc"] > 0.917
    assert metrics["logloss"] < 0.297


@pytest.mark.parametrize("model", CTR_MODELS)
def test_click_models_on_the_criteo_format(
    model: str, tmp_path: Path, server: session.SessionFactory
) -> None:
    best = write_criteo(tmp_path / "clicks.txt", 30_000, seed=1)
    split(tmp_path / "clicks.txt", tmp_path, by="position", header=False)
    given: Fields = {"model": f"ctr/{model}", "batch_size": 128}
    given["training.paths"] = [str(tmp_path / "train.txt")]
    given["validation.paths"] = [str(tmp_path / "test.txt")]
    metrics = metrics_of("ctr/criteo.yaml", given, server)
    assert 0.7 < metrics["auc"] < best


@pytest.mark.parametrize("model", CTR_MODELS)
def test_click_models_on_the_frappe_format(
    model: str, tmp_path: Path, server: session.SessionFactory
) -> None:
    write_frappe(tmp_path / "log.tsv", 20_000, seed=0)
    split(tmp_path / "log.tsv", tmp_path, by="position", header=True)
    given: Fields = {"model": f"ctr/{model}", "batch_size": 128, "epochs": 4}
    given["training"] = str(tmp_path / "train.tsv")
    given["validation"] = str(tmp_path / "test.tsv")
    metrics = metrics_of("ctr/frappe.yaml", given, server)
    assert metrics["auc"] > 0.7


def test_the_generator_of_clicks_repeats_itself(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, (3, 3, 4), strict=True):
        write_criteo(path, 100, seed)
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again != other


@pytest.mark.parametrize(
    ("by", "sizes", "last"),
    [("position", [18, 2, 3], ["20\n", "21\n", "22\n"]), ("row", [19, 2, 2], ["9\n", "19\n"])],
)
def test_a_split_keeps_each_line_once_and_the_header_in_each_part(
    tmp_path: Path, by: str, sizes: list[int], last: list[str]
) -> None:
    lines = [f"{number}\n" for number in range(23)]
    (tmp_path / "all.csv").write_text("n\n" + "".join(lines))
    counts = split(tmp_path / "all.csv", tmp_path / by, by=by, header=True)
    parts = [
        (tmp_path / by / f"{name}.csv").read_text().splitlines(keepends=True)
        for name in ("train", "validation", "test")
    ]
    assert list(counts.values()) == sizes
    assert [len(part) - 1 for part in parts] == sizes
    assert [part[0] for part in parts] == ["n\n"] * 3
    assert sorted(line for part in parts for line in part[1:]) == sorted(lines)
    assert parts[2][1:] == last


def test_two_towers_on_the_movielens_format(tmp_path: Path, server: session.SessionFactory) -> None:
    write_ratings(tmp_path / "ratings.inter", 20_000, seed=0)
    split(tmp_path / "ratings.inter", tmp_path, by="row", header=True)
    given: Fields = {"epochs": 3, "training.paths": [str(tmp_path / "train.inter")]}
    given["validation.paths"] = [str(tmp_path / "test.inter")]
    metrics = metrics_of("movielens/job.yaml", given, server)
    # Ratings have a deviation of 1.3; noise and rounding leave 0.6.
    assert metrics["rmse"] < 0.75


def test_a_network_on_the_mnist_format(
    tmp_path: Path, server: session.SessionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_digits(tmp_path, "t10k", 2_000, seed=0)
    monkeypatch.setenv("BACKSTAY_MNIST_DIR", str(tmp_path))
    metrics = metrics_of("mnist/job.yaml", {}, server)
    assert metrics["accuracy"] > 0.9
