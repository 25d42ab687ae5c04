"""``--dry-run`` makes the calls of a worker: what servers refuse 20 s later is refused now."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from backstay.errors import ConfigError
from backstay.job_check.process import dry_run_apart
from backstay.job_check.trial_servers import TrialServers
from backstay.job_spec import JobSpec
from tests.examples import few

LARGE = 200_000  # rows of 4 float32: more than swap_embeddings_over_bytes
RECORDS = "x,y\n" + "1,0\n" * 10
TORCH = """\
import torch
from backstay import tables
from backstay.trainer.torch import Embedding, EmbeddingBag

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(LARGE, 4)
        self.top = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.top(self.rows(x))[:, 0]

def custom_model():
    return Net()

def loss(labels, predictions):
    return ((labels - predictions) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def feed(records, mode, metadata):
    x = torch.tensor([int(value) for value in records.column("x")])
    return x if mode == "prediction" else (x, x.float())
"""
PADDLE = """\
import paddle

class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.rows = paddle.nn.Embedding(LARGE, 4, sparse=True)
        self.top = paddle.nn.Linear(4, 1)

    def forward(self, x):
        return self.top(self.rows(x))[:, 0]

def custom_model():
    return Net()

def loss(labels, predictions):
    return ((labels - predictions) ** 2).mean()

def optimizer(parameters):
    return paddle.optimizer.SGD(0.1, parameters=parameters)

def feed(records, mode, metadata):
    x = paddle.to_tensor([int(value) for value in records.column("x")])
    return x if mode == "prediction" else (x, x.astype("float32"))
"""
TORCH_SGD = "torch.optim.SGD(parameters, lr=0.1)"
PADDLE_SGD = "paddle.optimizer.SGD(0.1, parameters=parameters)"
TORCH_ROWS = "torch.nn.Embedding(LARGE, 4)"
COMPENSATED = "Embedding(LARGE, 4, name='rows', compensation=tables.DelayCompensated(0.04))"
FTRL = "Embedding(LARGE, 4, name='rows', optimizer=tables.FTRL(0.1))"
TWO_OF_A_NAME = f"{TORCH_ROWS}\n        self.other = Embedding(LARGE, 8, name='rows')"


def spec_of(folder: Path, model: str, **fields: Any) -> JobSpec:
    model = model.replace("LARGE", str(LARGE))
    (folder / "model.py").write_text(model)
    (folder / "train.csv").write_text(RECORDS)
    train = str(folder / "train.csv")
    document = {"name": "tiny", "model": str(folder / "model.py"), "training": train, **fields}
    return JobSpec.from_mapping(document)


def replaced(model: str, old: str, new: str) -> str:
    assert old in model
    return model.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "fields", "said"),
    few(
        2,
        [
            (TORCH_SGD, "torch.optim.NAdam(parameters)", {}, "NAdam does not run on the servers"),
            (
                "(x, x.float())",
                "((x, x[:2]), x.float())",
                {"mode": "sync"},
                "mode sync cuts batches",
            ),
            (TORCH_SGD, "torch.optim.SGD(parameters, lr=0.1, maximize=True)", {}, "maximize=True"),
            (
                TORCH_SGD,
                "torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)",
                {},
                "weight_decay=0.01 on the embedding 'tiny/rows' needs AdamW",
            ),
            (
                TORCH_ROWS,
                TORCH_ROWS + "\n        torch.nn.init.xavier_uniform_(self.rows.weight)",
                {},
                "set server_initializer of this layer",
            ),
            (TORCH_ROWS, TWO_OF_A_NAME, {}, "two layers of the model"),
            (TORCH_ROWS, "Embedding(LARGE, 100_000)", {}, "dim"),
            (TORCH_SGD, "torch.optim.Adam(parameters)", {"mode": "geo"}, "mode geo: the table"),
            (
                TORCH_ROWS,
                COMPENSATED,
                {"mode": "sync"},
                "mode sync: the table 'tiny/rows' has comp",
            ),
            (TORCH_ROWS, COMPENSATED, {"mode": "geo"}, "mode geo: the table 'tiny/rows' has comp"),
            (
                TORCH_ROWS,
                FTRL,
                {"mode": {"compensation": "scale"}},
                'table "tiny/rows": compensation is "scale"; allowed: "ignore" or delay_co',
            ),
        ],
    ),
)
def test_a_dry_run_refuses_what_the_servers_would(
    tmp_path: Path, old: str, new: str, fields: dict[str, Any], said: str
) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigError) as caught:
        dry_run_apart(spec_of(tmp_path, replaced(TORCH, old, new), **fields))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    few(
        1,
        [
            (PADDLE_SGD, "paddle.optimizer.Lamb(0.1, parameters=parameters)", "Lamb does not"),
            (
                PADDLE_SGD,
                "paddle.optimizer.SGD(0.1, parameters=parameters, weight_decay=0.01)",
                "weight_decay",
            ),
        ],
    ),
)
def test_a_dry_run_with_paddle_refuses_what_the_servers_would(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    pytest.importorskip("paddle")
    with pytest.raises(ConfigError) as caught:
        dry_run_apart(spec_of(tmp_path, replaced(PADDLE, old, new)))
    assert said in str(caught.value)


@pytest.mark.parametrize("mode", few(2, ["sync", "geo", "async", "bounded"]))
def test_a_model_with_rows_on_servers_is_tried_as_a_whole(tmp_path: Path, mode: str) -> None:
    pytest.importorskip("torch")
    own = replaced(TORCH, TORCH_ROWS, "Embedding(LARGE, 4)")
    found = dry_run_apart(spec_of(tmp_path, own, mode=mode))
    assert found.data[0].tried.startswith("feed, model, loss and optimizer, on the first 8 records")
    broken = replaced(own, "self.top(self.rows(x))", "self.top(self.rows(x), x)")
    with pytest.raises(ConfigError, match=r"(?s)the model failed on the first 8.*model\.py"):
        dry_run_apart(spec_of(tmp_path, broken, mode=mode))


def test_a_job_of_one_process_may_have_what_servers_refuse(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = replaced(TORCH, TORCH_SGD, "torch.optim.NAdam(parameters)")
    found = dry_run_apart(spec_of(tmp_path, model), local=True)
    assert found.data[0].tried.startswith("feed, model, loss and optimizer")
    # But for layers of backstay, which have a server there, too.
    own = replaced(model, TORCH_ROWS, "Embedding(LARGE, 4)")
    with pytest.raises(ConfigError, match="NAdam does not run on the servers"):
        dry_run_apart(spec_of(tmp_path, own), local=True)


def test_the_trial_registers_no_trainer() -> None:
    servers = TrialServers("job")
    try:
        session = servers.session()
        names = {thread.name for thread in threading.enumerate()}
        assert session.client.cluster().nodes
        assert "backstay-registration" not in names
    finally:
        servers.close()


def test_data_without_an_end_is_tried_on_what_was_there_before(tmp_path: Path) -> None:
    """With ``start: latest`` there is nothing to train on yet."""
    hours = f"{tmp_path}/hours/*"
    training = {"kind": "csv", "paths": [hours], "options": {"start": "latest"}}
    spec = spec_of(tmp_path, TORCH, training=training, period={"folders": 1})

    def planned() -> tuple[int, str]:
        (plan,) = dry_run_apart(spec).data
        return plan.records, plan.tried

    assert planned() == (0, f"nothing: no folder matches {hours} yet")
    hour = tmp_path / "hours" / "08"
    hour.mkdir(parents=True)
    (hour / "a.csv").write_text(RECORDS)
    assert planned() == (
        0,
        f"nothing: no folder of {hours} has a file _SUCCESS yet; the first one is {hour}",
    )
    (hour / "_SUCCESS").touch()
    records, tried = planned()
    assert "feed, model, loss and optimizer, on the first 8 records" in tried, (records, tried)
