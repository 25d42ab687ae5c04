"""Descriptions of tables: kind, storage, initializer, optimizer, lifetime, bad gradients.

Frozen dataclasses that the core checks when they are made; the JSON form is what travels. A
description decides the content of a table given the pushes: two servers with the same description
and pushes hold the same bytes.

Imports ``backstay._native`` and ``backstay.errors``, and NumPy to trace a user function; never
does I/O. docs/reference/tables.md has every formula.
"""

from __future__ import annotations

from backstay.tables import optimizers
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
from backstay.tables.optimizers import *  # noqa: F403  # an optimizer is named in its file only
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
    "Initializer",
    "Kind",
    "Lifetime",
    "NonFinite",
    "Normal",
    "PullFunction",
    "Refuse",
    "Score",
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
__all__ += optimizers.__all__
