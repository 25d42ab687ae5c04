"""One server and one trainer give the loss curve of plain Paddle on one machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.paddle import DistributedOptimizer, Embedding, init

pytestmark = pytest.mark.paddle

IDS, FIELDS, BATCH, STEPS = 96, 6, 32, 60
# Both sides compute in float32, but may add in another order.
RELATIVE_TOLERANCE = 1e-5
CLIPPED_TOLERANCE = 1e-6

# Rows without a gradient stay as they are under these two, in plain Paddle too.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: paddle.optimizer.SGD(0.3, parameters=p),
    "sgd_scheduled": lambda p: paddle.optimizer.SGD(
        paddle.optimizer.lr.ExponentialDecay(0.3, gamma=0.97), parameters=p
    ),
    "adagrad": lambda p: paddle.optimizer.Adagrad(0.1, parameters=p),
}
# Under these plain Paddle moves every row in every step, the servers only those of the batch:
# equal where each batch has every row.
EVERY_ROW: dict[str, Any] = {
    "momentum": lambda p: paddle.optimizer.Momentum(0.05, 0.9, parameters=p),
    "adadelta": lambda p: paddle.optimizer.Adadelta(1.0, epsilon=1e-3, parameters=p),
    "adam": lambda p: paddle.optimizer.Adam(0.01, parameters=p),
    "adamax": lambda p: paddle.optimizer.Adamax(0.01, parameters=p),
    "amsgrad": lambda p: paddle.optimizer.Adam(0.01, amsgrad=True, parameters=p),
    "adamw": lambda p: paddle.optimizer.AdamW(0.01, weight_decay=0.1, parameters=p),
    "rmsprop": lambda p: paddle.optimizer.RMSProp(0.005, parameters=p),
}


class Model(paddle.nn.Layer):  # type: ignore[misc, name-defined]
    def __init__(self, embedding: Any) -> None:
        super().__init__()
        paddle.seed(11)
        self.embedding = embedding
        self.network = paddle.nn.Sequential(
            paddle.nn.Linear(FIELDS * 8, 16), paddle.nn.Tanh(), paddle.nn.Linear(16, 1)
        )

    def forward(self, ids: Any) -> Any:
        return self.network(self.embedding(ids).flatten(1)).squeeze(1)


def loss_curve(
    model: Model, optimizer: Any, scheduler: Any = None, *, every_row: bool = False
) -> list[float]:
    generator = np.random.default_rng(3)
    hidden = generator.normal(size=IDS)
    losses = []
    for _ in range(STEPS):
        ids = generator.integers(0, IDS, (BATCH, FIELDS))
        if every_row:
            ids = generator.permutation(np.arange(BATCH * FIELDS) % IDS).reshape(BATCH, FIELDS)
        labels = (hidden[ids].sum(axis=1) > 0).astype(np.float32)
        loss = paddle.nn.functional.binary_cross_entropy_with_logits(
            model(paddle.to_tensor(ids)), paddle.to_tensor(labels)
        )
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss))
    return losses


def scheduler_of(optimizer: Any) -> Any:
    rate = optimizer._learning_rate
    return rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None


@pytest.mark.parametrize("name", sorted({**OPTIMIZERS, **EVERY_ROW}))
def test_same_loss_curve(name: str, one_server: LocalCluster, own_name: str) -> None:
    every_row = name in EVERY_ROW
    make = {**OPTIMIZERS, **EVERY_ROW}[name]
    with init(one_server.endpoints, job=own_name) as session:
        model = Model(Embedding(IDS, 8, name="rows"))
        inner = make(model.parameters())
        optimizer = DistributedOptimizer(inner)
        reference = Model(paddle.nn.Embedding(IDS, 8))
        reference.embedding.weight.set_value(
            session.client.pull(model.embedding.table_name, np.arange(IDS))
        )
        reference.network.set_state_dict(model.network.state_dict())
        plain_optimizer = make(reference.parameters())
        here = loss_curve(model, optimizer, scheduler_of(inner), every_row=every_row)
        plain = loss_curve(
            reference, plain_optimizer, scheduler_of(plain_optimizer), every_row=every_row
        )
    assert np.mean(plain[-10:]) < 0.97 * np.mean(plain[:10])  # it did learn
    np.testing.assert_allclose(here, plain, rtol=RELATIVE_TOLERANCE)


def lazy_adam(model: Model) -> Any:
    # Paddle corrects epsilon by the step, too: equal where it is next to nothing.
    return paddle.optimizer.Adam(0.01, epsilon=1e-14, lazy_mode=True, parameters=model.parameters())


def test_same_loss_curve_as_lazy_adam(one_server: LocalCluster, own_name: str) -> None:
    """Both count the trainer's steps, and a batch has some of the rows only."""
    with init(one_server.endpoints, job=own_name) as session:
        model = Model(Embedding(IDS, 8, name="rows"))
        optimizer = DistributedOptimizer(lazy_adam(model))
        reference = reference_of(model, session, sparse=True)
        # For sparse gradients Paddle counts from 2.
        session.client.push_steps.done = 1
        plain = loss_curve(reference, lazy_adam(reference))
        here = loss_curve(model, optimizer)
    np.testing.assert_allclose(here, plain, rtol=RELATIVE_TOLERANCE)


CLIPS: dict[str, Any] = {
    "global_norm": lambda: paddle.nn.ClipGradByGlobalNorm(0.05),
    "norm": lambda: paddle.nn.ClipGradByNorm(0.02),
    "value": lambda: paddle.nn.ClipGradByValue(0.002),
}


def clipped(model: Model, clip: Any) -> Any:
    return paddle.optimizer.SGD(0.3, parameters=model.parameters(), grad_clip=clip)


def reference_of(model: Model, session: Any, **settings: Any) -> Model:
    reference = Model(paddle.nn.Embedding(IDS, 8, **settings))
    rows = session.client.pull(model.embedding.table_name, np.arange(IDS))
    reference.embedding.weight.set_value(rows)
    reference.network.set_state_dict(model.network.state_dict())
    return reference


# Paddle itself does not clip sparse gradients by value.
CLIPPED = [
    (name, sparse)
    for name in CLIPS
    for sparse in (False, True)
    if (name, sparse) != ("value", True)
]


@pytest.mark.parametrize(("name", "sparse"), CLIPPED)
def test_clipped_gradients_are_those_of_plain_paddle(
    name: str, sparse: bool, one_server: LocalCluster, own_name: str
) -> None:
    """Dense and sparse gradients of a batch are clipped together, equal ids merged before."""
    with init(one_server.endpoints, job=own_name) as session:
        model = Model(Embedding(IDS, 8, name="rows"))
        optimizer = DistributedOptimizer(clipped(model, CLIPS[name]()))
        reference, unclipped = (reference_of(model, session, sparse=sparse) for _ in range(2))
        plain = loss_curve(reference, clipped(reference, CLIPS[name]()))
        free = loss_curve(unclipped, clipped(unclipped, None))
        here = loss_curve(model, optimizer)
        rows = session.client.pull(model.embedding.table_name, np.arange(IDS))
    assert np.max(np.abs(np.subtract(plain, free))) > 1e-3  # the limit is reached
    np.testing.assert_allclose(here, plain, rtol=CLIPPED_TOLERANCE)
    np.testing.assert_allclose(rows, reference.embedding.weight.numpy(), atol=CLIPPED_TOLERANCE)


def test_what_asks_for_no_clipping_is_not_clipped(one_server: LocalCluster, own_name: str) -> None:
    """``need_clip`` of a parameter is Paddle's, rows on the servers included."""
    attribute = paddle.ParamAttr(need_clip=False)
    with init(one_server.endpoints, job=own_name) as session:
        model = Model(Embedding(IDS, 8, name="rows", weight_attr=attribute))
        optimizer = DistributedOptimizer(clipped(model, paddle.nn.ClipGradByGlobalNorm(0.05)))
        reference = reference_of(model, session, weight_attr=attribute)
        plain = loss_curve(reference, clipped(reference, paddle.nn.ClipGradByGlobalNorm(0.05)))
        here = loss_curve(model, optimizer)
    np.testing.assert_allclose(here, plain, rtol=CLIPPED_TOLERANCE)


class ClippedInTheLoop:
    """An optimizer in a loop that clips the parameters' gradients itself."""

    def __init__(self, model: Model, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self) -> None:
        paddle.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()

    def clear_grad(self) -> None:
        self.optimizer.clear_grad()


def test_gradients_clipped_in_the_loop_are_those_of_plain_paddle(
    one_server: LocalCluster, own_name: str
) -> None:
    with init(one_server.endpoints, job=own_name) as session:
        model = Model(Embedding(IDS, 8, name="rows"))
        optimizer = DistributedOptimizer(clipped(model, None))
        reference = reference_of(model, session)
        plain = loss_curve(reference, ClippedInTheLoop(reference, clipped(reference, None)))
        here = loss_curve(model, ClippedInTheLoop(model, optimizer))
    np.testing.assert_allclose(here, plain, rtol=CLIPPED_TOLERANCE)
