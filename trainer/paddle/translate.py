"""Translates Paddle's optimizers and initializers to the servers'.

Pure: values in, values out. May import paddle and the table description; never a client.
What a server cannot do the same way is refused, so that no setting is dropped in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import paddle
from paddle.optimizer import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Momentum,
    Optimizer,
    RMSProp,
)
from paddle.optimizer.lr import LRScheduler

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.adapter.translation import rate_of_table, translation_of

__all__ = ["base_learning_rate", "initializer_of", "optimizer_of"]

SUPPORTED_INITIALIZERS = (
    "Constant, Uniform, Normal, TruncatedNormal, XavierUniform and XavierNormal"
)
# A normal value is farther out than this about once in two million: no cut at all.
UNCUT_STD = 5.0


def base_learning_rate(optimizer: Optimizer) -> float:
    """Return the rate that is written into the tables."""
    rate = optimizer._learning_rate
    return rate_of_table(float(rate.base_lr if isinstance(rate, LRScheduler) else rate))


def optimizer_of(
    optimizer: Optimizer, *, rate: float, decay: bool = True, sparse: bool = False
) -> tables.Optimizer:
    """Return the table optimizer that does what a Paddle optimizer does.

    Args:
        optimizer: One of the keys of ``_TRANSLATIONS``.
        rate: The learning rate to write into it.
        decay: False: without AdamW's weight decay.
        sparse: For the rows of an embedding: Adam's ``lazy_mode`` counts.

    Raises:
        ConfigError: Another optimizer, or a setting that the servers do not have.
    """
    if getattr(optimizer, "_lr_ratio", None) is not None:
        raise ConfigError("AdamW(lr_ratio=...) is not supported; use ParamAttr(learning_rate=...)")
    translation = translation_of(_TRANSLATIONS, optimizer, "paddle.optimizer")
    if type(optimizer) is AdamW and not decay:
        translation = _adam
    translated = translation(optimizer, rate)
    if isinstance(translated, tables.Adam) and sparse and optimizer._lazy_mode:
        # Dense parameters have every gradient in each step, whatever lazy_mode says.
        return replace(translated, steps="global")
    return translated


def _momentum(optimizer: Optimizer, rate: float) -> tables.Optimizer:
    if optimizer._rescale_grad != 1.0:
        raise ConfigError("Momentum(rescale_grad=...) is not supported; scale the loss")
    return tables.Momentum(rate, momentum=optimizer._momentum, nesterov=optimizer._use_nesterov)


def _adam(optimizer: Optimizer, rate: float) -> tables.Optimizer:
    return (tables.AMSGrad if optimizer._amsgrad else tables.Adam)(rate, **_moments(optimizer))


def _adamw(optimizer: Optimizer, rate: float) -> tables.Optimizer:
    kind = tables.AMSGrad if optimizer._amsgrad else tables.AdamW
    return kind(rate, **_moments(optimizer), weight_decay=optimizer._weight_decay)


def _rmsprop(optimizer: Optimizer, rate: float) -> tables.Optimizer:
    return tables.RMSProp(
        rate,
        rho=optimizer._rho,
        epsilon=optimizer._epsilon,
        momentum=optimizer._momentum,
        centered=optimizer._centered,
        epsilon_inside_sqrt=True,  # Paddle's form; PyTorch adds it outside
    )


def _moments(optimizer: Optimizer) -> dict[str, Any]:
    moments = {name: getattr(optimizer, f"_{name}") for name in ("beta1", "beta2", "epsilon")}
    for name, value in moments.items():
        if not isinstance(value, int | float):
            raise ConfigError(f"{_name(optimizer)}: {name} is a tensor; pass a number")
    return {name: float(value) for name, value in moments.items()}


_TRANSLATIONS: dict[type, Callable[[Optimizer, float], tables.Optimizer]] = {
    SGD: lambda _, rate: tables.SGD(rate),
    Momentum: _momentum,
    Adadelta: lambda optimizer, rate: tables.Adadelta(
        rate, rho=optimizer._rho, epsilon=optimizer._epsilon
    ),
    Adagrad: lambda optimizer, rate: tables.Adagrad(
        rate, epsilon=optimizer._epsilon, initial_accumulator=optimizer.initial_accumulator_value
    ),
    Adam: _adam,
    Adamax: lambda optimizer, rate: tables.Adamax(
        rate, **_moments(optimizer), epsilon_on_maximum=True
    ),
    AdamW: _adamw,
    RMSProp: _rmsprop,
}


def initializer_of(weight_attr: Any, num_embeddings: int | None, dim: int) -> tables.Initializer:
    """Return the table initializer that does what the one in ``weight_attr`` does.

    None stands for Paddle's default, XavierUniform over [num_embeddings, dim]; where
    ``num_embeddings`` is None too, for uniform within +-0.05.

    Raises:
        ConfigError: Another initializer, or a Xavier form without the number of rows.
    """
    initializer = None
    if weight_attr is not None:
        initializer = paddle.ParamAttr._to_attr(weight_attr).initializer
    known = paddle.nn.initializer
    if initializer is None:
        if num_embeddings is None:
            return tables.Uniform(-0.05, 0.05)
        return tables.Xavier(fan_in=num_embeddings, fan_out=dim)
    if isinstance(initializer, known.Constant):
        return tables.Constant(float(initializer._value))
    if isinstance(initializer, known.Uniform):
        return tables.Uniform(float(initializer._low), float(initializer._high))
    if isinstance(initializer, known.Normal):
        return tables.Normal(float(initializer._mean), float(initializer._std_dev))
    if isinstance(initializer, known.TruncatedNormal):
        return _truncated(initializer)
    if isinstance(initializer, known.XavierUniform | known.XavierNormal):
        return _xavier(initializer, num_embeddings, dim)
    raise ConfigError(
        f"weight_attr asks for {_name(initializer)}, which the servers do not have; they have "
        f"{SUPPORTED_INITIALIZERS}"
    )


def _truncated(initializer: Any) -> tables.Initializer:
    """Paddle cuts at the absolute values a and b (-2 and 2), the servers at two deviations."""
    mean, std = float(initializer._mean), float(initializer._std_dev)
    below, above = mean - initializer._a, initializer._b - mean
    if min(below, above) >= UNCUT_STD * std:
        return tables.Normal(mean, std)
    if math.isclose(below, 2 * std, rel_tol=1e-6) and math.isclose(above, 2 * std, rel_tol=1e-6):
        return tables.TruncatedNormal(mean, std)
    raise ConfigError(
        f"TruncatedNormal(mean={mean}, std={std}) cut at {initializer._a} and {initializer._b}: "
        f"the servers cut at two deviations; pass a={mean - 2 * std:g}, b={mean + 2 * std:g}"
    )


def _xavier(initializer: Any, num_embeddings: int | None, dim: int) -> tables.Initializer:
    fan_in = num_embeddings if initializer._fan_in is None else initializer._fan_in
    fan_out = dim if initializer._fan_out is None else initializer._fan_out
    if fan_in is None:
        raise ConfigError(
            f"{_name(initializer)} depends on the number of rows: give num_embeddings, or "
            "fan_in= in the initializer"
        )
    return tables.Xavier(
        fan_in=int(fan_in),
        fan_out=int(fan_out),
        gain=float(initializer._gain),
        distribution="uniform" if initializer._uniform else "normal",
    )


def _name(thing: Any) -> str:
    return f"paddle {type(thing).__name__}"
