"""What a model file says of gradients and optimizers holds on servers and in one process alike."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay.errors import ConfigError
from backstay.job.model_definition import load
from backstay.job_spec import DataSpec, JobSpec, ModeSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.adapter.session import init
from backstay.trainer.model.program import Program, build, framework_of
from tests.integration.tiny_jobs import write_model

# PyTorch says so of its own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

BATCH, STEPS = 64, 25
TOLERANCE = 1e-6
jobs = itertools.count()

CLIPPED = {
    "paddle": """

def optimizer(parameters):
    clip = paddle.nn.ClipGradByGlobalNorm(0.02)
    return paddle.optimizer.Adagrad(0.1, parameters=parameters, grad_clip=clip)
""",
    "torch": """

def clip_gradients(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 0.02)
""",
}
BY_VALUE = {
    "paddle": """

def optimizer(parameters):
    clip = paddle.nn.ClipGradByValue(0.0005)
    return paddle.optimizer.SGD(2.0, parameters=parameters, grad_clip=clip)
""",
    "torch": """

def optimizer(parameters):
    return torch.optim.SGD(parameters, 2.0)


def clip_gradients(parameters):
    torch.nn.utils.clip_grad_value_(parameters, 0.0005)
""",
}
TWO = {
    "paddle": """

def optimizer(parameters, model):
    rows = [*model.users.parameters(), *model.ads.parameters()]
    clip = paddle.nn.ClipGradByGlobalNorm(0.01)
    return {
        "rows": paddle.optimizer.Adagrad(0.1, parameters=rows, grad_clip=clip),
        "layers": paddle.optimizer.Adam(0.01, parameters=model.head.parameters()),
    }
""",
    "torch": """

def optimizer(parameters, model):
    rows = [*model.users.parameters(), *model.ads.parameters()]
    return {
        "rows": torch.optim.Adagrad(rows, lr=0.1),
        "layers": torch.optim.Adam(model.head.parameters(), lr=0.01),
    }


def clip_gradients(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 0.01)
""",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=2, settings={"slot_count": 16}) as running:
        yield running


@pytest.fixture(params=["torch", pytest.param("paddle", marks=pytest.mark.slow)])
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


def spec_of(folder: Path, framework: str, extra: str) -> JobSpec:
    model = write_model(folder, framework, extra)
    return JobSpec(
        name="clicks",
        model=str(model),
        training=DataSpec(paths=("unread.csv",)),
        mode=ModeSpec(kind="sync"),
    )


def built(spec: JobSpec, client: Any = None) -> Program:
    definition = load(spec.model)
    return build(framework_of(definition.framework()), definition, client, spec)


def batches() -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield batches in which ids come more than once."""
    generator = np.random.default_rng(5)
    taste = generator.normal(size=1000)
    for _ in range(STEPS):
        users, ads = generator.integers(0, 40, BATCH), generator.integers(0, 50, BATCH)
        yield {"users": users, "ads": ads}, (taste[users] > 0).astype(np.float32)


def curve(program: Program) -> list[float]:
    return [program.train_batch(features, labels)[0] for features, labels in batches()]


def fill(program: Program, framework: str, values: dict[str, Any]) -> None:
    """Give a model the weights by path."""
    for name, parameter in program.model.named_parameters():
        if framework == "paddle":
            parameter.set_value(values[name])
        else:
            parameter.data.copy_(parameter.data.new_tensor(values[name]))


@pytest.mark.parametrize("way", [CLIPPED, BY_VALUE, TWO], ids=["norm", "value", "two"])
def test_servers_train_as_one_process(
    cluster: LocalCluster, tmp_path: Path, framework: str, way: dict[str, str]
) -> None:
    # Where a session is open, layers move to its servers.
    free = built(spec_of(tmp_path, framework, ""))
    spec = spec_of(tmp_path, framework, way[framework])
    here = built(spec)
    job = f"job{next(jobs)}"
    with init(cluster.endpoints, trainer_id=0, trainers_num=1, job=job) as session:
        remote = built(spec, session.client)
        head = {
            name: parameter.detach().numpy().copy()
            for name, parameter in remote.model.named_parameters()
            if name.startswith("head")
        }
        rows = {
            f"{name}.weight": session.client.pull(session.table_name(name), np.arange(size))
            for name, size in (("users", 1000), ("ads", 50))
        }
        for program in (here, free):
            fill(program, framework, {**head, **rows})
        plain = curve(here)
        np.testing.assert_allclose(curve(remote), plain, rtol=TOLERANCE)
        trained = {name: one.detach().numpy() for name, one in here.model.named_parameters()}
        for name in ("users", "ads"):
            now = session.client.pull(session.table_name(name), np.arange(50))
            np.testing.assert_allclose(now, trained[f"{name}.weight"][:50], atol=TOLERANCE)
    assert np.max(np.abs(np.subtract(plain, curve(free)))) > 1e-3  # clipping did something


LEFT_OUT = {
    "paddle": "    return paddle.optimizer.SGD(0.1, parameters=model.head.parameters())\n",
    "torch": "    return torch.optim.SGD(model.head.parameters(), 0.1)\n",
}
IN_BOTH = {
    "paddle": "    one, two = (paddle.optimizer.SGD(0.1, parameters=p) for p in "
    "(parameters, model.head.parameters()))\n    return [one, two]\n",
    "torch": "    one, two = (torch.optim.SGD(p, 0.1) for p in "
    "(parameters, model.head.parameters()))\n    return [one, two]\n",
}


@pytest.mark.parametrize("on_servers", [False, True])
def test_a_parameter_in_no_or_two_optimizers_is_named(
    cluster: LocalCluster, tmp_path: Path, framework: str, on_servers: bool
) -> None:
    begin = "\n\ndef optimizer(parameters, model):\n"
    rows = "the rows of 'users', the rows of 'ads'" if on_servers else "'users.weight'"
    for body, message in (
        (LEFT_OUT, rf"no optimizer has {rows}.*freeze it"),
        (IN_BOTH, r"more than one optimizer has 'head.weight' \(in '0' and '1'\)"),
    ):
        spec = spec_of(tmp_path, framework, begin + body[framework])
        if not on_servers:
            with pytest.raises(ConfigError, match=message):
                built(spec)
            continue
        job = f"job{next(jobs)}"
        with init(cluster.endpoints, trainer_id=0, trainers_num=1, job=job) as session:
            before = session.client.tables()
            with pytest.raises(ConfigError, match=message):
                built(spec, session.client)
            assert session.client.tables() == before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return []", "returned none"),
        ("return [3]", "returned a int at '0'; it must return one of .*or a list or dict"),
        ("return {'rows': None}", "returned a NoneType at 'rows'"),
    ],
)
def test_other_answers_are_refused(tmp_path: Path, framework: str, body: str, message: str) -> None:
    spec = spec_of(tmp_path, framework, f"\n\ndef optimizer(parameters):\n    {body}\n")
    with pytest.raises(ConfigError, match=message):
        built(spec)


def test_each_optimizer_has_its_rate(tmp_path: Path, framework: str) -> None:
    program = built(spec_of(tmp_path, framework, TWO[framework]))
    weights = dict(program.model.named_parameters())
    before = {name: one.detach().numpy().copy() for name, one in weights.items()}
    program.set_learning_rate({"rows": 0.0})
    program.train_batch(*next(batches()))
    moved = {name for name in before if (before[name] != weights[name].detach().numpy()).any()}
    assert moved == {"head.weight", "head.bias"}
    program.set_learning_rate(0.0)  # of both
    before = {name: one.detach().numpy().copy() for name, one in weights.items()}
    program.train_batch(*next(batches()))
    assert all((before[name] == weights[name].detach().numpy()).all() for name in before)
    with pytest.raises(ConfigError, match=re.escape("a rate for lines; the model file's")):
        program.set_learning_rate({"lines": 0.1})


def test_clip_gradients_is_for_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    with pytest.raises(ConfigError, match=re.escape("grad_clip=paddle.nn.ClipGradByGlobalNorm")):
        built(spec_of(tmp_path, "paddle", "\n\ndef clip_gradients(parameters):\n    pass\n"))
