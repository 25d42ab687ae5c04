"""How many examples Hypothesis draws for a property: a tenth, or all of them.

`make test` draws a tenth. `make test-slow` draws all, which ``EXAMPLES=all`` asks for.
"""

from __future__ import annotations

import os

__all__ = ["examples"]

SHARE = 1.0 if os.environ.get("EXAMPLES") == "all" else 0.1
# Fewer would hardly be a property.
FEWEST = 5


def examples(count: int) -> int:
    """Return this run's part of the examples of a property.

    Args:
        count: All of them.
    """
    return max(FEWEST, round(count * SHARE))
