"""What PyTorch's settings become on the servers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.torch.translate import (
    base_learning_rate,
    decay_of_gradient,
    optimizer_of,
)

pytestmark = pytest.mark.torch
of = torch.optim


def parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(2))]


def twin_of(optimizer: Any) -> tables.Optimizer:
    return optimizer_of(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: of.SGD(p, 0.5), tables.SGD(0.5)),
        (
            lambda p: of.SGD(p, 0.5, momentum=0.8, nesterov=True),
            tables.Momentum(0.5, momentum=0.8, nesterov=True),
        ),
        (
            lambda p: of.Adagrad(p, 0.5, eps=1e-4, initial_accumulator_value=0.1),
            tables.Adagrad(0.5, epsilon=1e-4, initial_accumulator=0.1),
        ),
        (lambda p: of.Adagrad(p), tables.Adagrad(0.01)),
        (
            lambda p: of.Adam(p, 0.5, betas=(0.8, 0.9), eps=1e-6),
            tables.Adam(0.5, beta1=0.8, beta2=0.9, epsilon=1e-6),
        ),
        (lambda p: of.Adam(p, weight_decay=0.1), tables.Adam()),
        (lambda p: of.AdamW(p, 0.5), tables.AdamW(0.5, weight_decay=0.01)),
        (
            lambda p: of.RMSprop(p, 0.5, alpha=0.9, momentum=0.1, centered=True),
            tables.RMSProp(0.5, rho=0.9, momentum=0.1, centered=True),
        ),
        (lambda p: of.SparseAdam(p, 0.5), tables.Adam(0.5, steps="global")),
        (
            lambda p: of.Adam(p, 0.5, betas=(0.8, 0.9), eps=1e-6, amsgrad=True, weight_decay=0.1),
            tables.AMSGrad(0.5, beta1=0.8, beta2=0.9, epsilon=1e-6),
        ),
        (
            lambda p: of.AdamW(p, 0.5, amsgrad=True, weight_decay=0.1),
            tables.AMSGrad(0.5, weight_decay=0.1),
        ),
        (
            lambda p: of.Adamax(p, 0.5, betas=(0.8, 0.9), eps=1e-6),
            tables.Adamax(0.5, beta1=0.8, beta2=0.9, epsilon=1e-6),
        ),
        (lambda p: of.Adamax(p), tables.Adamax()),
        (lambda p: of.Adadelta(p, 0.5, rho=0.8, eps=1e-4), tables.Adadelta(0.5, 0.8, 1e-4)),
        (lambda p: of.Adadelta(p), tables.Adadelta()),
    ],
)
def test_optimizer(make: Any, expected: tables.Optimizer) -> None:
    assert twin_of(make(parameters())) == expected


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: of.RAdam(p), "RAdam.*SGD, Adadelta"),
        (lambda p: of.NAdam(p), "NAdam"),
        (lambda p: type("Mine", (of.SGD,), {})(p, 0.5), "Mine"),
        (lambda p: of.SGD(p, 0.5, maximize=True), "maximize=False"),
        (lambda p: of.SGD(p, 0.5, momentum=0.9, dampening=0.1), "dampening=0.0"),
        (lambda p: of.Adagrad(p, lr_decay=0.1), "lr_decay=0.0"),
        (lambda p: of.Adam(p, differentiable=True), "differentiable=False"),
        (
            lambda p: of.Adam(
                p, betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=True, foreach=False
            ),
            "betas",
        ),
    ],
)
def test_refused_optimizer(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        twin_of(make(parameters()))


def test_weight_decay_is_of_the_gradient_or_the_servers() -> None:
    def decay(optimizer: Any) -> float:
        return decay_of_gradient(optimizer, optimizer.param_groups[0])

    assert decay(of.SGD(parameters(), 0.5, weight_decay=0.25)) == 0.25
    assert decay(of.Adam(parameters(), weight_decay=0.25)) == 0.25
    assert decay(of.AdamW(parameters(), weight_decay=0.25)) == 0.0
    assert decay(of.SparseAdam(parameters())) == 0.0


def test_each_group_has_its_own_settings() -> None:
    optimizer = of.SGD(
        [
            {"params": parameters(), "lr": 0.5},
            {"params": parameters(), "momentum": 0.9},
        ],
        lr=0.1,
    )
    translated = [optimizer_of(optimizer, group) for group in optimizer.param_groups]
    assert translated == [tables.SGD(0.5), tables.Momentum(0.1, momentum=0.9)]


def test_learning_rate_of_a_scheduler_is_its_first() -> None:
    optimizer = of.SGD(parameters(), 0.5)
    of.lr_scheduler.LambdaLR(optimizer, lambda _: 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert base_learning_rate(optimizer.param_groups[0]) == 0.5
    assert base_learning_rate({"lr": torch.tensor(0.5)}) == 0.5
    assert base_learning_rate({"lr": 0.0}) == 1.0
