"""Descriptions of tables: kind, storage, initializer, optimizer, lifetime, bad gradients.

Frozen dataclasses that check themselves when they are made, with the limits that the servers
enforce; the JSON form is what travels. A description decides the content of a table given the
pushes: two servers with the same description and pushes hold the same bytes.

Imports ``backstay.errors``, and NumPy once a user function is traced; never does I/O.
docs/reference/tables.md has every formula.
"""

from __future__ import annotations

from backstay.tables.compensation import AdaptiveRevision, DelayCompensated
from backstay.tables.initializers import (
    Constant,
    Initializer,
    Normal,
    TruncatedNormal,
    Uniform,
    Xavier,
    Zeros,
)
from backstay.tables.lifetime import (
    Admission,
    AdmitAfter,
    AdmitByScore,
    AdmitWithProbability,
    Always,
    Capacity,
    Evict,
    Expiry,
    Lifetime,
    Score,
)
from backstay.tables.optimizers import (
    FTRL,
    SGD,
    Adadelta,
    Adagrad,
    AdagradDecay,
    Adam,
    Adamax,
    AdamW,
    AMSGrad,
    GroupFTRL,
    Momentum,
    Optimizer,
    RMSProp,
    RowWiseAdagrad,
    Steps,
    correction_of,
)
from backstay.tables.spec import (
    Clip,
    Compensation,
    Dense,
    Kind,
    NonFinite,
    Refuse,
    Sparse,
    Storage,
    TableSpec,
)
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
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "AdagradDecay",
    "Adam",
    "AdamW",
    "Adamax",
    "AdaptiveRevision",
    "Admission",
    "AdmissionFunction",
    "AdmitAfter",
    "AdmitByScore",
    "AdmitWithProbability",
    "Always",
    "Capacity",
    "Clip",
    "Compensation",
    "Constant",
    "DelayCompensated",
    "Dense",
    "Evict",
    "Expiry",
    "GroupFTRL",
    "Initializer",
    "Kind",
    "Lifetime",
    "Momentum",
    "NonFinite",
    "Normal",
    "Optimizer",
    "PullFunction",
    "RMSProp",
    "Refuse",
    "RowWiseAdagrad",
    "Score",
    "ScoreFunction",
    "Sparse",
    "State",
    "Steps",
    "Storage",
    "TableSpec",
    "TruncatedNormal",
    "Uniform",
    "UserOptimizer",
    "Xavier",
    "Zeros",
    "correction_of",
    "per_element",
    "per_row",
]
