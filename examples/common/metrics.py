"""The judges of the examples: those of backstay's own jobs.

May import backstay's metrics only.
"""

from __future__ import annotations

from backstay.trainer.metrics import auc, logloss

__all__ = ["auc", "logloss"]
