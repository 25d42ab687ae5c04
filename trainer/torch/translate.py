"""Translates PyTorch's optimizers to the servers'.

Pure: values in, values out. May import torch and the table description; never a client.
What a server cannot do the same way is refused, so that no setting is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from backstay import tables
from backstay.errors import ConfigError

__all__ = ["base_learning_rate", "decay_of_gradient", "optimizer_of"]

SUPPORTED_OPTIMIZERS = "SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop and SparseAdam"
# Switches that change what an optimizer computes, and the only value that the servers know.
_SWITCHES: dict[str, Any] = {
    "maximize": False,
    "differentiable": False,
    "dampening": 0.0,
    "lr_decay": 0.0,
}


def base_learning_rate(group: Mapping[str, Any]) -> float:
    """Return the rate that is written into the tables; each push scales it to the current one.

    It must be the same in every trainer, whenever it joins, so it is the scheduler's first rate
    and not its current one; 1.0 where that is 0 (warm-up).

    Args:
        group: One of the optimizer's ``param_groups``.
    """
    rate = float(group.get("initial_lr", group["lr"]))
    return rate if rate > 0.0 else 1.0


def optimizer_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tables.Optimizer:
    """Return the table optimizer that does what a PyTorch one does with a ``param_groups`` entry.

    Weight decay that is added to the gradient is not in it; see ``decay_of_gradient``.

    Args:
        optimizer: One of SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop, SparseAdam.
        group: Its settings; the learning rate is ``base_learning_rate(group)``.

    Raises:
        ConfigError: Another optimizer, or a setting that the servers do not have.
    """
    of = torch.optim
    for name, allowed in _SWITCHES.items():
        if group.get(name, allowed) != allowed:
            raise ConfigError(
                f"{_name(optimizer)}({name}={group[name]}) does not run on the servers; "
                f"use {name}={allowed}"
            )
    rate = base_learning_rate(group)
    # The exact class counts: a subclass may compute something else.
    kind = type(optimizer)
    if kind is of.SGD:
        if group["momentum"] == 0.0:
            return tables.SGD(rate)
        return tables.Momentum(rate, momentum=group["momentum"], nesterov=group["nesterov"])
    if kind is of.Adagrad:
        return tables.Adagrad(
            rate, epsilon=group["eps"], initial_accumulator=group["initial_accumulator_value"]
        )
    if kind in (of.Adam, of.AdamW, of.SparseAdam):
        return _adam_of(optimizer, group, rate)
    if kind is of.Adamax:
        return tables.Adamax(rate, **_betas(optimizer, group), epsilon=group["eps"])
    if kind is of.Adadelta:
        return tables.Adadelta(rate, rho=group["rho"], epsilon=group["eps"])
    if kind is of.RMSprop:
        return tables.RMSProp(
            rate,
            rho=group["alpha"],
            epsilon=group["eps"],
            momentum=group["momentum"],
            centered=group["centered"],
        )
    raise ConfigError(f"{_name(optimizer)} does not run on the servers; {SUPPORTED_OPTIMIZERS} do")


def _adam_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rate: float
) -> tables.Optimizer:
    adam = {**_betas(optimizer, group), "epsilon": group["eps"]}
    decay = {"weight_decay": group["weight_decay"]} if _decoupled(optimizer, group) else {}
    if group.get("amsgrad", False):
        return tables.AMSGrad(rate, **adam, **decay)
    if decay:
        return tables.AdamW(rate, **adam, **decay)
    # SparseAdam counts the steps of the whole parameter.
    is_sparse = type(optimizer) is torch.optim.SparseAdam
    return tables.Adam(rate, **adam, steps="global" if is_sparse else "row")


def _betas(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {
        "beta1": _number(optimizer, "betas", beta1),
        "beta2": _number(optimizer, "betas", beta2),
    }


def decay_of_gradient(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Return the factor of the weights that this optimizer adds to their gradient (L2)."""
    return 0.0 if _decoupled(optimizer, group) else float(group.get("weight_decay", 0.0))


def _decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether weight decay is AdamW's, which the servers do."""
    return type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay", False))


def _number(optimizer: torch.optim.Optimizer, name: str, value: Any) -> float:
    if not isinstance(value, int | float):
        raise ConfigError(f"{_name(optimizer)}: {name} has a tensor; pass numbers")
    return float(value)


def _name(optimizer: torch.optim.Optimizer) -> str:
    return f"torch.optim.{type(optimizer).__name__}"
