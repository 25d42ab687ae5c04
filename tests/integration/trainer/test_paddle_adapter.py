"""What only the Paddle adapter has, against real servers; see test_adapter.py for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from backstay.errors import ConfigError
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.paddle import DistributedOptimizer, Embedding, Session, init

pytestmark = pytest.mark.paddle


@pytest.fixture
def session(one_server: LocalCluster, own_name: str) -> Iterator[Session]:
    """A session whose tables no other test has seen."""
    with init(one_server.endpoints, trainer_id=0, trainers_num=1, job=own_name) as opened:
        yield opened


def sgd(*layers: Any, rate: Any = 0.5) -> Any:
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return paddle.optimizer.SGD(rate, parameters=parameters)


def rows_of(session: Session, layer: Any, ids: Any) -> Any:
    return session.client.pull(layer.table_name, np.asarray(ids, np.int64))


def test_parameter_learning_rates_and_a_scheduler(session: Session) -> None:
    scheduler = paddle.optimizer.lr.ExponentialDecay(0.5, gamma=0.5)
    half = paddle.ParamAttr(learning_rate=0.5)
    layer = Embedding(None, 2, weight_attr=half)
    dense = paddle.nn.Linear(2, 1, weight_attr=half)
    optimizer = DistributedOptimizer(sgd(layer, dense, rate=scheduler))
    scheduler.step()
    assert optimizer.get_lr() == 0.25
    rows, weight = rows_of(session, layer, [1]), dense.weight.numpy().copy()
    bias = dense.bias.numpy().copy()
    output = layer(paddle.to_tensor([1]))
    (output.sum() + dense(paddle.ones([1, 2])).sum()).backward()
    optimizer.step()
    np.testing.assert_allclose(rows_of(session, layer, [1]), rows - 0.125, rtol=1e-6)
    np.testing.assert_allclose(dense.weight.numpy(), weight - 0.125, rtol=1e-6)
    np.testing.assert_allclose(dense.bias.numpy(), bias - 0.25, rtol=1e-6)


def test_decay_and_clipping_of_dense_parameters_are_paddles(session: Session) -> None:
    layers = [paddle.nn.Linear(3, 2), paddle.nn.Linear(3, 2)]
    updates = []
    layers[1].set_state_dict(layers[0].state_dict())
    for layer in layers:
        clip = paddle.nn.ClipGradByGlobalNorm(0.5)
        updates.append(
            paddle.optimizer.SGD(0.5, layer.parameters(), weight_decay=0.1, grad_clip=clip)
        )
    updates[0] = DistributedOptimizer(updates[0])
    for layer, update in zip(layers, updates, strict=True):
        layer(paddle.ones([4, 3])).square().sum().backward()
        update.step()
    np.testing.assert_allclose(layers[0].weight.numpy(), layers[1].weight.numpy(), rtol=1e-6)


def test_minimize_is_a_step(session: Session) -> None:
    layer, dense = Embedding(None, 2), paddle.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(sgd(layer, dense, rate=0.01), steps_in_flight=3)
    rows, bias = rows_of(session, layer, [1]), dense.bias.numpy().copy()
    for _ in range(10):
        output = layer(paddle.to_tensor([1]))
        (output.sum() + dense(output.detach()).sum()).backward()
        optimizer.minimize(output)
    optimizer.synchronize()
    np.testing.assert_allclose(rows_of(session, layer, [1]), rows - 0.1, rtol=1e-5)
    np.testing.assert_allclose(dense.bias.numpy(), bias - 0.1, rtol=1e-5)


def test_minimize_takes_no_argument_in_silence(session: Session) -> None:
    layer = paddle.nn.Linear(2, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    loss = layer(paddle.ones([1, 2])).sum()
    with pytest.raises(ConfigError, match="parameters"):
        optimizer.minimize(loss, parameters=layer.parameters())
    with pytest.raises(TypeError):
        optimizer.minimize(loss, whatever=1)  # type: ignore[call-arg]
