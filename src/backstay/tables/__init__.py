"""Descriptions of tables: kind, storage, initializer, optimizer, policy for bad gradients.

Frozen dataclasses that check themselves when they are made, with the limits that the servers
enforce; the JSON form is what travels. A description decides the content of a table given the
pushes: two servers with the same description and pushes hold the same bytes.

Imports ``backstay.errors``, and NumPy once a user function is traced; never does I/O.
docs/reference/tables.md has every formula.
"""

from __future__ import annotations

from backstay.tables.initializers import (
    Constant,
    Initializer,
    Normal,
    TruncatedNormal,
    Uniform,
    Xavier,
    Zeros,
)
from backstay.tables.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    Optimizer,
    RMSProp,
)
from backstay.tables.spec import Clip, Dense, Kind, NonFinite, Refuse, Sparse, Storage, TableSpec
from backstay.tables.user import (
    AdmissionFunction,
    PullFunction,
    ScoreFunction,
    State,
    UserOptimizer,
    per_element,
    per_row,
)

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdmissionFunction",
    "Clip",
    "Constant",
    "Dense",
    "Initializer",
    "Kind",
    "Momentum",
    "NonFinite",
    "Normal",
    "Optimizer",
    "PullFunction",
    "RMSProp",
    "Refuse",
    "ScoreFunction",
    "Sparse",
    "State",
    "Storage",
    "TableSpec",
    "TruncatedNormal",
    "Uniform",
    "UserOptimizer",
    "Xavier",
    "Zeros",
    "per_element",
    "per_row",
]
