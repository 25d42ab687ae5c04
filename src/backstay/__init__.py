"""backstay: a replicated, consistent, elastic parameter-server cluster.

``train``, ``submit`` and ``Job`` are those of ``backstay.jobs_api``. The package imports them when
a program uses one: workers and servers do without. ``__init__.pyi`` has their types.
"""

from __future__ import annotations

import importlib
from typing import Any

from backstay._version import __version__

__all__ = ["Job", "__version__", "submit", "train"]


def __getattr__(name: str) -> Any:
    """Return what ``backstay.jobs_api`` has of this name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("backstay.jobs_api"), name)
