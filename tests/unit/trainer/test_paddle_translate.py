"""What Paddle's settings become on the servers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

paddle = pytest.importorskip("paddle")

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.paddle.translate import (
    base_learning_rate,
    initializer_of,
    optimizer_of,
)

pytestmark = pytest.mark.paddle


@pytest.fixture(scope="module")
def parameters() -> Any:
    return paddle.nn.Linear(2, 1).parameters()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda of, p: of.SGD(0.5, p), tables.SGD(0.5)),
        (
            lambda of, p: of.Momentum(0.5, 0.8, p, use_nesterov=True),
            tables.Momentum(0.5, momentum=0.8, nesterov=True),
        ),
        (
            lambda of, p: of.Adagrad(0.5, epsilon=1e-4, parameters=p),
            tables.Adagrad(0.5, epsilon=1e-4),
        ),
        (
            lambda of, p: of.Adam(0.5, beta1=0.8, epsilon=1e-6, parameters=p),
            tables.Adam(0.5, beta1=0.8, epsilon=1e-6),
        ),
        (
            lambda of, p: of.AdamW(0.5, weight_decay=0.1, parameters=p),
            tables.AdamW(0.5, weight_decay=0.1),
        ),
        (lambda of, p: of.Adam(0.5, amsgrad=True, parameters=p), tables.AMSGrad(0.5)),
        (
            lambda of, p: of.AdamW(0.5, amsgrad=True, weight_decay=0.1, parameters=p),
            tables.AMSGrad(0.5, weight_decay=0.1),
        ),
        (
            lambda of, p: of.Adamax(0.5, beta1=0.8, epsilon=1e-6, parameters=p),
            tables.Adamax(0.5, beta1=0.8, epsilon=1e-6, epsilon_on_maximum=True),
        ),
        (
            lambda of, p: of.Adadelta(0.5, epsilon=1e-4, rho=0.8, parameters=p),
            tables.Adadelta(0.5, rho=0.8, epsilon=1e-4),
        ),
        (
            lambda of, p: of.RMSProp(0.5, rho=0.9, momentum=0.1, centered=True, parameters=p),
            tables.RMSProp(
                0.5, rho=0.9, epsilon=1e-6, momentum=0.1, centered=True, epsilon_inside_sqrt=True
            ),
        ),
    ],
)
def test_optimizer(parameters: Any, make: Any, expected: tables.Optimizer) -> None:
    assert optimizer_of(make(paddle.optimizer, parameters), rate=0.5) == expected


def test_adamw_without_decay_is_adam(parameters: Any) -> None:
    adamw = paddle.optimizer.AdamW(0.5, parameters=parameters)
    assert optimizer_of(adamw, rate=0.5, decay=False) == tables.Adam(0.5)


def test_lazy_mode_is_of_rows(parameters: Any) -> None:
    lazy = paddle.optimizer.Adam(0.5, lazy_mode=True, parameters=parameters)
    assert optimizer_of(lazy, rate=0.5, sparse=True) == tables.Adam(0.5, steps="global")
    assert optimizer_of(lazy, rate=0.5) == tables.Adam(0.5)
    eager = paddle.optimizer.Adam(0.5, parameters=parameters)
    assert optimizer_of(eager, rate=0.5, sparse=True) == tables.Adam(0.5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda of, p: of.Lamb(0.5, parameters=p), "Lamb"),
        (lambda of, p: of.Adam(0.5, beta1=paddle.ones([1]), parameters=p), "beta1"),
        (lambda of, p: of.Momentum(0.5, rescale_grad=2.0, parameters=p), "rescale_grad"),
    ],
)
def test_refused_optimizer(parameters: Any, make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        optimizer_of(make(paddle.optimizer, parameters), rate=0.5)


def test_learning_rate_of_a_scheduler_is_its_first(parameters: Any) -> None:
    scheduler = paddle.optimizer.lr.ExponentialDecay(0.5, gamma=0.1)
    optimizer = paddle.optimizer.SGD(scheduler, parameters)
    scheduler.step()
    assert base_learning_rate(optimizer) == 0.5
    warm_up = paddle.optimizer.lr.LinearWarmup(0.5, 10, 0.0, 0.5)
    assert base_learning_rate(paddle.optimizer.SGD(warm_up, parameters)) == 1.0


@pytest.mark.parametrize(
    ("make", "rows", "expected"),
    [
        (lambda of: None, None, tables.Uniform(-0.05, 0.05)),
        (lambda of: None, 100, tables.Xavier(fan_in=100, fan_out=4)),
        (lambda of: of.Constant(0.25), None, tables.Constant(0.25)),
        (lambda of: of.Uniform(-1.0, 2.0), None, tables.Uniform(-1.0, 2.0)),
        (lambda of: of.Normal(0.5, 0.25), None, tables.Normal(0.5, 0.25)),
        (lambda of: of.TruncatedNormal(), None, tables.TruncatedNormal(0.0, 1.0)),
        # Paddle cuts at +-2 whatever the deviation: with this one, nowhere.
        (lambda of: of.TruncatedNormal(0.0, 0.01), None, tables.Normal(0.0, 0.01)),
        (
            lambda of: of.TruncatedNormal(0.0, 0.01, a=-0.02, b=0.02),
            None,
            tables.TruncatedNormal(0.0, 0.01),
        ),
        (
            lambda of: of.XavierNormal(fan_in=8, fan_out=2),
            None,
            tables.Xavier(fan_in=8, fan_out=2, distribution="normal"),
        ),
        (lambda of: of.XavierUniform(gain=2.0), 8, tables.Xavier(fan_in=8, fan_out=4, gain=2.0)),
    ],
)
def test_initializer(make: Any, rows: int | None, expected: tables.Initializer) -> None:
    assert initializer_of(make(paddle.nn.initializer), rows, 4) == expected


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda of: of.KaimingNormal(), "KaimingNormal.*Constant, Uniform"),
        (lambda of: of.XavierUniform(), "num_embeddings"),
        (lambda of: of.TruncatedNormal(0.0, 1.0, a=-1.0, b=1.0), "two deviations"),
    ],
)
def test_refused_initializer(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        initializer_of(paddle.ParamAttr(initializer=make(paddle.nn.initializer)), None, 4)
