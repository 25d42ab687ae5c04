"""Trained models, loaded by a process that reaches no server, predict what the servers' rows do."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from backstay.checkpoint.export import export
from backstay.checkpoint.export_reader import Export
from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.trained import CheckpointTables
from backstay.cli import main
from backstay.errors import ConfigError, InvalidRequest
from backstay.job.model_definition import load
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec, ModeSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec
from backstay.trainer.adapter.session import init
from backstay.trainer.model.inference import model_part
from backstay.trainer.model.program import build, framework_of
from tests.integration.tiny_jobs import write_model

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

# Two optimizers, a bag, padding, normalisation: all that has its place in an export.
RICH = {
    "paddle": """
import paddle
from paddle import nn
from backstay.trainer.paddle import EmbeddingBag


class Rich(nn.Layer):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(1000, 4, padding_idx=0, sparse=True)
        self.ads = EmbeddingBag(None, 4, padding_idx=0, mode="mean", name="ad-bags")
        self.norm = nn.BatchNorm1D(8)
        self.head = nn.Linear(8, 1)

    def forward(self, users, ads):
        rows = paddle.concat([self.users(users), self.ads(ads.unsqueeze(1).tile([1, 3]))], axis=1)
        return self.head(self.norm(rows)).squeeze(1)


def custom_model():
    return Rich()


def optimizer(parameters, model):
    rows = [*model.users.parameters(), *model.ads.parameters()]
    rest = [*model.norm.parameters(), *model.head.parameters()]
    return [
        paddle.optimizer.Adagrad(0.1, parameters=rows),
        paddle.optimizer.Adam(0.01, parameters=rest),
    ]


def loss(labels, predictions):
    return nn.functional.binary_cross_entropy_with_logits(predictions, labels)
""",
    "torch": """
import torch
from torch import nn
from backstay.trainer.torch import EmbeddingBag


class Rich(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(1000, 4, padding_idx=0, sparse=True)
        self.ads = EmbeddingBag(None, 4, padding_idx=0, mode="mean", name="ad-bags")
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)

    def forward(self, users, ads):
        rows = torch.cat([self.users(users), self.ads(ads.unsqueeze(1).tile([1, 3]))], dim=1)
        return self.head(self.norm(rows)).squeeze(1)


def custom_model():
    return Rich()


def optimizer(parameters, model):
    rows = [*model.users.parameters(), *model.ads.parameters()]
    rest = [*model.norm.parameters(), *model.head.parameters()]
    return [torch.optim.Adagrad(rows, lr=0.1), torch.optim.Adam(rest, lr=0.01)]


def loss(labels, predictions):
    return nn.functional.binary_cross_entropy_with_logits(predictions, labels)
""",
}

# A process of its own: what was trained is all that it has.
FRESH = """
import numpy as np
import {framework}
from backstay.trainer.{framework}.inference import load_for_inference
users, ads = np.load({asked!r})
tensor = getattr({framework}, "from_numpy", None) or {framework}.to_tensor
answers = []
for model, source in {ways!r}:
    model = load_for_inference(model, source)
    assert not any("handle" in name for name in model.state_dict())
    answers.append(model(tensor(users), tensor(ads)).detach().numpy())
np.save({answer!r}, np.stack(answers))
"""


@pytest.fixture(params=["torch", pytest.param("paddle", marks=pytest.mark.slow)])
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


class Trained:
    """A job's model, trained a little on a cluster, and a checkpoint of it."""

    def __init__(self, folder: Path, framework: str, text: str = "") -> None:
        self.framework = framework
        self.model = write_model(folder, framework)
        if text:
            shared = self.model.read_text().split("def feed")[1]
            self.model.write_text("import numpy as np\n" + text + "\n\ndef feed" + shared)
        self.spec = JobSpec(
            name=f"job-{folder.name}",
            model=str(self.model),
            training=DataSpec(paths=("unread.csv",)),
            mode=ModeSpec(kind="sync"),
            output=str(folder / "output"),
        )
        self.folder = folder
        self.storage = CheckpointStorage(folder / "checkpoints")
        # Ids that training has not met are among them.
        generator = np.random.default_rng(7)
        self.users, self.ads = generator.integers(0, 900, 64), generator.integers(0, 50, 64)
        definition = load(self.spec.model)
        job = self.spec.name
        settings = {"slot_count": 8, "checkpoint_url": self.storage.url}
        with (
            LocalCluster(settings=settings) as cluster,
            init(cluster.endpoints, trainer_id=0, trainers_num=1, job=job) as session,
        ):
            program = build(framework_of(framework), definition, session.client, self.spec)
            session.client.create_table(TableSpec.sparse(f"{job}/__records-01", 1))
            for _ in range(10):
                users, ads = generator.integers(0, 100, 64), generator.integers(0, 50, 64)
                program.train_batch({"users": users, "ads": ads}, (users % 2).astype(np.float32))
            program.synchronize()
            self.expected = program.predict({"users": self.users, "ads": self.ads})
            Path(self.spec.output).mkdir()
            program.save(Path(self.spec.output))
            self.state = {
                name: value.detach().numpy().copy()
                for name, value in [
                    *program.model.named_parameters(), *program.model.named_buffers()
                ]
                if not name.endswith("handle")
            }  # fmt: skip
            self.checkpoint = session.client.checkpoints.save().id

    def job_file(self) -> Path:
        """Write what ``backstay train`` leaves in the ``log_dir``."""
        path = self.folder / "job.json"
        path.write_text(self.spec.to_json())
        return path

    def exported(self, kind: Any = "safetensors") -> Path:
        """Make an export of the job's model."""
        with CheckpointTables(self.storage, self.checkpoint) as tables:
            part, untrained = model_part(
                framework_of(self.framework), load(self.spec.model), self.spec, tables
            )
        assert untrained == []
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "export"
        return export(self.storage, self.checkpoint, folder, kind, model=part)

    def check(self, model: Any) -> None:
        """Compare what a model predicts with what the servers' rows did."""
        library = import_module(self.framework)
        tensor = library.from_numpy if self.framework == "torch" else library.to_tensor
        answer = model(tensor(self.users), tensor(self.ads)).detach().numpy()
        np.testing.assert_allclose(answer, self.expected, rtol=1e-6, atol=1e-7)


def inference(framework: str) -> Any:
    return import_module(f"backstay.trainer.{framework}.inference")


@pytest.fixture(scope="module", params=["paddle", "torch"])
def rich(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    pytest.importorskip(request.param)
    with warnings.catch_warnings():
        # Paddle tells of its normalisation.
        warnings.filterwarnings("ignore", "When training, we now always track", UserWarning)
        return Trained(tmp_path_factory.mktemp("rich"), request.param, RICH[request.param])


def test_a_fresh_process_predicts_the_same(rich: Trained) -> None:
    """From the checkpoint itself and from exports, without a server."""
    asked, answer = rich.folder / "asked.npy", rich.folder / "answer.npy"
    np.save(asked, np.stack([rich.users, rich.ads]))
    ways = [(str(rich.job_file()), rich.storage.url)]
    ways += [(str(rich.model), str(rich.exported(kind))) for kind in ("safetensors", "parquet")]
    program = FRESH.format(
        framework=rich.framework, ways=ways, asked=str(asked), answer=str(answer)
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)
    for one in np.load(answer):
        np.testing.assert_allclose(one, rich.expected, rtol=1e-6, atol=1e-7)


def test_an_export_says_what_the_model_is(rich: Trained) -> None:
    opened = Export.open(rich.exported())
    opened.verify()
    job = rich.spec.name
    # The audit's table is no part of a model.
    assert [spec.name for spec in opened.sparse] == [f"{job}/ad-bags", f"{job}/users"]
    assert opened.model is not None
    assert [(one.path, one.bag, one.padding_idx) for one in opened.model.layers] == [
        ("users", None, 0), ("ads", "mean", 0),
    ]  # fmt: skip
    # Each by its name and shape, normalisation included.
    assert {"head.weight", "head.bias", "norm.weight", "norm.bias"} < opened.model.state.keys()
    for name, value in opened.model.state.items():
        np.testing.assert_array_equal(value, rich.state[name])
        assert value.shape == rich.state[name].shape
    plain = export(rich.storage, rich.checkpoint, rich.folder / "tables")
    assert not any("__records" in spec.name for spec in Export.open(plain).sparse)


def test_a_model_as_for_one_machine_is_filled(tmp_path: Path, framework: str) -> None:
    trained = Trained(tmp_path, framework)
    made = load(trained.spec.model).make_model()
    loaded = inference(framework).load_for_inference(made, trained.exported())
    assert not loaded.training
    trained.check(loaded)
    assert set(loaded.state_dict()) == {"head.weight", "head.bias"}
    # Its state fits into another one, with nothing left over.
    other = inference(framework).load_for_inference(trained.model, trained.storage.url)
    if framework == "torch":
        other.load_state_dict(loaded.state_dict(), strict=True)
    else:
        assert other.set_state_dict(loaded.state_dict()) == ([], [])
    trained.check(other)


def test_a_loop_of_ones_own_is_a_function(tmp_path: Path, framework: str) -> None:
    trained = Trained(tmp_path, framework)
    definition = load(trained.spec.model)
    library = import_module(f"backstay.trainer.{framework}")

    def make() -> Any:
        model = definition.make_model()
        library.swap_embeddings(model, over_bytes=1 << 20)
        optimizer = definition.optimizer(list(model.parameters()))
        library.DistributedOptimizer(optimizer)
        return model

    trained.check(inference(framework).load_for_inference(make, trained.storage.url))


def test_a_checkpoint_of_another_model_is_told(tmp_path: Path, framework: str) -> None:
    trained = Trained(tmp_path, framework)
    load_for_inference = inference(framework).load_for_inference
    with pytest.raises(ConfigError, match="does not say which tables a model has"):
        load_for_inference(load(trained.spec.model).make_model(), trained.storage.url)
    with pytest.raises(InvalidRequest, match=r"dim=4.*the model wants"):
        load_for_inference(trained.model, trained.storage.url, model_params={"dim": 5})
    with pytest.raises(InvalidRequest, match="has no table 'other/users'"):
        load_for_inference(trained.model, trained.storage.url, job="other")
    other = load(trained.spec.model, model_params={"dim": 5}).make_model()
    with pytest.raises(ConfigError, match="is of another model"):
        load_for_inference(other, trained.exported())


def test_the_command(rich: Trained) -> None:
    """By the job's name, and by the place of the checkpoints."""
    runner = CliRunner()
    (rich.folder / "logs").mkdir()
    job_file = rich.job_file()
    spec = replace(rich.spec, checkpoint=CheckpointSpec(url=rich.storage.url))
    (rich.folder / "logs" / "job.json").write_text(spec.to_json())
    by_name, by_place, tables = (rich.folder / name for name in ("named", "placed", "tables-only"))
    logs = str(rich.folder / "logs")
    result = runner.invoke(
        main, ["export", rich.spec.name, str(by_name), "--log-dir", logs, "--json"]
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["layers"].keys() == {"users", "ads"}
    assert told["tensors"]["head.weight"] == list(rich.state["head.weight"].shape)
    assert told["untrained"] == []
    rich.check(inference(rich.framework).load_for_inference(rich.model, by_name))
    place = [rich.storage.url, str(by_place), "--model", str(job_file)]
    result = runner.invoke(main, ["export", *place])
    assert result.exit_code == 0, result.output
    assert f"{rich.checkpoint} exported to {by_place}" in result.output
    rich.check(inference(rich.framework).load_for_inference(rich.model, by_place))
    result = runner.invoke(main, ["export", rich.storage.url, str(tables)])
    assert "give --model FILE to export the model" in result.output
    assert Export.open(tables).model is None
    result = runner.invoke(main, ["export", rich.storage.url, str(tables)])
    assert (result.exit_code, "exists already" in result.output) == (1, True)
    result = runner.invoke(main, ["export", "nobody", str(rich.folder / "none")])
    assert (result.exit_code, "no job 'nobody'" in result.output) == (1, True)
