"""Translates PyTorch's optimizers to the servers'.

Pure: values in, values out. May import torch and the table description; never a client.
What a server cannot do the same way is refused, so that no setting is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop, SparseAdam

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.adapter.translation import rate_of_table, translation_of

__all__ = ["base_learning_rate", "decay_of_gradient", "optimizer_of"]

# One of an optimizer's ``param_groups``.
Group: TypeAlias = Mapping[str, Any]

# Switches that change what an optimizer computes, and the only value that the servers know.
_SWITCHES: dict[str, Any] = {
    "maximize": False,
    "differentiable": False,
    "dampening": 0.0,
    "lr_decay": 0.0,
}


def base_learning_rate(group: Group) -> float:
    """Return the rate that is written into the tables."""
    return rate_of_table(float(group.get("initial_lr", group["lr"])))


def optimizer_of(optimizer: torch.optim.Optimizer, group: Group) -> tables.Optimizer:
    """Return the table optimizer that does what a PyTorch one does with a ``param_groups`` entry.

    Weight decay that is added to the gradient is not in it; see ``decay_of_gradient``.

    Args:
        optimizer: One of the keys of ``_TRANSLATIONS``.
        group: Its settings; the learning rate is ``base_learning_rate(group)``.

    Raises:
        ConfigError: Another optimizer, or a setting that the servers do not have.
    """
    name = f"torch.optim.{type(optimizer).__name__}"
    for switch, allowed in _SWITCHES.items():
        if group.get(switch, allowed) != allowed:
            raise ConfigError(
                f"{name}({switch}={group[switch]}) does not run on the servers; "
                f"use {switch}={allowed}"
            )
    if not all(isinstance(beta, int | float) for beta in group.get("betas", ())):
        raise ConfigError(f"{name}: betas has a tensor; pass numbers")
    translation = translation_of(_TRANSLATIONS, optimizer, "torch.optim")
    return translation(group, base_learning_rate(group))


def decay_of_gradient(optimizer: torch.optim.Optimizer, group: Group) -> float:
    """Return the factor of the weights that this optimizer adds to their gradient (L2)."""
    if type(optimizer) is AdamW or group.get("decoupled_weight_decay", False):
        return 0.0
    return float(group.get("weight_decay", 0.0))


def _sgd(group: Group, rate: float) -> tables.Optimizer:
    if group["momentum"] == 0.0:
        return tables.SGD(rate)
    return tables.Momentum(rate, momentum=group["momentum"], nesterov=group["nesterov"])


def _adam(group: Group, rate: float) -> tables.Optimizer:
    if group.get("decoupled_weight_decay", False):
        return _adamw(group, rate)
    return (tables.AMSGrad if group["amsgrad"] else tables.Adam)(rate, **_moments(group))


def _adamw(group: Group, rate: float) -> tables.Optimizer:
    kind = tables.AMSGrad if group["amsgrad"] else tables.AdamW
    return kind(rate, **_moments(group), weight_decay=group["weight_decay"])


def _rmsprop(group: Group, rate: float) -> tables.Optimizer:
    return tables.RMSProp(
        rate,
        rho=group["alpha"],
        epsilon=group["eps"],
        momentum=group["momentum"],
        centered=group["centered"],
    )


def _moments(group: Group) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2), "epsilon": group["eps"]}


_TRANSLATIONS: dict[type, Callable[[Group, float], tables.Optimizer]] = {
    SGD: _sgd,
    Adadelta: lambda group, rate: tables.Adadelta(rate, rho=group["rho"], epsilon=group["eps"]),
    Adagrad: lambda group, rate: tables.Adagrad(
        rate, epsilon=group["eps"], initial_accumulator=group["initial_accumulator_value"]
    ),
    Adam: _adam,
    Adamax: lambda group, rate: tables.Adamax(rate, **_moments(group)),
    AdamW: _adamw,
    RMSprop: _rmsprop,
    # It counts the steps of the whole parameter.
    SparseAdam: lambda group, rate: tables.Adam(rate, **_moments(group), steps="global"),
}
