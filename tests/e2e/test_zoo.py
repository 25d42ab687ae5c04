"""Every model of the zoo learns by its job file, on real data or generated files of its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay.master.job_file import load_job
from backstay.trainer.frameworks import arguments_of
from backstay.trainer.metrics import compute
from backstay.trainer.model_definition import EVALUATION, TRAINING, ModelDefinition, load
from backstay.trainer.readers import BadRecords, open_reader, read_batch
from examples.common.split import split
from examples.ctr.generate import write_criteo
from tests.e2e.zoo_data import write_digits, write_frappe, write_ratings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# PyTorch says so wherever gradients are sparse.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def trained(job: str, **given: Any) -> dict[str, float]:
    """Train as the job file says, here, with the framework alone; return the metrics."""
    spec = load_job(EXAMPLES / job, given, folder=EXAMPLES)
    definition = load(spec.model, model_params=spec.model_params)
    framework = pytest.importorskip(definition.framework())
    with_seed = framework.manual_seed if hasattr(framework, "manual_seed") else framework.seed
    with_seed(0)
    model = definition.make_model()
    optimizer = definition.optimizer(model.parameters())
    clear = getattr(optimizer, "clear_grad", None) or optimizer.zero_grad
    assert spec.training is not None
    for seed in range(spec.epochs):
        for features, labels in fed(definition, spec.training, spec.batch_size, seed):
            loss = definition.loss(tensor(framework, labels), answer(framework, model, features))
            loss.backward()
            optimizer.step()
            clear()
    model.eval()
    assert spec.validation is not None
    with framework.no_grad():
        pairs = [
            (labels, answer(framework, model, features).numpy())
            for features, labels in fed(definition, spec.validation, 4096, None)
        ]
    labels, predictions = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return compute(definition.metrics, labels, predictions)


def fed(definition: ModelDefinition, data: Any, size: int, seed: int | None) -> Any:
    reader = open_reader(data, module=definition.module)
    for shard in reader.shards():
        records = read_batch(reader, shard.name, 0, shard.records, BadRecords())
        if seed is not None:
            records = records.take(np.random.default_rng(seed).permutation(len(records)))
        mode = EVALUATION if seed is None else TRAINING
        for begin in range(0, len(records), size):
            yield definition.feed(records[begin : begin + size], mode, reader.metadata)


def tensor(framework: Any, array: Any) -> Any:
    array = np.ascontiguousarray(array)
    return (
        framework.to_tensor(array)
        if hasattr(framework, "to_tensor")
        else framework.from_numpy(array)
    )


def answer(framework: Any, model: Any, features: Any) -> Any:
    return model(*(tensor(framework, one) for one in arguments_of(features).positional))


@pytest.mark.parametrize("framework", ["paddle", "torch"])
def test_wide_and_deep_on_census(framework: str) -> None:
    metrics = trained("census/job.yaml", model=f"census/wide_deep_{framework}.py", epochs=2)
    assert metrics["auc"] > 0.917
    assert metrics["logloss"] < 0.297


CTR_MODELS = ["deepfm_torch.py", "deepfm_paddle.py", "dcn.py"]


@pytest.mark.parametrize("model", CTR_MODELS)
def test_click_models_on_the_criteo_format(model: str, tmp_path: Path) -> None:
    best = write_criteo(tmp_path / "clicks.txt", 30_000, seed=1)
    split(tmp_path / "clicks.txt", tmp_path, by="position", header=False)
    metrics = trained(
        "ctr/criteo.yaml", model=f"ctr/{model}", epochs=1, batch_size=128,
        **{"training.paths": [str(tmp_path / "train.txt")]},
        **{"validation.paths": [str(tmp_path / "test.txt")]},
    )  # fmt: skip
    assert 0.7 < metrics["auc"] < best


@pytest.mark.parametrize("model", CTR_MODELS)
def test_click_models_on_the_frappe_format(model: str, tmp_path: Path) -> None:
    write_frappe(tmp_path / "log.tsv", 20_000, seed=0)
    split(tmp_path / "log.tsv", tmp_path, by="position", header=True)
    metrics = trained(
        "ctr/frappe.yaml", model=f"ctr/{model}", epochs=4, batch_size=128,
        training=str(tmp_path / "train.tsv"), validation=str(tmp_path / "test.tsv"),
    )  # fmt: skip
    assert metrics["auc"] > 0.7


def test_two_towers_on_the_movielens_format(tmp_path: Path) -> None:
    write_ratings(tmp_path / "ratings.inter", 20_000, seed=0)
    split(tmp_path / "ratings.inter", tmp_path, by="row", header=True)
    metrics = trained(
        "movielens/job.yaml",
        **{"training.paths": [str(tmp_path / "train.inter")]},
        **{"validation.paths": [str(tmp_path / "test.inter")]},
    )
    # Ratings have a deviation of 1.2; noise and rounding leave 0.6.
    assert metrics["rmse"] < 0.75


def test_a_network_on_the_mnist_format(tmp_path: Path) -> None:
    write_digits(tmp_path, "t10k", 2_000, seed=0)
    metrics = trained(
        "mnist/job.yaml",
        **{"training.paths": [str(tmp_path)], "validation.paths": [str(tmp_path)]},
    )
    assert metrics["accuracy"] > 0.9
