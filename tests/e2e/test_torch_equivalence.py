"""One server and one trainer give the loss curve of plain PyTorch on one machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import Uniform
from backstay.trainer.torch import DistributedOptimizer, Embedding, init, swap_embeddings

pytestmark = pytest.mark.torch

IDS, FIELDS, BATCH, STEPS = 96, 6, 32, 60
# Both sides compute in float32, but may add in another order.
RELATIVE_TOLERANCE = 1e-5
CLIPPED_TOLERANCE = 1e-6
of = torch.optim
# Sixty steps are few from PyTorch's default, Normal(0, 1).
NEAR_ZERO = Uniform(-0.25, 0.25)

# Rows without a gradient stay as they are under these, in plain PyTorch too.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: of.SGD(p, 2.0),
    "sgd_decayed_layers": lambda p: of.SGD(
        [{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.001}], 2.0
    ),
    "adagrad": lambda p: of.Adagrad(p, 0.1),
}
# Under these plain PyTorch moves every row in every step, the servers only those of the batch:
# equal where each batch has every row.
EVERY_ROW: dict[str, Any] = {
    "momentum": lambda p: of.SGD(p, 0.2, momentum=0.9),
    "nesterov": lambda p: of.SGD(p, 0.2, momentum=0.9, nesterov=True),
    "adadelta": lambda p: of.Adadelta(p, 1.0),
    "adam": lambda p: of.Adam(p, 0.01),
    "adamax": lambda p: of.Adamax(p, 0.01),
    "amsgrad": lambda p: of.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: of.AdamW(p, 0.01, weight_decay=0.1),
    "rmsprop": lambda p: of.RMSprop(p, 0.005),
    "rmsprop_centered": lambda p: of.RMSprop(p, 0.005, momentum=0.5, centered=True),
}
SCHEDULERS: dict[str, Any] = {
    "sgd": lambda o: of.lr_scheduler.ExponentialLR(o, gamma=0.99),
    "adam": lambda o: of.lr_scheduler.OneCycleLR(o, 0.02, total_steps=STEPS, cycle_momentum=False),
    "adamw": lambda o: of.lr_scheduler.CosineAnnealingLR(o, STEPS),
}


class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embedding = embedding
        self.network = torch.nn.Sequential(
            torch.nn.Linear(FIELDS * 8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def forward(self, ids: Any) -> Any:
        return self.network(self.embedding(ids).flatten(1)).squeeze(1)


def loss_curve(
    forward: Any, optimizer: Any, scheduler: Any = None, *, every_row: bool = False
) -> list[float]:
    generator = np.random.default_rng(3)
    hidden = generator.normal(size=IDS)
    losses = []
    for _ in range(STEPS):
        ids = generator.integers(0, IDS, (BATCH, FIELDS))
        if every_row:
            ids = generator.permutation(np.arange(BATCH * FIELDS) % IDS).reshape(BATCH, FIELDS)
        labels = (hidden[ids].sum(axis=1) > 0).astype(np.float32)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            forward(torch.from_numpy(ids)), torch.from_numpy(labels)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def reference_of(model: Model, session: Any, **settings: Any) -> Model:
    reference = Model(torch.nn.Embedding(IDS, 8, **settings))
    rows = session.client.pull(model.embedding.table_name, np.arange(IDS))
    reference.embedding.weight.data = torch.from_numpy(rows)
    reference.network.load_state_dict(model.network.state_dict())
    return reference


def assert_same(here: list[float], plain: list[float]) -> None:
    assert np.mean(plain[-10:]) < np.mean(plain[:10])  # it did learn
    np.testing.assert_allclose(here, plain, rtol=RELATIVE_TOLERANCE)


@pytest.mark.parametrize("name", sorted({**OPTIMIZERS, **EVERY_ROW}))
def test_same_loss_curve(name: str, one_server: LocalCluster, own_name: str) -> None:
    every_row = name in EVERY_ROW
    make = {**OPTIMIZERS, **EVERY_ROW}[name]
    schedule = SCHEDULERS.get(name, lambda _: None)
    with init(one_server.endpoints, job=own_name) as session:
        model = Model(Embedding(IDS, 8, name="rows", initializer=NEAR_ZERO))
        inner = make(list(model.parameters()))
        optimizer = DistributedOptimizer(inner)
        reference = reference_of(model, session)
        plain_optimizer = make(list(reference.parameters()))
        here = loss_curve(model, optimizer, schedule(optimizer), every_row=every_row)
        plain = loss_curve(
            reference, plain_optimizer, schedule(plain_optimizer), every_row=every_row
        )
    assert_same(here, plain)


class Both:
    """Two optimizers of one model, as PyTorch's users have them with sparse embeddings."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def sparse_adam(embedding: Any) -> Any:
    return of.SparseAdam(embedding.parameters(), 0.01)


def test_same_loss_curve_as_sparse_adam(one_server: LocalCluster, own_name: str) -> None:
    """Both count the trainer's steps, and a batch has some of the rows only."""
    with init(one_server.endpoints, job=own_name) as session:
        model = Model(Embedding(IDS, 8, name="rows", initializer=NEAR_ZERO))
        rows = DistributedOptimizer(sparse_adam(model.embedding))
        layers = DistributedOptimizer(of.Adam(model.network.parameters(), 0.01))
        reference = reference_of(model, session, sparse=True)
        plain_layers = of.Adam(reference.network.parameters(), 0.01)
        here = loss_curve(model, Both(rows, layers))
        plain = loss_curve(reference, Both(sparse_adam(reference.embedding), plain_layers))
    assert_same(here, plain)


def test_a_swapped_model_is_the_same_model(one_server: LocalCluster, own_name: str) -> None:
    """What ``swap_embeddings`` makes of a plain file trains as the plain file does."""
    with init(one_server.endpoints, job=own_name) as session:
        model = Model(torch.nn.Embedding(IDS, 8, sparse=True))
        assert swap_embeddings(model, over_bytes=1 << 30) == ["embedding"]
        optimizer = DistributedOptimizer(of.Adagrad(model.parameters(), 0.1))
        reference = reference_of(model, session)
        plain = loss_curve(reference, of.Adagrad(reference.parameters(), 0.1))
        here = loss_curve(model, optimizer)
    assert_same(here, plain)


CLIPS: dict[str, Any] = {
    "global_norm": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.05),
    "largest": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.01, norm_type=float("inf")),
    "norm": lambda p: [torch.nn.utils.clip_grad_norm_([one], 0.02) for one in p],
    "value": lambda p: torch.nn.utils.clip_grad_value_(p, 0.002),
}


class Clipped:
    """An optimizer in a loop that clips the gradients before each step."""

    def __init__(self, model: Model, optimizer: Any, clip: Any) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self.clip(list(self.model.parameters()))
        self.optimizer.step()


@pytest.mark.parametrize("name", CLIPS)
def test_clipped_gradients_are_those_of_plain_torch(
    name: str, one_server: LocalCluster, own_name: str
) -> None:
    """Dense and sparse gradients of a batch are clipped together, equal ids merged before."""
    with init(one_server.endpoints, job=own_name) as session:
        model = Model(Embedding(IDS, 8, name="rows", initializer=NEAR_ZERO))
        optimizer = DistributedOptimizer(of.SGD(model.parameters(), 2.0))
        reference, unclipped = reference_of(model, session), reference_of(model, session)
        plain = loss_curve(
            reference, Clipped(reference, of.SGD(reference.parameters(), 2.0), CLIPS[name])
        )
        free = loss_curve(unclipped, of.SGD(unclipped.parameters(), 2.0))
        here = loss_curve(model, Clipped(model, optimizer, CLIPS[name]))
        rows = session.client.pull(model.embedding.table_name, np.arange(IDS))
    assert np.max(np.abs(np.subtract(plain, free))) > 1e-3  # the limit is reached
    np.testing.assert_allclose(here, plain, rtol=CLIPPED_TOLERANCE)
    weights = reference.embedding.weight.detach().numpy()
    np.testing.assert_allclose(rows, weights, atol=CLIPPED_TOLERANCE)


@pytest.mark.slow
# torch.compile looks at .grad of what comes into a graph and hides the warning; not from pytest.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_has_the_same_loss_curve(one_server: LocalCluster, own_name: str) -> None:
    """With PyTorch's code generator, as a user has it."""
    with init(one_server.endpoints, job=own_name) as session:
        model = Model(Embedding(IDS, 8, name="rows", initializer=NEAR_ZERO))
        optimizer = DistributedOptimizer(of.Adagrad(model.parameters(), 0.1))
        reference = reference_of(model, session)
        plain = loss_curve(reference, of.Adagrad(reference.parameters(), 0.1))
        here = loss_curve(torch.compile(model), optimizer)
    assert_same(here, plain)
